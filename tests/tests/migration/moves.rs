//! Undisturbed migrations, and refused ones.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_tests::Daemon;
use libtest_mimic::Completion;

use crate::stage::{Chain, Ledger, Stage, VM};

/// Number of migrations, unless `FARSIDE_MIGRATIONS` is set. Each boots a guest.
const MIGRATIONS: usize = 6;

/// Durations of migrations.
#[derive(Default)]
struct Times {
    /// Until `farside migrate` has ended: the new QEMU runs.
    moved: Vec<Duration>,
    /// Until the new guest has its NVMe disk.
    usable: Vec<Duration>,
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut comma = "";
        for (what, times) in [("the command", &self.moved), ("with boot", &self.usable)] {
            let mut times = times.clone();
            times.sort();
            if let (Some(least), Some(most)) = (times.first(), times.last()) {
                let median = times[times.len() / 2];
                write!(
                    f,
                    "{comma}{what} {least:.1?} to {most:.1?}, median {median:.1?}"
                )?;
                comma = "; ";
            }
        }
        Ok(())
    }
}

pub fn a_vm_moves_back_and_forth_with_its_drive(stage: &Stage) -> Result<Completion> {
    let count = match std::env::var("FARSIDE_MIGRATIONS") {
        Ok(text) => text.parse().context("FARSIDE_MIGRATIONS")?,
        Err(_) => MIGRATIONS,
    };
    let lender = stage.lend()?;
    stage.ok("a", &["start", VM])?;
    let mut guest = stage.guest()?;
    let address = guest.exec_ok("readlink -f /sys/class/nvme/nvme0/device", crate::SHORT)?;
    let mut chain = Chain::default();
    let mut last_generation = 0;
    let mut times = Times::default();
    for n in 0..count {
        let (from, to) = if n % 2 == 0 { ("a", "b") } else { ("b", "a") };
        chain.grow(&guest)?;
        let begin = Instant::now();
        let moved = stage
            .begin(from, &["migrate", VM, "--to", to])?
            .end(stage)?;
        ensure!(moved.0, "migration {n} failed: {}", moved.1);
        times.moved.push(begin.elapsed());
        guest = stage.guest()?;
        times.usable.push(begin.elapsed());
        chain
            .verify(&guest)
            .with_context(|| format!("after migration {n}"))?;
        let now = guest.exec_ok("readlink -f /sys/class/nvme/nvme0/device", crate::SHORT)?;
        ensure!(now == address, "the disk was at {address}, and is at {now}");
        ensure!(stage.running()? == [to], "{:?}", stage.running());
        let (holder, generation) = stage.holder()?.context("nobody has the disk")?;
        ensure!(
            holder == VM && generation > last_generation,
            "{holder} {generation}"
        );
        last_generation = generation;
        stage.refused(from, &["start", VM], &["has moved to", to])?;
        let config = stage.path(to, &format!("etc/vm/{VM}.toml"));
        let config = crate::stage::shown(&config);
        let serve = ["serve", "--vm", VM, "--config", &config];
        stage.refused(from, &serve, &["has moved to"])?;
    }
    ensure!(chain.records() == count);
    let leases = Ledger::default().audit(&lender)?;
    ensure!(leases.handovers == count, "{leases:?}");
    ensure!(leases.count == count + 1, "{leases:?}");
    let at = if count % 2 == 0 { "a" } else { "b" };
    let backends = stage.backends(at)?;
    // It connects for the backend.
    let helpers = stage.processes(at, &["serve-helper"])?;
    let holder = leases.holder.context("nobody has the disk")?;
    ensure!(
        backends.len() == 3 && helpers == [holder.cast_signed()],
        "{backends:?}, {helpers:?}, {leases:?}"
    );
    eprintln!("{count} migrations: {times}");
    Ok(Completion::Completed)
}

/// A backend on the old host that does not check whether it may run: the lender refuses it.
pub fn a_host_that_was_left_does_not_get_the_drive_whatever_it_does(
    stage: &Stage,
) -> Result<Completion> {
    let _lender = stage.lend()?;
    let text = stage.description()?;
    // A VM that does not run can move, too.
    stage.ok("a", &["migrate", VM, "--to", "b"])?;
    ensure!(stage.running()?.is_empty());
    // The old host loses its state, and is configured anew, as after a restore from a
    // backup.
    fs::remove_dir_all(stage.path("a", "state"))?;
    stage.describe(&text)?;
    let ended = stage.run("a", &["start", VM])?;
    ensure!(!ended.status.success(), "{ended:?}");
    let log = stage.path("a", &format!("state/vm/{VM}/backend.log"));
    let log = fs::read_to_string(log)?;
    ensure!(log.contains("was moved to another host"), "{log}");
    ensure!(stage.holder()?.is_none());
    // Nor is another VM lent the device, before the new host has borrowed it.
    let listed = stage.ok(
        "b",
        &[
            "devices",
            "--lender",
            &crate::stage::shown(&stage.lender_socket()),
        ],
    )?;
    ensure!(
        listed.contains(&format!("reserved for VM {VM}")),
        "{listed}"
    );
    stage.ok("b", &["start", VM])?;
    let _guest = stage.guest()?;
    let (holder, _) = stage.holder()?.context("nobody has the disk")?;
    ensure!(holder == VM);
    // The administrator declares the new host lost, and takes the VM back.
    stage.ok("a", &["migration", "claim", VM])?;
    ensure!(stage.holder()?.is_none(), "the lease there is over");
    stage.ok("a", &["start", VM])?;
    stage.guest()?;
    Ok(Completion::Completed)
}

/// The lender runs on one of the two hosts: first on the old one, then on the new one.
pub fn the_lender_may_be_one_of_the_two_hosts(stage: &Stage) -> Result<Completion> {
    let image = stage.path("a", "disk0.img");
    fs::File::create(&image)?.set_len(64 << 20)?;
    let drive = format!("disk0={}", crate::stage::shown(&image));
    let lend = ["lend", "--name", "rack1", "--nvme", &drive];
    let lender = Daemon::start("the lender", stage.command("a", &lend)?)?;
    lender.wait_log("listens at", crate::SHORT)?;
    let socket = crate::stage::shown(&stage.path("a", "run/lender.sock"));
    let text = stage.description()?;
    let third = crate::stage::shown(&stage.lender_socket());
    ensure!(text.contains(&third));
    stage.describe(&text.replace(&third, &socket))?;

    stage.ok("a", &["start", VM])?;
    let mut chain = Chain::default();
    // Dropping the old value kills it.
    let guest = stage.guest()?;
    chain.grow(&guest)?;
    stage.ok("a", &["migrate", VM, "--to", "b"])?;
    let guest = stage.guest()?;
    chain.verify(&guest)?;
    chain.grow(&guest)?;
    stage.ok("b", &["migrate", VM, "--to", "a"])?;
    let guest = stage.guest()?;
    chain.verify(&guest)?;
    ensure!(stage.running()? == ["a"], "{:?}", stage.running());
    stage.refused("b", &["start", VM], &["has moved to"])?;
    let leases = Ledger::default().audit(&lender)?;
    ensure!(leases.count == 3 && leases.handovers == 2, "{leases:?}");
    Ok(Completion::Completed)
}

pub fn what_cannot_move_is_refused_and_runs_on(stage: &Stage) -> Result<Completion> {
    let text = stage.description()?;
    stage.refused("a", &["migrate", VM, "--to", "b"], &["lender"])?;
    let _lender = stage.lend()?;
    stage.ok("a", &["start", VM])?;
    let guest = stage.guest()?;
    let migrate = ["migrate", VM, "--to", "b"];
    let runs_on = |what: &str| -> Result<()> {
        ensure!(stage.running()? == ["a"], "{what}: {:?}", stage.running());
        ensure!(
            stage.holder()?.is_some_and(|(holder, _)| holder == VM),
            "{what}: nobody has the disk"
        );
        guest.exec_ok(
            "dd if=/dev/nvme0n1 of=/dev/null bs=4096 count=1",
            crate::SHORT,
        )?;
        Ok(())
    };

    // The name is in use.
    let there = stage.path("b", &format!("etc/vm/{VM}.toml"));
    fs::write(&there, "devices = []\n")?;
    stage.refused("a", &migrate, &["there is a VM web1 already", "as it was"])?;
    ensure!(fs::read_to_string(&there)? == "devices = []\n");
    fs::remove_file(&there)?;
    runs_on("name")?;

    // An unknown host.
    let nowhere = ["migrate", VM, "--to", "nowhere"];
    stage.refused("a", &nowhere, &["nowhere", "as it was"])?;
    runs_on("host")?;

    // A binary that is missing there. The VM keeps running, so only the text changes.
    let program = farside_tests::testbed()?.qemu().display().to_string();
    stage.describe(&text.replace(&program, "/no/such/qemu"))?;
    stage.refused("a", &migrate, &["/no/such/qemu", "as it was"])?;
    stage.describe(&text)?;
    runs_on("program")?;

    // The NTB endpoint is that of each host.
    stage.describe(&format!("ntb = true\n{text}"))?;
    let host = stage.path("b", "etc/host.toml");
    fs::write(&host, "ntb = \"ffff:ff:1f.7\"\n")?;
    let check = [&migrate[..], &["--check"]].concat();
    let said = stage.run("a", &check)?;
    ensure!(!said.status.success(), "{said:?}");
    let problem = format!(
        "needs the NTB endpoint /sys/bus/pci/devices/ffff:ff:1f.7, which is not there: correct `ntb` in {}",
        host.display()
    );
    ensure!(said.stdout.contains(&problem), "{said:?}");
    fs::remove_file(&host)?;
    stage.describe(&text)?;
    runs_on("endpoint")?;

    // A path of the lender's socket that only this host has.
    let lender = crate::stage::shown(&stage.lender_socket());
    let own = text.replace(&format!("lenders = [{lender:?}]"), "");
    ensure!(own != text);
    std::os::unix::fs::symlink(&lender, stage.path("a", "run/lender.sock"))?;
    stage.describe(&own)?;
    stage.refused(
        "a",
        &migrate,
        &["lender.sock", "as both hosts reach it", "as it was"],
    )?;
    stage.describe(&text)?;
    runs_on("socket")?;

    // A paused guest would lose its memory contents.
    guest.qmp().execute("stop", serde_json::json!({}))?;
    stage.refused("a", &migrate, &["does not run (paused)"])?;
    guest.qmp().execute("cont", serde_json::json!({}))?;
    runs_on("paused")?;

    // A modified journal.
    let journal = stage.path("a", &format!("state/migrations/{VM}.json"));
    let before = fs::read_to_string(&journal)?;
    fs::write(&journal, before.replace("undone", "start"))?;
    stage.refused("a", &migrate, &["was changed"])?;
    stage.refused("a", &["migration", "resume", VM], &["was changed"])?;
    fs::write(
        &journal,
        before.replace("\"manifest\": 3", "\"manifest\": 7"),
    )?;
    stage.refused("a", &migrate, &["version 7"])?;
    fs::write(&journal, before)?;
    runs_on("journal")?;

    // A guest that does not power off in time.
    guest.exec_ok("touch /tmp/stay", crate::SHORT)?;
    let late = ["migrate", VM, "--to", "b", "--shutdown-timeout", "0"];
    stage.refused("a", &late, &["power", "as it was"])?;
    runs_on("deaf guest")?;
    Ok(Completion::Completed)
}
