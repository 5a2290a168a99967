//! When the device can access guest RAM, and when nothing is pinned.

use std::time::{Duration, Instant};

use anyhow::ensure;
use farside_qemu_configs::{Device, Vm as VmConfig, qemu_id};
use farside_tests::{BOOT, BorrowState, Cluster, DmaTester, Guest, MIB, NVME, SHORT, Width};
use libtest_mimic::Completion;
use serde_json::json;

use crate::{check, passed};

const DISK: &str = "/dev/nvme0n1";

/// Bytes of the DMA test device's memory, which the disk reaches, too.
const MEMORY: u64 = 64 << 10;

pub fn nothing_is_pinned_before_bus_master_enable_and_after_its_end(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("a", &["disk0", "dma0"]).start()?;
    for device in ["disk0", "dma0"] {
        let borrow = cluster.status()?.borrow("a", device)?;
        ensure!(
            borrow.state == BorrowState::Unleased && borrow.is_closed(),
            "{borrow:?}"
        );
    }
    let guest = cluster
        .guest("a")
        .whole()
        .without_module("nvme")
        .paused()
        .start()?;
    // QEMU has reset it and mapped all memory; no CPU has run.
    let first = check::closed(cluster, "a", "disk0")?;
    guest.qmp().execute("cont", json!({}))?;
    guest.wait_agent(BOOT)?;
    // The guest has not used this device.
    check::closed(cluster, "a", "dma0")?;
    // The firmware may have changed this one: check against its register.
    let bdf = guest.find(NVME)?;
    let after_firmware = match guest.config_read(&bdf, 4, Width::U16)? & 4 {
        0 => check::closed(cluster, "a", "disk0")?,
        _ => check::open_with_bars(cluster, &guest, "disk0", 2, MEMORY)?,
    };
    ensure!(
        after_firmware.bytes_pinned_before_bme == 0,
        "{after_firmware:?}"
    );

    guest.sh("modprobe nvme")?;
    guest.wait_disk()?;
    let borrow = check::open_with_bars(cluster, &guest, "disk0", 2, MEMORY)?;
    ensure!(borrow.bytes_pinned_before_bme == 0, "{borrow:?}");
    ensure!(borrow.bme_to_ready_us > 0, "{borrow:?}");
    check::closed(cluster, "a", "dma0")?;

    the_guest_lets_the_drive_go(cluster, &guest, &bdf)?;
    registers_end_dma(cluster, &guest)?;

    let last = check::open_with_bars(cluster, &guest, "disk0", 2, MEMORY)?;
    ensure!(
        last.generation == first.generation,
        "one lease all along: {last:?}"
    );
    check::no_faults(cluster, &["disk0", "dma0"])?;
    guest.power_off()?;
    for device in ["disk0", "dma0"] {
        cluster.wait_free(device)?;
        let borrow = cluster.wait_state("a", device, BorrowState::Unleased)?;
        ensure!(borrow.is_closed(), "{borrow:?}");
    }
    passed()
}

/// Driver unbind, removal and reset through the guest's sysfs.
fn the_guest_lets_the_drive_go(
    cluster: &Cluster,
    guest: &Guest<'_>,
    bdf: &str,
) -> anyhow::Result<()> {
    let device = format!("/sys/bus/pci/devices/{bdf}");
    let driver = "/sys/bus/pci/drivers/nvme";
    let back = || -> anyhow::Result<()> {
        guest.wait_disk()?;
        check::open_with_bars(cluster, guest, "disk0", 2, MEMORY)?;
        check::io(guest, DISK, 10)
    };

    guest.sh(&format!("echo {bdf} >{driver}/unbind"))?;
    check::closed(cluster, "a", "disk0")?;
    // A reset of a function without driver leaves it closed.
    guest.sh(&format!("echo 1 >{device}/reset"))?;
    check::closed(cluster, "a", "disk0")?;
    guest.sh(&format!("echo {bdf} >{driver}/bind"))?;
    back()?;

    guest.sh(&format!("echo 1 >{device}/remove"))?;
    guest.wait_no_path(DISK, SHORT)?;
    check::closed(cluster, "a", "disk0")?;
    guest.sh("echo 1 >/sys/bus/pci/rescan")?;
    back()?;

    // With a driver, the kernel restores bus-master enable after the reset.
    guest.sh(&format!("echo 1 >{device}/reset"))?;
    back()
}

/// Bus-master enable, D3hot and FLR, through the registers of a device without driver.
fn registers_end_dma(cluster: &Cluster, guest: &Guest<'_>) -> anyhow::Result<()> {
    let tester = DmaTester::new(guest)?;
    let bdf = tester.bdf.clone();
    let page = guest.alloc_page(4096)?;
    let works = |value: u64| -> anyhow::Result<()> {
        check::open(cluster, guest, "dma0", 1)?;
        let answer = tester.write8(page.gpa, value)?;
        ensure!(!answer.faulted, "{answer:?}");
        ensure!(guest.read_page(page, 0, 8)? == value.to_le_bytes());
        Ok(())
    };

    tester.set_bus_master(true)?;
    works(1)?;
    tester.set_bus_master(false)?;
    check::closed(cluster, "a", "dma0")?;

    tester.set_bus_master(true)?;
    works(2)?;
    // D3hot, through the power management capability.
    guest.sh(&format!("setpci -s {bdf} CAP_PM+4.w=3:3"))?;
    check::closed(cluster, "a", "dma0")?;
    // It keeps its registers in D3hot (No_Soft_Reset), so DMA is possible again.
    guest.sh(&format!("setpci -s {bdf} CAP_PM+4.w=0:3"))?;
    ensure!(tester.bus_master()?, "D3hot cleared bus-master enable");
    works(3)?;

    // The guest's kernel saves the registers, resets the function (its PATTERN register
    // shows the reset), and restores bus-master enable.
    tester.set_pattern(0x1234_5678)?;
    guest.sh(&format!("echo 1 >/sys/bus/pci/devices/{bdf}/reset"))?;
    ensure!(tester.pattern()? == 0, "the function was not reset");
    works(4)?;

    // FLR: bit 15 of the device control register.
    tester.set_pattern(0x1234_5678)?;
    guest.sh(&format!("setpci -s {bdf} CAP_EXP+8.w=8000:8000"))?;
    check::closed(cluster, "a", "dma0")?;
    ensure!(!tester.bus_master()?, "FLR clears bus-master enable");
    let tester = DmaTester::new(guest)?;
    ensure!(tester.pattern()? == 0, "FLR resets the device's registers");
    Ok(())
}

pub fn a_guest_reboots_and_a_vm_starts_again(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    let first = check::open(cluster, &guest, "disk0", 1)?;
    check::io(&guest, DISK, 11)?;

    guest.reboot(BOOT)?;
    guest.wait_disk()?;
    let rebooted = check::open(cluster, &guest, "disk0", 1)?;
    ensure!(
        rebooted.generation == first.generation,
        "the lease goes on: {rebooted:?}"
    );
    check::io(&guest, DISK, 12)?;

    // A system reset during I/O.
    let running = guest.exec_start(
        &format!("dd if={DISK} of=/dev/null bs=4k iflag=direct"),
        BOOT,
    )?;
    guest.qmp().system_reset()?;
    guest.wait_boot(3, BOOT)?;
    ensure!(running.wait().is_err(), "the command outlived its guest");
    guest.wait_disk()?;
    check::open(cluster, &guest, "disk0", 1)?;
    check::io(&guest, DISK, 13)?;
    check::no_faults(cluster, &["disk0"])?;
    guest.power_off()?;
    cluster.wait_free("disk0")?;

    // Another QEMU with the same backend.
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    let again = check::open(cluster, &guest, "disk0", 1)?;
    ensure!(
        again.generation > first.generation,
        "a lease of its own: {again:?}"
    );
    check::io(&guest, DISK, 14)?;
    guest.power_off()?;
    passed()
}

pub fn devices_are_plugged_in_and_unplugged_while_the_guest_runs(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("a", &["disk0", "dma0"]).start()?;
    let mut config = VmConfig::new("a".parse()?, 512 * MIB);
    config.devices = ["dma0", "disk0"]
        .map(|id| Device {
            id: id.parse().expect("a valid id"),
            port: None,
            socket: cluster.directory().join("vm/a").join(format!("{id}.sock")),
            function: 0,
            bootindex: None,
        })
        .into();
    // The device will be hot-plugged into a spare port.
    let guest = cluster.guest("a").device("dma0").boot()?;
    ensure!(guest.functions(NVME)?.is_empty());
    let disk = cluster.status()?.borrow("a", "disk0")?;
    ensure!(disk.state == BorrowState::Unleased, "{disk:?}");
    guest.qmp().device_add(config.device_add(1)?)?;
    guest.wait_disk()?;
    check::open_with_bars(cluster, &guest, "disk0", 2, MEMORY)?;
    check::io(&guest, DISK, 15)?;

    unplug(&guest, "disk0")?;
    guest.wait_no_path(DISK, SHORT)?;
    ensure!(guest.functions(NVME)?.is_empty());
    cluster.wait_free("disk0")?;

    // It can be plugged again, although QEMU still holds the first connection.
    guest.qmp().device_add(config.device_add(1)?)?;
    guest.wait_disk()?;
    check::open_with_bars(cluster, &guest, "disk0", 2, MEMORY)?;
    check::io(&guest, DISK, 16)?;
    unplug(&guest, "disk0")?;
    guest.wait_no_path(DISK, SHORT)?;
    cluster.wait_free("disk0")?;

    // A cold-plugged device without a driver that would quiesce it before the unplug: it
    // may do DMA.
    let tester = DmaTester::new(&guest)?;
    tester.set_bus_master(true)?;
    check::open(cluster, &guest, "dma0", 1)?;
    let gone = format!("/sys/bus/pci/devices/{}", tester.bdf);
    unplug(&guest, "dma0")?;
    guest.wait_no_path(&gone, SHORT)?;
    cluster.wait_free("dma0")?;
    for device in ["disk0", "dma0"] {
        let borrow = cluster.wait_state("a", device, BorrowState::Unleased)?;
        ensure!(borrow.is_closed(), "{borrow:?}");
    }
    check::no_faults(cluster, &["disk0", "dma0"])?;
    guest.power_off()?;
    passed()
}

/// Unplugs a device, and waits until QEMU has released it. There is no `DEVICE_DELETED`
/// event: QEMU 11.1 never frees a `vfio-user-pci` with MSI-X (the memory region of its PBA
/// holds a reference to its owner), and keeps the socket open until it ends.
pub fn unplug(guest: &Guest<'_>, id: &str) -> anyhow::Result<()> {
    let id = qemu_id(&id.parse()?);
    guest.qmp().execute("device_del", json!({ "id": id }))?;
    let deadline = Instant::now() + SHORT;
    loop {
        let path = json!({ "path": "/machine/peripheral" });
        let left = guest.qmp().execute("qom-list", path)?;
        let names = left.as_array().into_iter().flatten();
        if !names.into_iter().any(|entry| entry["name"] == *id) {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{id} is still plugged in: {left:#}"
        );
        // QEMU has no event for this.
        std::thread::sleep(Duration::from_millis(50));
    }
}
