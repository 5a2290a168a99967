//! The guest's driver and tools on a borrowed NVMe device.

use std::{
    fs::OpenOptions,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    time::Duration,
};

use anyhow::{Context, ensure};
use farside_tests::{BOOT, Cluster, Guest, MIB, NVME, noise, sha256, sha256_of, testbed};
use libtest_mimic::Completion;

use crate::{check, passed};

const FIO: Duration = Duration::from_secs(600);
const DISK: &str = "/dev/nvme0n1";

pub fn bytes_are_the_same_on_both_sides(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (_lender, image) = cluster.lend_disk(64 * MIB)?;
    let put = noise(1, 8 * MIB as usize);
    OpenOptions::new()
        .write(true)
        .open(&image)?
        .write_all_at(&put, 32 * MIB)?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").whole().boot()?;
    guest.wait_disk()?;
    ensure!(check::number(&guest, &format!("blockdev --getsize64 {DISK}"))? == 64 * MIB);

    let read = guest.sh(&format!("dd if={DISK} bs=1M skip=32 count=8 | sha256sum"))?;
    ensure!(read.contains(&sha256(&put)), "the guest reads {read}");

    let written = noise(2, 4 * MIB as usize);
    guest.write_file("/tmp/data", &written)?;
    guest.sh(&format!(
        "dd if=/tmp/data of={DISK} bs=64k seek=48 conv=fsync,notrunc"
    ))?;
    let in_image = || sha256_of(&image, 3 * MIB, 4 * MIB);
    ensure!(in_image()? == sha256(&written), "after fsync");
    ensure!(
        sha256_of(&image, 32 * MIB, 8 * MIB)? == sha256(&put),
        "a write elsewhere changed what was there"
    );
    nvme_cli(&guest).context("nvme-cli")?;
    check::no_faults(cluster, &["disk0"])?;
    guest.power_off()?;
    cluster.wait_free("disk0")?;
    ensure!(in_image()? == sha256(&written), "after power-off");
    passed()
}

/// Common administrator commands.
fn nvme_cli(guest: &Guest<'_>) -> anyhow::Result<()> {
    ensure!(guest.sh("nvme list")?.contains(DISK));
    let controller = guest.sh("nvme id-ctrl /dev/nvme0")?;
    for field in ["vid", "sn ", "mn ", "oncs", "sqes"] {
        ensure!(controller.contains(field), "no {field}: {controller}");
    }
    let namespace = guest.sh(&format!("nvme id-ns {DISK}"))?;
    ensure!(namespace.contains("nsze    : 0x20000"), "{namespace}");
    let smart = guest.sh("nvme smart-log /dev/nvme0")?;
    ensure!(smart.contains("critical_warning"), "{smart}");
    for command in [
        "nvme list-ns /dev/nvme0",
        "nvme error-log /dev/nvme0",
        "nvme fw-log /dev/nvme0",
        "nvme ns-descs /dev/nvme0n1",
        "nvme get-feature /dev/nvme0 -f 7 -H",
        "nvme get-feature /dev/nvme0 -f 6 -H",
        "nvme set-feature /dev/nvme0 -f 6 -v 0",
        "nvme set-feature /dev/nvme0 -f 6 -v 1",
        "nvme flush /dev/nvme0n1",
        "printf farside-0123456789abcdef >/tmp/in",
        "nvme write /dev/nvme0n1 -s 16 -c 0 -z 512 -d /tmp/in",
        "nvme compare /dev/nvme0n1 -s 16 -c 0 -z 512 -d /tmp/in",
    ] {
        guest.sh(command)?;
    }
    let read = guest.sh("nvme read /dev/nvme0n1 -s 16 -c 0 -z 512")?;
    ensure!(read.contains("farside-0123456789abcdef"), "{read}");
    guest.sh("nvme write-zeroes /dev/nvme0n1 -s 16 -c 0")?;
    let zeroes = guest.sh("nvme read /dev/nvme0n1 -s 16 -c 0 -z 512 | grep -c farside || true")?;
    ensure!(zeroes == "0", "{zeroes}");
    let beyond = guest.exec("nvme read /dev/nvme0n1 -s 131072 -c 0 -z 512", FIO)?;
    ensure!(!beyond.success(), "a read beyond the end: {beyond}");
    guest.sh("nvme reset /dev/nvme0")?;
    guest.wait_disk()?;
    check::io(guest, DISK, 77)
}

pub fn file_systems_fio_and_discard_work(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (_lender, image) = cluster.lend_disk(512 * MIB)?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").whole().cpus(2).boot()?;
    guest.wait_disk()?;

    guest.sh_within(
        &format!(
            "fio --name=verify --filename={DISK} --rw=randwrite --bs=4k-64k --size=24M \
             --direct=1 --ioengine=libaio --iodepth=16 --verify=crc32c --do_verify=1 \
             --verify_fatal=1 --output-format=terse"
        ),
        FIO,
    )?;
    let file = noise(3, 3 * MIB as usize);
    guest.write_file("/tmp/data", &file)?;
    for (make, kind, fsck) in [
        ("mkfs.ext4 -q -F", "ext4", "fsck.ext4 -fn"),
        ("mkfs.xfs -q -f", "xfs", "xfs_repair -n"),
    ] {
        guest.sh_within(&format!("{make} {DISK}"), FIO)?;
        guest.sh(&format!("mount -t {kind} {DISK} /mnt"))?;
        guest.sh("cp /tmp/data /mnt/data && mkdir /mnt/d && touch /mnt/d/e && umount /mnt")?;
        guest.sh(&format!("{fsck} {DISK}"))?;
        host_check(&image, fsck).context(kind)?;
        guest.sh(&format!("mount -t {kind} {DISK} /mnt"))?;
        let read = guest.sh("sha256sum /mnt/data && umount /mnt")?;
        ensure!(read.contains(&sha256(&file)), "{kind}: {read}");
    }
    let before = std::fs::metadata(&image)?.blocks();
    guest.sh(&format!("blkdiscard {DISK}"))?;
    let after = std::fs::metadata(&image)?.blocks();
    ensure!(
        after * 512 < MIB && before > after,
        "the image had {before} blocks on its file system before the discard, {after} after"
    );
    let zero = sha256(&vec![0; MIB as usize]);
    let read = guest.sh(&format!(
        "dd if={DISK} bs=1M count=1 iflag=direct | sha256sum"
    ))?;
    ensure!(read.contains(&zero), "after blkdiscard: {read}");
    check::no_faults(cluster, &["disk0"])?;
    guest.power_off()?;
    passed()
}

/// The same file-system check, on the image.
fn host_check(image: &Path, command: &str) -> anyhow::Result<()> {
    let (program, option) = command.split_once(' ').context("a program and an option")?;
    let output = testbed()?.tool(program).arg(option).arg(image).output()?;
    ensure!(
        output.status.success(),
        "{command} of the image: {output:?}"
    );
    Ok(())
}

pub fn every_processor_has_a_queue_and_a_busy_guest_traps_no_doorbell(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let image = cluster.image("disk0", 64 * MIB)?;
    let drive = format!("disk0={}", image.display());
    // With this poll time, the device thread never blocks during guest I/O, even with a
    // slow emulated guest.
    let _lender = cluster.lend(&["--nvme", &drive, "--poll-us", "1000000"])?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").whole().cpus(4).boot()?;
    guest.wait_disk()?;
    let queues = check::number(&guest, "ls /sys/block/nvme0n1/mq | wc -l")?;
    ensure!(queues == 4, "{queues} queues for 4 processors");
    for cpu in 0..4 {
        guest.sh(&format!(
            "taskset {:x} dd if={DISK} of=/dev/null bs=4k count=64 iflag=direct",
            1 << cpu
        ))?;
    }
    let lent = cluster.status()?.lent("disk0")?;
    for vector in 0..=4 {
        let fired = lent.interrupts.iter().find(|(_, at, _)| *at == vector);
        ensure!(fired.is_some(), "vector {vector} never fired: {lent:?}");
    }

    let bdf = guest.find(NVME)?;
    ensure!(
        guest
            .sh(&format!("lspci -v -s {bdf}"))?
            .contains("MSI-X: Enable+"),
        "MSI-X is off"
    );
    let fio = format!(
        "fio --name=busy --filename={DISK} --rw=randread --bs=4k --size=16M --direct=1 \
         --ioengine=libaio --iodepth=8 --numjobs=2 --output-format=terse"
    );
    let before = cluster.status()?.lent("disk0")?;
    guest.sh_within(&fio, BOOT)?;
    let after = cluster.status()?.lent("disk0")?;
    let commands = after.counter("io_commands")? - before.counter("io_commands")?;
    let traps = after.counter("doorbell_traps")? - before.counter("doorbell_traps")?;
    ensure!(commands >= 8192, "{commands} commands");
    // Without the doorbell buffer a command costs up to two doorbell writes. Occasionally
    // the guest pauses for longer than the poll time.
    ensure!(
        traps * 100 < commands,
        "{traps} trapped doorbells for {commands} commands"
    );
    guest.power_off()?;
    passed()
}

pub fn an_idle_drive_costs_no_processor_time(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (lender, _image) = cluster.lend_disk(64 * MIB)?;
    let backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    check::open(cluster, &guest, "disk0", 1)?;
    check::io(&guest, DISK, 16)?;
    let used = || Ok::<_, anyhow::Error>((cpu_ticks(lender.pid())?, cpu_ticks(backend.pid())?));
    let before = used()?;
    // The guest's clock measures the wait: it runs, and does not use the device.
    guest.sh("sleep 3")?;
    let after = used()?;
    // Of 300. The kernel's timers may cause one write.
    ensure!(
        after.0 - before.0 <= 3 && after.1 - before.1 <= 3,
        "clock ticks of lender and backend: {before:?}, 3 s later {after:?}"
    );
    guest.power_off()?;
    passed()
}

/// User and system time of a process, in clock ticks (proc(5), `stat`).
fn cpu_ticks(pid: u32) -> anyhow::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').context("no name in stat")?;
    let ticks = fields.split_whitespace().skip(11).take(2);
    ticks.map(|ticks| Ok(ticks.parse::<u64>()?)).sum()
}
