//! A VM that plays a host: it has an IOMMU, its kernel has VFIO, and it runs QEMU with
//! nested guests.
//!
//! The nested guests run on KVM where the VM has it. An emulated VM does: QEMU's
//! TCG emulates AMD's virtualization, nested page tables included, and so a nested
//! guest is translated once, not twice: it boots in two seconds, not in eighty.

mod channels;
mod evidence;
mod nested;
mod ssh;

use std::ops::Deref;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};

pub(crate) use channels::args as channel_args;
pub use nested::{Expected, Nested, NestedBuilder};
pub use ssh::acquaint;

use crate::tools_disk;
use crate::vm::{Vm, VmBuilder};

/// Timeout of short operations in an emulated VM on a loaded machine.
const SHORT: Duration = Duration::from_secs(60);

/// A VM that plays a host; see [`VmBuilder::launch_host`].
#[derive(Debug)]
pub struct HostVm {
    vm: Vm,
    kvm: bool,
    /// Channels to nested guests that are not in use.
    free: Mutex<Vec<u32>>,
}

impl VmBuilder {
    /// Starts the machine, waits for its agent, mounts tracefs at `/sys/kernel/tracing`,
    /// and loads the modules of VFIO, unless it is built in. With nested guests, mounts the
    /// disk with QEMU and OpenSSH at `/tools`, links QEMU into the `PATH`, and loads the
    /// modules of KVM where available.
    pub fn launch_host(&self, timeout: Duration) -> Result<HostVm> {
        let vm = self.launch()?;
        vm.wait_agent(timeout)?;
        let printed = vm
            .exec_ok(&set_up_script(self.nested_count()), SHORT)
            .context("setting up a VM that plays a host")?;
        Ok(HostVm {
            kvm: printed.contains("has-kvm"),
            vm,
            free: Mutex::new((0..self.nested_count()).rev().collect()),
        })
    }
}

fn set_up_script(guests: u32) -> String {
    let mut script = "set -e
        mount -t tracefs tracefs /sys/kernel/tracing
        [ -e /sys/bus/pci/drivers/vfio-pci ] || modprobe -a vfio_pci vfio_iommu_type1\n"
        .to_owned();
    if guests > 0 {
        script += &channels::link_script(guests);
        script += &format!(
            "modprobe -a virtio_blk ext4
        for disk in /sys/block/vd*; do
            [ \"$(cat $disk/serial)\" = {serial} ] || continue
            mkdir -p {mount}
            mount -t ext4 -o ro /dev/${{disk##*/}} {mount}
        done
        ln -s {qemu} /usr/bin
        modprobe kvm_amd 2>/dev/null || modprobe kvm_intel 2>/dev/null || true
        [ ! -e /dev/kvm ] || echo has-kvm",
            serial = channels::TOOLS_SERIAL,
            mount = tools_disk::MOUNT,
            qemu = tools_disk::QEMU,
        );
    }
    script
}

impl HostVm {
    /// Whether its guests run on KVM; otherwise they are emulated, and slow.
    pub fn has_kvm(&self) -> bool {
        self.kvm
    }

    /// Binds a PCI function (such as `0000:00:04.0`) to a driver, exclusively
    /// (`driver_override`).
    pub fn bind(&self, bdf: &str, driver: &str) -> Result<()> {
        let script = format!(
            "set -e
            device=/sys/bus/pci/devices/{bdf}
            [ ! -e $device/driver ] || echo {bdf} >$device/driver/unbind
            echo {driver} >$device/driver_override
            echo {bdf} >/sys/bus/pci/drivers_probe
            [ \"$(basename $(readlink $device/driver))\" = {driver} ]"
        );
        self.exec_ok(&script, SHORT)
            .with_context(|| format!("binding {bdf} to {driver}"))
            .map(drop)
    }

    /// A new guest in this VM: Q35, one CPU, 256 MiB of shared memory.
    pub fn guest(&self, name: &str) -> NestedBuilder<'_> {
        NestedBuilder::new(self, name)
    }

    /// Powers the VM off from within, and waits until QEMU has ended, successfully.
    pub fn shutdown(self, timeout: Duration) -> Result<()> {
        self.vm.shutdown(timeout)
    }

    /// Kills QEMU, as at a power loss, and waits for its end.
    pub fn kill(self) -> Result<()> {
        self.vm.kill().map(drop)
    }

    fn take_slot(&self) -> Result<u32> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.pop().with_context(|| {
            format!(
                "VM {}: all its channels to nested guests are in use: \
                 VmBuilder::nested_guests says how many there are",
                self.name()
            )
        })
    }

    fn give_slot(&self, slot: u32) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(slot);
    }
}

impl Deref for HostVm {
    type Target = Vm;

    fn deref(&self) -> &Vm {
        &self.vm
    }
}
