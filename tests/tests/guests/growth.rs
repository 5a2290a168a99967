//! Disks grow while a guest uses them.

use std::{
    fs::File,
    net::TcpListener,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, ensure};
use farside_backend_api::ConnectionState;
use farside_tests::{BOOT, Cluster, Daemon, Guest, MIB, SHORT, noise, sha256, sha256_of};
use libtest_mimic::Completion;
use rustix::process::{Signal, kill_process};

use crate::{
    check,
    outlive::{child, errors, worker},
    passed,
    virtio::wait_disk as open_virtio,
};

/// Device ids, and the disks in the guest.
const NVME: (&str, &str) = ("disk0", "/dev/nvme0n1");
const VIRTIO: (&str, &str) = ("disk1", "/dev/vda");
const DISKS: [(&str, &str); 2] = [NVME, VIRTIO];

/// Writes and verifies, where both disks were from the beginning on.
const LOAD: &str = "fio --output-format=terse --direct=1 --ioengine=libaio --rw=randwrite --bs=4k-64k \
    --iodepth=8 --size=32M --verify=crc32c --verify_fatal=1 --verify_backlog=128 --time_based --runtime=25 \
    --name=nvme --filename=/dev/nvme0n1 --name=virtio --filename=/dev/vda";

struct Stage<'a> {
    cluster: &'a Cluster,
    images: [PathBuf; 2],
    options: [String; 2],
    /// Where the lender listens for other hosts, one of which this one is, too.
    address: Option<String>,
}

impl<'a> Stage<'a> {
    fn new(cluster: &'a Cluster) -> anyhow::Result<Self> {
        let images = [
            cluster.image(NVME.0, 64 * MIB)?,
            cluster.image(VIRTIO.0, 64 * MIB)?,
        ];
        let option = |n: usize| format!("{}={}", DISKS[n].0, images[n].display());
        Ok(Self {
            cluster,
            options: [option(0), option(1)],
            images,
            address: None,
        })
    }

    fn lend(&self) -> anyhow::Result<Daemon> {
        let [nvme, virtio] = &self.options;
        let mut args = vec!["--nvme", nvme, "--virtio-blk", virtio];
        if let Some(address) = &self.address {
            args.extend(["--listen", address, "--borrower", "network"]);
        }
        self.cluster.lend(&args)
    }

    /// Serves both, with a keeper.
    fn serve(&self) -> anyhow::Result<Daemon> {
        let serve = self.cluster.serve("a", &[NVME.0, VIRTIO.0]);
        let mut args = vec!["--keeper"];
        if let Some(address) = &self.address {
            args.extend(["--lender", address]);
        }
        serve.args(&args).start()
    }

    fn boot(&self) -> anyhow::Result<Guest<'a>> {
        let guest = self.cluster.guest("a").whole().boot()?;
        guest.wait_disk()?;
        open_virtio(&guest)?;
        Ok(guest)
    }

    /// Gives both images another size.
    fn truncate(&self, len: u64) -> anyhow::Result<()> {
        for image in &self.images {
            truncate(image, len)?;
        }
        Ok(())
    }

    /// The command for both, and what it prints.
    fn resize(&self) -> anyhow::Result<String> {
        let ids = ["lend", "--resize", NVME.0, "--resize", VIRTIO.0];
        let ended = self.cluster.run(&ids)?;
        ensure!(ended.status.success(), "{}", ended.stderr);
        Ok(ended.stdout)
    }

    /// The command for one, which is refused.
    fn refusal(&self, id: &str) -> anyhow::Result<String> {
        let ended = self.cluster.run(&["lend", "--resize", id])?;
        ensure!(!ended.status.success(), "{}", ended.stdout);
        Ok(ended.stderr)
    }

    /// The guest sees disks of that size.
    fn sees(&self, guest: &Guest<'_>, len: u64) -> anyhow::Result<()> {
        for (_, disk) in DISKS {
            let since = Instant::now();
            let size = || check::number(guest, &format!("blockdev --getsize64 {disk}"));
            while size()? != len {
                let (size, late) = (size()?, since.elapsed() >= SHORT);
                ensure!(!late, "{disk} has {size} bytes in the guest, and not {len}");
            }
        }
        Ok(())
    }

    /// The guest writes the last MiB of both disks, of that size.
    fn write_end(&self, guest: &Guest<'_>, len: u64) -> anyhow::Result<()> {
        let data = noise(len, MIB as usize);
        guest.write_file("/tmp/end", &data)?;
        let seek = len / MIB - 1;
        for ((_, disk), image) in DISKS.iter().zip(&self.images) {
            guest.sh(&format!(
                "dd if=/tmp/end of={disk} bs=1M seek={seek} oflag=direct conv=fsync,notrunc"
            ))?;
            let read = guest.sh(&format!(
                "dd if={disk} bs=1M skip={seek} iflag=direct | sha256sum"
            ))?;
            ensure!(read.contains(&sha256(&data)), "{disk} reads {read}");
            ensure!(sha256_of(image, len - MIB, MIB)? == sha256(&data));
        }
        Ok(())
    }

    /// Both disks go on in another process.
    fn wait_restarts(&self, count: u64) -> anyhow::Result<()> {
        for (id, _) in DISKS {
            self.cluster
                .wait_status("another worker", SHORT, |status| {
                    let connection = status.borrow("a", id)?.connection;
                    Ok(connection.filter(|it| {
                        it.state == ConnectionState::Connected && it.restarts >= count
                    }))
                })?;
        }
        Ok(())
    }
}

fn truncate(image: &Path, len: u64) -> anyhow::Result<()> {
    let file = File::options().write(true).open(image)?;
    file.set_len(len).context("truncating an image")
}

fn kill_workers(lender: &Daemon) -> anyhow::Result<()> {
    for (id, _) in DISKS {
        kill_process(worker(lender.pid(), id)?, Signal::KILL)?;
    }
    Ok(())
}

pub fn disks_grow_under_a_guest_whose_processes_are_killed(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let stage = Stage::new(cluster)?;
    let mut lender = stage.lend()?;
    // Without a lease, too.
    stage.truncate(65 * MIB)?;
    let printed = stage.resize()?;
    ensure!(
        printed == "disk0 has 65 MiB (was 64 MiB)\ndisk1 has 65 MiB (was 64 MiB)\n",
        "{printed}"
    );
    ensure!(stage.resize()?.contains("disk0 has 65 MiB, as before"));
    let shown = cluster.run(&["devices"])?.stdout;
    ensure!(shown.contains("65 MiB"), "{shown}");

    let keeper = stage.serve()?;
    let guest = stage.boot()?;
    let before = errors(&guest)?;
    stage.sees(&guest, 65 * MIB)?;
    let load = guest.exec_start(LOAD, BOOT)?;

    // Nothing grows before the command.
    stage.truncate(96 * MIB)?;
    kill_workers(&lender)?;
    stage.wait_restarts(1)?;
    stage.sees(&guest, 65 * MIB)?;
    stage.resize()?;
    stage.sees(&guest, 96 * MIB)?;
    stage.write_end(&guest, 96 * MIB)?;

    // Sizes that a disk cannot have.
    truncate(&stage.images[0], 80 * MIB)?;
    truncate(&stage.images[1], 96 * MIB + 1)?;
    let shrinks = stage.refusal("disk0")?;
    let remedy = format!("truncate -s {} ", 96 * MIB);
    for part in ["disk0", "83886080", "100663296", &remedy] {
        ensure!(shrinks.contains(part), "no {part:?} in {shrinks}");
    }
    let fraction = stage.refusal("disk1")?;
    for part in ["disk1", "100663297", "100663296", "truncate -s %512 "] {
        ensure!(fraction.contains(part), "no {part:?} in {fraction}");
    }
    stage.truncate(96 * MIB)?;
    stage.sees(&guest, 96 * MIB)?;
    stage.write_end(&guest, 96 * MIB)?;

    // The next worker has the size.
    kill_workers(&lender)?;
    stage.wait_restarts(2)?;
    stage.sees(&guest, 96 * MIB)?;
    stage.write_end(&guest, 96 * MIB)?;

    // The next lender has it, too, and looks when it is asked to.
    stage.truncate(112 * MIB)?;
    // They are no children of the next one.
    let workers = [
        worker(lender.pid(), "disk0")?,
        worker(lender.pid(), "disk1")?,
    ];
    lender.kill()?;
    lender = stage.lend()?;
    stage.sees(&guest, 96 * MIB)?;
    for pid in workers {
        kill_process(pid, Signal::KILL)?;
    }
    stage.wait_restarts(3)?;
    stage.sees(&guest, 96 * MIB)?;
    stage.resize()?;
    stage.sees(&guest, 112 * MIB)?;
    stage.write_end(&guest, 112 * MIB)?;

    // It takes the size that it finds if no worker has the disk any more.
    stage.truncate(128 * MIB)?;
    lender.kill_all()?;
    lender = stage.lend()?;
    stage.wait_restarts(4)?;
    stage.sees(&guest, 128 * MIB)?;
    stage.write_end(&guest, 128 * MIB)?;

    // The next backend goes on.
    kill_process(child(keeper.pid(), "serve")?, Signal::KILL)?;
    stage.sees(&guest, 128 * MIB)?;
    stage.truncate(130 * MIB)?;
    stage.resize()?;
    stage.sees(&guest, 130 * MIB)?;
    stage.write_end(&guest, 130 * MIB)?;

    let restarts = cluster.status()?.0.backend("a").and_then(|it| it.restarts);
    ensure!(restarts == Some(1), "{restarts:?}");

    let output = load.wait()?;
    ensure!(output.success(), "{output}");
    let after = errors(&guest)?;
    ensure!(after == before, "the guest's kernel log has {after}");
    check::no_faults(cluster, &["disk0", "disk1"])?;
    // A guest that boots anew finds it.
    guest.reboot(BOOT)?;
    guest.wait_disk()?;
    open_virtio(&guest)?;
    stage.sees(&guest, 130 * MIB)?;
    guest.power_off()?;
    drop(lender);
    passed()
}

pub fn disks_of_another_host_grow_under_a_guest(cluster: &Cluster) -> anyhow::Result<Completion> {
    let mut stage = Stage::new(cluster)?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    stage.address = Some(format!("tcp:127.0.0.1:{port}"));
    let mut lender = stage.lend()?;
    let keeper = stage.serve()?;
    let guest = stage.boot()?;
    let before = errors(&guest)?;
    stage.sees(&guest, 64 * MIB)?;
    let load = guest.exec_start(LOAD, BOOT)?;

    stage.truncate(96 * MIB)?;
    stage.resize()?;
    stage.sees(&guest, 96 * MIB)?;
    stage.write_end(&guest, 96 * MIB)?;
    kill_workers(&lender)?;
    stage.write_end(&guest, 96 * MIB)?;
    stage.sees(&guest, 96 * MIB)?;
    truncate(&stage.images[0], 80 * MIB)?;
    let shrinks = stage.refusal("disk0")?;
    ensure!(shrinks.contains("a disk does not shrink"), "{shrinks}");
    truncate(&stage.images[0], 96 * MIB)?;

    // While the connection is cut.
    lender.kill()?;
    stage.truncate(112 * MIB)?;
    lender = stage.lend()?;
    stage.sees(&guest, 112 * MIB)?;
    stage.write_end(&guest, 112 * MIB)?;

    // The next backend goes on.
    kill_process(child(keeper.pid(), "serve")?, Signal::KILL)?;
    stage.truncate(128 * MIB)?;
    stage.resize()?;
    stage.sees(&guest, 128 * MIB)?;
    stage.write_end(&guest, 128 * MIB)?;

    let output = load.wait()?;
    ensure!(output.success(), "{output}");
    let after = errors(&guest)?;
    ensure!(after == before, "the guest's kernel log has {after}");
    guest.power_off()?;
    drop(lender);
    passed()
}
