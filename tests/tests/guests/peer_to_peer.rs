//! Linux moves data between borrowed disks through the memory of one of them (p2pdma), past its RAM.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, ensure};
use farside_testbed::TCG_ZEN_CPU;
use farside_tests::{BOOT, BorrowState, Cluster, Guest, MIB, SHORT, noise, shared_ram};
use libtest_mimic::Completion;
use rustix::process::{Signal, kill_process};

use crate::{
    check,
    life::unplug,
    outlive::{child, worker},
    passed,
};

/// Bytes of the controller memory buffer.
const BUFFER: u64 = 16 * MIB;

const KILLS: u64 = 3;

/// The disks: that with the buffer, then two without.
const DISKS: [&str; 3] = ["disk0", "disk1", "disk2"];

/// The same in a guest.
struct Disks {
    /// Paths of block devices.
    paths: [String; 3],
    /// The file by which a process has a part of the buffer as its memory.
    buffer: String,
}

impl Disks {
    fn find(guest: &Guest<'_>) -> anyhow::Result<Self> {
        let names = DISKS.map(|serial| {
            let path = format!("grep -l -x -w '{serial} *' /sys/block/nvme*/device/serial");
            let found = guest.sh(&format!(
                "for try in $(seq 100); do {path} && break; sleep 0.1; done"
            ))?;
            let name = found.split('/').nth(3).context("no disk")?.to_owned();
            anyhow::Ok(name)
        });
        let [first, second, third] = names;
        let (first, second, third) = (first?, second?, third?);
        let function = format!("/sys/block/{first}/device/device");
        ensure!(guest.sh(&format!("cat {function}/p2pmem/published"))? == "1");
        let size = check::number(guest, &format!("cat {function}/p2pmem/available"))?;
        ensure!(size == BUFFER, "{size} bytes");
        Ok(Self {
            buffer: format!("{function}/p2pmem/allocate"),
            paths: [first, second, third].map(|name| format!("/dev/{name}")),
        })
    }

    /// The name of a block device.
    fn name(&self, disk: usize) -> &str {
        self.paths[disk].trim_start_matches("/dev/")
    }

    /// A command that does I/O on a disk, with its data in the buffer.
    fn fio(&self, disk: usize, job: &str) -> String {
        let (path, buffer) = (&self.paths[disk], &self.buffer);
        format!(
            "fio --output-format=terse --name=p2p --filename={path} --direct=1 --ioengine=libaio \
             --mem=mmapshared:{buffer} {job}"
        )
    }
}

/// The memory of the buffer, the only BAR of the VM's devices that is not trapped, as the backend's keeper has it.
fn buffer_of(keeper: u32) -> anyhow::Result<File> {
    for entry in fs::read_dir(format!("/proc/{keeper}/fd"))? {
        let path = entry?.path();
        let target = fs::read_link(&path).unwrap_or_default();
        if target.to_string_lossy().starts_with("/memfd:farside-bar") {
            return Ok(File::open(&path)?);
        }
    }
    anyhow::bail!("keeper {keeper} has no memory of a BAR")
}

/// Where `data` is in the buffer.
fn find_in(buffer: &File, data: &[u8]) -> anyhow::Result<Option<usize>> {
    let mut all = vec![0; BUFFER as usize];
    buffer.read_exact_at(&mut all, 0)?;
    let mut pages = all.chunks_exact(4096);
    let Some(page) = pages.position(|page| page == &data[..4096]) else {
        return Ok(None);
    };
    let at = page * 4096;
    Ok((all.get(at..at + data.len()) == Some(data)).then_some(at))
}

/// Data of the disks without the buffer comes to that, and nowhere else.
fn read_into_buffer(
    guest: &Guest<'_>,
    disks: &Disks,
    (buffer, images): (&File, &[PathBuf; 3]),
    seed: u64,
) -> anyhow::Result<()> {
    for disk in [1, 2] {
        let data = noise(seed << 8 | disk as u64, MIB as usize);
        File::options()
            .write(true)
            .open(&images[disk])?
            .write_all_at(&data, 32 * MIB)?;
        ensure!(find_in(buffer, &data)?.is_none(), "there before");
        let read = disks.fio(disk, "--rw=read --bs=1M --offset=32M --size=1M");
        guest.sh_within(&read, BOOT)?;
        find_in(buffer, &data)?.context("not all of it is in the buffer")?;
    }
    Ok(())
}

pub fn disks_transfer_data_through_the_memory_of_one(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let [first, second, third] = DISKS.map(|id| cluster.image(id, 64 * MIB));
    let images = [first?, second?, third?];
    let [first, second, third] = [0, 1, 2].map(|n| format!("{}={}", DISKS[n], images[n].display()));
    let first = format!("{first},cmb=16M");
    let lender = cluster.lend(&["--nvme", &first, "--nvme", &second, "--nvme", &third])?;
    let keeper = cluster.serve("a", &DISKS).args(&["--keeper"]).start()?;
    let guest = cluster
        .guest("a")
        .whole()
        .cpus(2)
        .args(&["-cpu", TCG_ZEN_CPU])
        .boot()?;
    let disks = Disks::find(&guest)?;
    // A window more, of the disk that reaches the other's BAR.
    let windows = |at: usize| {
        let borrow = cluster.wait_state("a", DISKS[at], BorrowState::Ready)?;
        anyhow::Ok((borrow.dma_windows, borrow.bytes_unreachable))
    };
    ensure!((windows(0)?, windows(1)?, windows(2)?) == ((1, 0), (2, 0), (2, 0)));
    let buffer = buffer_of(keeper.pid())?;
    read_into_buffer(&guest, &disks, (&buffer, &images), 1)?;

    // Each disk, with verification: the CPU reads what the disk has transferred.
    const VERIFY: &str = "--rw=randrw --bsrange=4k-64k --size=16M --iodepth=8 --verify=crc32c \
                          --verify_fatal=1 --do_verify=1";
    for disk in [0, 1] {
        guest.sh_within(&disks.fio(disk, VERIFY), BOOT)?;
    }
    check::no_faults(cluster, &DISKS)?;

    // Killed under I/O.
    let load = disks.fio(
        1,
        "--time_based --runtime=15 --rw=randwrite --bs=16k --size=16M --iodepth=8 \
         --verify=crc32c --verify_fatal=1 --verify_backlog=64",
    );
    let load = guest.exec_start(&load, BOOT)?;
    for kill in 0..KILLS {
        std::thread::sleep(Duration::from_millis(1500));
        for disk in [DISKS[0], DISKS[1]] {
            kill_process(worker(lender.pid(), disk)?, Signal::KILL)?;
        }
        cluster.wait_status("other workers", SHORT, |status| {
            let restarts = |disk| {
                let connection = status.borrow("a", disk)?.connection;
                anyhow::Ok(connection.is_some_and(|it| it.restarts > kill))
            };
            Ok((restarts(DISKS[0])? && restarts(DISKS[1])?).then_some(()))
        })?;
    }
    kill_process(child(keeper.pid(), "serve")?, Signal::KILL)?;
    let output = load.wait()?;
    ensure!(output.success(), "{output}");
    check::no_faults(cluster, &DISKS)?;
    // The next backend has the same memory.
    read_into_buffer(&guest, &disks, (&buffer, &images), 2)?;

    // A function-level reset, around which Linux turns memory off.
    let function = format!("/sys/block/{}/device/device", disks.name(0));
    guest.sh(&format!("echo 1 >{function}/reset"))?;
    read_into_buffer(&guest, &disks, (&buffer, &images), 3)?;

    // The firmware places BARs anew.
    guest.reboot(BOOT)?;
    let disks = Disks::find(&guest)?;
    ensure!((windows(0)?, windows(1)?, windows(2)?) == ((1, 0), (2, 0), (2, 0)));
    read_into_buffer(&guest, &disks, (&buffer, &images), 4)?;
    check::no_faults(cluster, &DISKS)?;

    // Without the disk with the buffer, the other one goes on. (QEMU's listing of memory keeps it from aborting at an
    // unplug: decision 21.)
    shared_ram(guest.qmp())?;
    unplug(&guest, DISKS[0])?;
    cluster.wait_free(DISKS[0])?;
    ensure!(windows(1)? == (1, 0), "{:?}", windows(1)?);
    check::io(&guest, &disks.paths[1], 5)?;
    check::no_faults(cluster, &[DISKS[1]])?;
    guest.power_off()?;
    passed()
}
