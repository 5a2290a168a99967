//! The processes of a disk are killed under a running guest, which sees pauses.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use farside_backend_api::ConnectionState;
use farside_tests::{BOOT, Cluster, Daemon, Guest, MIB, SHORT, from_env};
use libtest_mimic::Completion;
use rustix::process::{Pid, Signal, kill_process};

use crate::{check, passed, virtio::wait_disk as open_virtio};

/// Writes, flushes and trims, and verifies what was written, while it is written and at the end.
const LOAD: &str = "fio --output-format=terse --filename=DISK --direct=1 --ioengine=libaio \
    --time_based --runtime=SECONDS \
    --name=verify --rw=randwrite --bsrange=4k-64k --size=16M --iodepth=16 --fsync=64 \
    --verify=crc32c --verify_fatal=1 --verify_backlog=128 \
    --name=read --rw=randread --bs=4k --offset=16M --size=16M --iodepth=8 \
    --name=trim --rw=randtrim --bs=64k --offset=32M --size=16M --iodepth=4";

/// Number of kills, unless `FARSIDE_KILLS` is set.
const KILLS: u64 = 50;

/// Time between two kills, in which the guest does I/O.
const INTERVAL: Duration = Duration::from_millis(300);

/// The load's time for each kill.
const FOR_A_KILL: Duration = Duration::from_secs(1);

/// The model of a disk.
#[derive(Clone, Copy)]
struct Model {
    /// The lender's option, and what follows the image in it.
    option: &'static str,
    more: &'static str,
    /// Its path in the guest.
    disk: &'static str,
}

const NVME: Model = Model {
    option: "--nvme",
    more: "",
    disk: "/dev/nvme0n1",
};
const MAPPED: Model = Model {
    more: ",mapped-doorbells",
    ..NVME
};
const VIRTIO_BLK: Model = Model {
    option: "--virtio-blk",
    disk: "/dev/vda",
    ..NVME
};

impl Model {
    fn lend(self, cluster: &Cluster) -> anyhow::Result<Daemon> {
        let image = cluster.image("disk0", 64 * MIB)?;
        let disk = format!("disk0={}{}", image.display(), self.more);
        cluster.lend(&[self.option, &disk])
    }

    fn boot(self, cluster: &Cluster) -> anyhow::Result<Guest<'_>> {
        let guest = cluster.guest("a").whole().boot()?;
        match self.option {
            "--virtio-blk" => open_virtio(&guest)?,
            _ => guest.wait_disk()?,
        }
        Ok(guest)
    }

    fn load(self, seconds: u64) -> String {
        LOAD.replace("DISK", self.disk)
            .replace("SECONDS", &seconds.to_string())
    }

    /// Kills something again and again while the guest does I/O; `kill` waits until that goes on.
    fn under_load(
        self,
        guest: &Guest<'_>,
        mut kill: impl FnMut(u64) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let kills = from_env("FARSIDE_KILLS")?.unwrap_or(KILLS);
        let time = FOR_A_KILL * kills as u32;
        let load = guest.exec_start(&self.load(time.as_secs()), time + BOOT)?;
        let began = Instant::now();
        let mut under_load = 0;
        for n in 1..=kills {
            std::thread::sleep(INTERVAL);
            under_load += u64::from(began.elapsed() < time);
            kill(n)?;
        }
        let output = load.wait()?;
        ensure!(output.success(), "{output}");
        println!("{under_load} of {kills} kills under load");
        ensure!(
            under_load > kills / 4,
            "{under_load} of {kills} kills under load"
        );
        Ok(())
    }
}

pub fn workers_that_are_killed_cost_a_guest_no_io_error(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    kill_workers(cluster, NVME)
}

pub fn workers_that_are_killed_cost_a_guest_with_virtio_blk_no_io_error(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    kill_workers(cluster, VIRTIO_BLK)
}

pub fn workers_that_are_killed_cost_a_guest_with_mapped_doorbells_no_io_error(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    kill_workers(cluster, MAPPED)
}

fn kill_workers(cluster: &Cluster, model: Model) -> anyhow::Result<Completion> {
    let lender = model.lend(cluster)?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = model.boot(cluster)?;
    let before = errors(&guest)?;
    model.under_load(&guest, |kills| {
        kill_process(worker(lender.pid(), "disk0")?, Signal::KILL)?;
        cluster.wait_status("another worker", SHORT, |status| {
            let connection = status.borrow("a", "disk0")?.connection;
            Ok(connection.filter(|it| it.restarts == kills))
        })?;
        Ok(())
    })?;
    finish(cluster, guest, &before, model)
}

/// For half an hour, or `FARSIDE_SECONDS`: the worker dies every 20 s, and the backend every 30 s.
pub fn half_an_hour_of_kills_costs_a_guest_no_io_error(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let seconds = match std::env::var("FARSIDE_SECONDS") {
        Ok(text) => text.parse().context("a number in FARSIDE_SECONDS")?,
        Err(_) => 1800,
    };
    let (lender, _image) = cluster.lend_disk(64 * MIB)?;
    let serve = cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let keeper = serve.start()?;
    let guest = cluster.guest("a").whole().boot()?;
    guest.wait_disk()?;
    let before = errors(&guest)?;
    let began = Instant::now();
    let load = guest.exec_start(&NVME.load(seconds), Duration::from_secs(seconds) + BOOT)?;
    let mut pauses = Vec::new();
    for second in (10..seconds.saturating_sub(5)).step_by(10) {
        let due = Duration::from_secs(second);
        std::thread::sleep(due.saturating_sub(began.elapsed()));
        for (what, is_due) in [("serve", second % 30 == 0), ("disk0", second % 20 == 10)] {
            if !is_due {
                continue;
            }
            let restarts = || -> anyhow::Result<(u64, u64)> {
                let status = cluster.status()?;
                let backends = status.0.backend("a").and_then(|it| it.restarts);
                let connection = status.borrow("a", "disk0")?.connection;
                let connected = connection.filter(|it| it.state == ConnectionState::Connected);
                let workers = connected.context("no process")?.restarts;
                Ok((backends.context("no keeper")?, workers))
            };
            let parent = if what == "serve" {
                keeper.pid()
            } else {
                lender.pid()
            };
            let then = restarts()?;
            let killed = Instant::now();
            kill_process(child(parent, what)?, Signal::KILL)?;
            while restarts().map_or(true, |now| now == then) {
                ensure!(killed.elapsed() < SHORT, "{}", keeper.log());
                std::thread::sleep(Duration::from_millis(20));
            }
            pauses.push(killed.elapsed());
        }
    }
    let output = load.wait()?;
    ensure!(output.success(), "{output}");
    pauses.sort();
    let (kills, last) = (pauses.len(), pauses.last());
    println!("{kills} kills in {seconds} s; another process after {last:?} at most");
    finish(cluster, guest, &before, NVME)
}

pub fn lenders_that_are_killed_or_stopped_cost_a_guest_no_io_error(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (mut lender, image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").whole().boot()?;
    guest.wait_disk()?;
    let before = errors(&guest)?;
    let drive = format!("disk0={}", image.display());
    NVME.under_load(&guest, |kills| {
        match kills % 2 {
            0 => lender.kill()?,
            _ => {
                lender.terminate()?;
                lender.wait_exit(SHORT)?;
            }
        }
        lender = cluster.lend(&["--nvme", &drive])?;
        Ok(())
    })?;
    finish(cluster, guest, &before, NVME)
}

pub fn backends_that_are_killed_cost_a_guest_no_io_error(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    kill_backends(cluster, NVME)
}

pub fn backends_that_are_killed_cost_a_guest_with_virtio_blk_no_io_error(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    kill_backends(cluster, VIRTIO_BLK)
}

pub fn backends_that_are_killed_cost_a_guest_with_mapped_doorbells_no_io_error(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    kill_backends(cluster, MAPPED)
}

fn kill_backends(cluster: &Cluster, model: Model) -> anyhow::Result<Completion> {
    let _lender = model.lend(cluster)?;
    let serve = cluster.serve("a", &["disk0"]).args(&["--keeper"]);
    let keeper = serve.start()?;
    let guest = model.boot(cluster)?;
    let before = errors(&guest)?;
    model.under_load(&guest, |kills| {
        kill_process(child(keeper.pid(), "serve")?, Signal::KILL)?;
        // Until the next one has its sockets, there is no status of it.
        let deadline = Instant::now() + SHORT;
        let goes_on = || -> anyhow::Result<bool> {
            let status = cluster.status()?;
            let restarts = status.0.backend("a").and_then(|it| it.restarts);
            let connection = status.borrow("a", "disk0")?.connection;
            let state = connection.map(|it| it.state);
            Ok(restarts == Some(kills) && state == Some(ConnectionState::Connected))
        };
        while !goes_on().unwrap_or_default() {
            ensure!(Instant::now() < deadline, "{}", keeper.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    })?;
    finish(cluster, guest, &before, model)
}

fn finish(
    cluster: &Cluster,
    guest: Guest<'_>,
    before: &str,
    model: Model,
) -> anyhow::Result<Completion> {
    let after = errors(&guest)?;
    ensure!(after == before, "the guest's kernel log has {after}");
    let status = cluster.status()?.borrow("a", "disk0")?;
    ensure!(status.last_error.is_none(), "{status:?}");
    check::io(&guest, model.disk, 41)?;
    if !model.more.is_empty() {
        let command = serde_json::json!({ "command-line": "info mtree -f" });
        let tree = guest.qmp().execute("human-monitor-command", command)?;
        let is_mapped = tree
            .as_str()
            .is_some_and(|tree| tree.contains("BAR 0 mmaps[0]"));
        ensure!(is_mapped, "the doorbells trap: {tree}");
    }
    guest.power_off()?;
    passed()
}

/// What the guest's kernel says of errors of the disk, or of commands that took long.
pub(crate) fn errors(guest: &Guest<'_>) -> anyhow::Result<String> {
    let said = guest.sh("dmesg | grep -iE 'I/O error|I/O tag|timeout|abort|controller is down|reset' | grep -iE 'nvme|vda|virtio_blk' || true")?;
    Ok(said)
}

/// The worker of a device.
pub(crate) fn worker(lender: u32, device: &str) -> anyhow::Result<Pid> {
    child(lender, device)
}

/// The child of a process that has an argument.
pub(crate) fn child(parent: u32, argument: &str) -> anyhow::Result<Pid> {
    let threads = std::fs::read_dir(format!("/proc/{parent}/task"))?.flatten();
    let children = threads.map(|thread| std::fs::read_to_string(thread.path().join("children")));
    let pids: String = children.map(Result::unwrap_or_default).collect();
    let has_it = |pid: &&str| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        if name.is_ok_and(|name| name.starts_with("farside-spare")) {
            return false;
        }
        let arguments = std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
        arguments.is_ok_and(|arguments| arguments.split('\0').any(|word| word == argument))
    };
    let pid = pids.split_whitespace().find(has_it);
    let pid = pid.and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
    pid.with_context(|| format!("process {parent} has no child with {argument:?}"))
}
