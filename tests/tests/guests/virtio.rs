//! The guest's driver on a borrowed virtio-blk disk.

use std::{
    fs::OpenOptions,
    os::unix::fs::{FileExt, MetadataExt},
    time::Duration,
};

use anyhow::ensure;
use farside_tests::{
    BOOT, Borrow, BorrowState, Cluster, FunctionId, Guest, MIB, SHORT, noise, sha256, sha256_of,
};
use libtest_mimic::Completion;

use crate::{check, life::unplug, passed};

const FIO: Duration = Duration::from_secs(600);
const DISK: &str = "/dev/vda";
const LEN: u64 = 256 * MIB;

pub(crate) fn wait_disk(guest: &Guest<'_>) -> anyhow::Result<()> {
    guest.sh("modprobe virtio_blk")?;
    guest.wait_path(DISK, SHORT)
}

/// The disk is ready. Its windows are several: SeaBIOS drives it while it remaps low RAM, and Linux's driver
/// leaves bus mastering as it is.
fn open(cluster: &Cluster, guest: &Guest<'_>) -> anyhow::Result<Borrow> {
    let borrow = cluster.wait_state(guest.name(), "disk0", BorrowState::Ready)?;
    check::open(cluster, guest, "disk0", borrow.dma_windows)
}

pub fn a_virtio_blk_disk_is_used_reset_and_removed(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let image = cluster.image("disk0", LEN)?;
    let put = noise(1, 8 * MIB as usize);
    let file = OpenOptions::new().write(true).open(&image)?;
    file.write_all_at(&put, 32 * MIB)?;
    let disk = format!("disk0={}", image.display());
    let _lender = cluster.lend(&["--virtio-blk", &disk])?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").whole().cpus(2).boot()?;
    wait_disk(&guest)?;
    let first = open(cluster, &guest)?;
    identity(&guest)?;

    let read = guest.sh(&format!("dd if={DISK} bs=1M skip=32 count=8 | sha256sum"))?;
    ensure!(read.contains(&sha256(&put)), "the guest reads {read}");
    let written = noise(2, 4 * MIB as usize);
    guest.write_file("/tmp/data", &written)?;
    guest.sh(&format!(
        "dd if=/tmp/data of={DISK} bs=64k seek=48 conv=fsync,notrunc"
    ))?;
    let in_image = sha256_of(&image, 3 * MIB, 4 * MIB)?;
    ensure!(in_image == sha256(&written), "after fsync");
    ensure!(cluster.status()?.lent("disk0")?.counter("flushes")? > 0);
    guest.sh_within(
        &format!(
            "fio --name=verify --filename={DISK} --rw=randwrite --bs=4k-256k --size=24M \
             --direct=1 --ioengine=libaio --iodepth=16 --numjobs=1 --verify=crc32c \
             --do_verify=1 --verify_fatal=1 --output-format=terse"
        ),
        FIO,
    )?;
    queues(cluster, &guest)?;
    discard(&guest, &image)?;
    zeroes(cluster, &guest)?;
    check::no_faults(cluster, &["disk0"])?;

    driver_lets_go(cluster, &guest)?;
    guest.reboot(BOOT)?;
    wait_disk(&guest)?;
    let rebooted = open(cluster, &guest)?;
    ensure!(rebooted.generation == first.generation, "{rebooted:?}");
    check::io(&guest, DISK, 12)?;
    // A system reset during I/O.
    let running = guest.exec_start(
        &format!("dd if={DISK} of=/dev/null bs=4k iflag=direct"),
        BOOT,
    )?;
    guest.qmp().system_reset()?;
    guest.wait_boot(3, BOOT)?;
    ensure!(running.wait().is_err(), "the command outlived its guest");
    wait_disk(&guest)?;
    check::io(&guest, DISK, 13)?;
    check::no_faults(cluster, &["disk0"])?;

    // Hot remove.
    unplug(&guest, "disk0")?;
    guest.wait_no_path(DISK, SHORT)?;
    cluster.wait_free("disk0")?;
    check::no_faults(cluster, &["disk0"])?;
    guest.power_off()?;
    passed()
}

/// What the driver has found.
fn identity(guest: &Guest<'_>) -> anyhow::Result<()> {
    let bdf = guest.find(FunctionId::Device {
        vendor: 0x1af4,
        device: 0x1042,
    })?;
    let shown = guest.sh(&format!("lspci -v -s {bdf}"))?;
    ensure!(shown.contains("MSI-X: Enable+"), "{shown}");
    ensure!(check::number(guest, &format!("blockdev --getsize64 {DISK}"))? == LEN);
    let block = "/sys/block/vda";
    for (file, expected) in [
        ("serial", "disk0"),
        ("cache_type", "write back"),
        ("queue/physical_block_size", "4096"),
        ("queue/discard_granularity", "4096"),
        ("ro", "0"),
    ] {
        let value = guest.sh(&format!("cat {block}/{file}"))?;
        ensure!(value.trim() == expected, "{file}: {value}");
    }
    // The first feature bit is the leftmost: indirect tables, event index, version 1, platform access.
    let features = guest.sh(&format!("cat {block}/device/features"))?;
    for bit in [28, 29, 32, 33] {
        let is_on = features.as_bytes().get(bit) == Some(&b'1');
        ensure!(is_on, "feature {bit} was not accepted: {features}");
    }
    // The cache mode is the driver's.
    guest.sh(&format!("echo write through >{block}/cache_type"))?;
    check::io(guest, DISK, 10)?;
    guest.sh(&format!("echo write back >{block}/cache_type"))?;
    Ok(())
}

/// Each CPU has a queue with a vector.
fn queues(cluster: &Cluster, guest: &Guest<'_>) -> anyhow::Result<()> {
    let queues = check::number(guest, "ls /sys/block/vda/mq | wc -l")?;
    ensure!(queues == 2, "{queues} queues for 2 CPUs");
    for cpu in 0..2 {
        guest.sh(&format!(
            "taskset {:x} dd if={DISK} of=/dev/null bs=4k count=64 iflag=direct",
            1 << cpu
        ))?;
    }
    let lent = cluster.status()?.lent("disk0")?;
    for vector in 1..=2 {
        let fired = lent.interrupts.iter().find(|(_, at, _)| *at == vector);
        ensure!(fired.is_some(), "vector {vector} never fired: {lent:?}");
    }
    let [requests, notifications] =
        ["requests", "notifications"].map(|counter| lent.counter(counter));
    let (requests, notifications) = (requests?, notifications?);
    // Each request of a depth of 1 may notify a device that sleeps; those in between do not.
    ensure!(
        notifications < requests,
        "{notifications} notifications for {requests} requests"
    );
    Ok(())
}

/// Discard frees the image's blocks, which read as zeroes then.
fn discard(guest: &Guest<'_>, image: &std::path::Path) -> anyhow::Result<()> {
    let zero = sha256(&vec![0; MIB as usize]);
    let first = format!("dd if={DISK} bs=1M count=1 iflag=direct | sha256sum");
    guest.sh(&format!("dd if=/tmp/data of={DISK} bs=1M oflag=direct"))?;
    let before = std::fs::metadata(image)?.blocks();
    guest.sh(&format!("blkdiscard {DISK}"))?;
    let after = std::fs::metadata(image)?.blocks();
    ensure!(
        after * 512 < MIB && before > after,
        "the image had {before} blocks on its file system before the discard, {after} after"
    );
    let read = guest.sh(&first)?;
    ensure!(read.contains(&zero), "after blkdiscard: {read}");
    Ok(())
}

/// mke2fs zeroes inode tables by the driver's write zeroes.
fn zeroes(cluster: &Cluster, guest: &Guest<'_>) -> anyhow::Result<()> {
    let options = "-E nodiscard,lazy_itable_init=0";
    guest.sh_within(&format!("mkfs.ext4 -q -F {options} {DISK}"), FIO)?;
    guest.sh(&format!("fsck.ext4 -fn {DISK}"))?;
    let lent = cluster.status()?.lent("disk0")?;
    ensure!(lent.counter("zeroes")? > 0 && lent.counter("discards")? > 0);
    Ok(())
}

/// Unbind and bind, removal and rescan, and a reset of the function.
fn driver_lets_go(cluster: &Cluster, guest: &Guest<'_>) -> anyhow::Result<()> {
    let bdf = guest.find(FunctionId::Device {
        vendor: 0x1af4,
        device: 0x1042,
    })?;
    let device = format!("/sys/bus/pci/devices/{bdf}");
    let driver = "/sys/bus/pci/drivers/virtio-pci";
    guest.sh(&format!("echo {bdf} >{driver}/unbind"))?;
    check::closed(cluster, "a", "disk0")?;
    guest.sh(&format!("echo 1 >{device}/reset"))?;
    guest.sh(&format!("echo {bdf} >{driver}/bind"))?;
    wait_disk(guest)?;
    open(cluster, guest)?;
    check::io(guest, DISK, 20)?;
    guest.sh(&format!("echo 1 >{device}/remove"))?;
    guest.wait_no_path(DISK, SHORT)?;
    check::closed(cluster, "a", "disk0")?;
    guest.sh("echo 1 >/sys/bus/pci/rescan")?;
    wait_disk(guest)?;
    check::io(guest, DISK, 21)
}
