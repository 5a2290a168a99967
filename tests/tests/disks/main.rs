//! Disks of VMs without a guest: a driver of ours does the I/O.

mod shares;
mod volumes;

use std::time::Duration;

use anyhow::Result;
use farside_scripted_vmm::{
    device::Device,
    machine::Machine,
    pci,
    ram::{Layout, Ram},
    vectors::Vectors,
};
use farside_tests::{Cluster, MIB};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A VM that has borrowed `disk`.
fn boot(cluster: &Cluster, vm: &str, disk: &str) -> Result<Machine> {
    let socket = format!("vm/{vm}/{disk}.sock");
    let mut device = Device::connect(&cluster.directory().join(socket), TIMEOUT)?;
    let ram = Ram::new(Layout::new(4 * MIB, None, false)?)?;
    let vectors = Vectors::new(device.vectors())?;
    for block in ram.layout().blocks() {
        device.map(&ram, block)?;
    }
    device.reset()?;
    pci::place_bars(&mut device)?;
    device.enable_vectors(&vectors)?;
    pci::enable_msix(&mut device, true)?;
    pci::set_command(&mut device, pci::MEMORY | pci::BUS_MASTER)?;
    Ok(Machine {
        vectors,
        ram,
        device,
        timeout: TIMEOUT,
        early_interrupts: 0,
    })
}
