//! Processes killed during hot plug or unplug.

use std::os::unix::{net::UnixStream, process::ExitStatusExt};

use anyhow::{Context, ensure};
use farside_tests::{BorrowState, Cluster, Guest, MIB, SHORT, Status};
use libtest_mimic::Completion;
use rustix::process::Signal;

use crate::{
    check,
    hotplug::{attach, detach, has},
    hotplug_refusals::refused,
    passed,
};

const DISK: &str = "/dev/nvme0n1";

pub fn a_backend_killed_in_an_attach_gives_the_device_back(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    type Moment = fn(&Status) -> anyhow::Result<Option<()>>;
    let moments: [Moment; 2] = [
        |status| Ok(status.borrow("a", "disk0").is_ok().then_some(())),
        |status| Ok(status.lent("disk0")?.borrowed_by.map(drop)),
    ];
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let description = cluster.describe("a", "devices = [\"dma0\"]\nmemory = \"512M\"\n")?;
    let before = std::fs::read(&description)?;
    let mut backend = cluster.serve("a", &["dma0"]).start()?;
    let mut guest = cluster.guest("a").boot()?;
    let instead_of = |guest: Guest<'_>| {
        guest.kill_qemu()?;
        cluster.guest("a").boot()
    };
    for (n, moment) in moments.into_iter().enumerate() {
        let mut command = cluster.start("farside attach", &["attach", "a", "disk0"])?;
        cluster.wait_status("disk0 on its way", SHORT, moment)?;
        backend.kill()?;
        command.wait_exit(SHORT)?;
        cluster.wait_free("disk0")?;
        backend = cluster.serve("a", &["dma0"]).start()?;
        match taken_out(cluster, &guest) {
            Ok(true) => {}
            Ok(false) => guest = instead_of(guest)?,
            // A backend that is killed with an unread request of QEMU resets QEMU's socket,
            // and QEMU 11.1 aborts then; or it crashes as it takes back what it had set up
            // for the device. Start the VM again.
            Err(error) if ended_with_backend(&guest.qemu_log()) => {
                let signal = guest.kill_qemu()?.signal();
                let crashed = [Signal::ABORT, Signal::SEGV]
                    .map(|it| Some(it.as_raw()))
                    .contains(&signal);
                ensure!(crashed, "QEMU ended by {signal:?}: {error:#}");
                guest = cluster.guest("a").boot()?;
            }
            Err(error) => return Err(error),
        }
        comes_back(cluster, &guest, 500 + n as u64)?;
    }
    ensure!(std::fs::read(&description)? == before);
    guest.power_off()?;
    passed()
}

pub fn a_drive_whose_backend_was_killed_is_brought_back(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let mut backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    check::io(&guest, DISK, 520)?;
    backend.kill()?;
    cluster.wait_free("disk0")?;
    // While no backend runs, and while a different one does.
    let message = refused(cluster, &["attach", "a", "disk0"])?;
    ensure!(message.contains("its backend has ended since"), "{message}");
    ensure!(has(&guest, "disk0")?);
    let _backend = cluster.serve("a", &["dma0"]).start()?;
    detach_dead(cluster)?;
    comes_back(cluster, &guest, 521)?;
    guest.power_off()?;
    passed()
}

pub fn a_dead_drive_that_no_driver_ran_stays_until_the_vm_ends(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let mut backend = cluster.serve("a", &["dma0"]).start()?;
    // Its guest does not handle hot plug.
    let guest = cluster
        .guest("a")
        .append("acpiphp.disable=1 pcie_ports=compat")
        .boot()?;
    attach(cluster, "a", "disk0")?;
    for alive in [true, false] {
        if !alive {
            backend.kill()?;
            cluster.wait_free("disk0")?;
        }
        let message = refused(cluster, &["detach", "a", "disk0"])?;
        ensure!(
            message.contains("disk0 cannot be unplugged while its memory is turned off"),
            "{message}"
        );
        ensure!(has(&guest, "disk0")?);
    }
    guest.power_off()?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    check::io(&guest, DISK, 530)?;
    guest.power_off()?;
    passed()
}

/// Whether QEMU reported an error of the backend's connection that it does not survive.
fn ended_with_backend(log: &str) -> bool {
    log.contains("error_setv") || log.contains("Unable to write")
}

/// Detaches the device if QEMU has it without a backend. False if it must stay, because the
/// guest had no driver bound when the backend was killed.
fn taken_out(cluster: &Cluster, guest: &Guest<'_>) -> anyhow::Result<bool> {
    if !has(guest, "disk0")? {
        return Ok(true);
    }
    let ended = cluster.run(&["detach", "a", "disk0", "--limit", "120"])?;
    let stays = ended.stderr.contains("while its memory is turned off");
    ensure!(ended.status.success() || stays, "{ended:?}");
    Ok(!stays)
}

/// Detaches the device that QEMU has and no backend serves any more.
fn detach_dead(cluster: &Cluster) -> anyhow::Result<()> {
    let message = refused(cluster, &["attach", "a", "disk0"])?;
    ensure!(message.contains("its backend has ended since"), "{message}");
    detach(cluster, "a", "disk0")?;
    Ok(())
}

/// Attaches and detaches the device again, and checks the result.
fn comes_back(cluster: &Cluster, guest: &Guest<'_>, seed: u64) -> anyhow::Result<()> {
    ensure!(!has(guest, "disk0")?);
    guest.wait_no_path(DISK, SHORT)?;
    attach(cluster, "a", "disk0")?;
    guest.wait_disk()?;
    check::io(guest, DISK, seed)?;
    detach(cluster, "a", "disk0")?;
    ensure!(cluster.status()?.lent("disk0")?.borrowed_by.is_none());
    Ok(())
}

pub fn a_qemu_killed_in_a_detach_gives_the_device_back(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let description = cluster.describe("a", "devices = [\"disk0\"]\nmemory = \"512M\"\n")?;
    let before = std::fs::read(&description)?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    // A guest that would never release the device.
    let guest = cluster
        .guest("a")
        .append("acpiphp.disable=1 pcie_ports=compat")
        .boot()?;
    guest.wait_disk()?;
    let mut command = cluster.start(
        "farside detach",
        &["detach", "a", "disk0", "--limit", "600"],
    )?;
    let lock = cluster.directory().join("state/vm/a/command.lock");
    let pid = command.pid().to_string();
    cluster.wait_status("the command at work", SHORT, |_| {
        let holder = std::fs::read_to_string(&lock)?;
        Ok((holder.trim() == pid).then_some(()))
    })?;
    // A concurrent attach of another device is refused.
    let message = refused(cluster, &["attach", "a", "dma0"])?;
    ensure!(
        message.contains(&format!(
            "another farside command (process {pid}) is in progress on VM a: wait until"
        )),
        "{message}"
    );
    guest.kill_qemu()?;
    ensure!(!command.wait_exit(SHORT)?.success());
    let said = command.log();
    ensure!(said.contains("the monitor of VM a"), "{said}");
    cluster.wait_free("disk0")?;
    let left = cluster.wait_state("a", "disk0", BorrowState::Unleased)?;
    ensure!(left.is_closed(), "{left:?}");
    ensure!(std::fs::read(&description)? == before);
    let message = refused(cluster, &["detach", "a", "disk0"])?;
    ensure!(message.contains("VM a does not run"), "{message}");
    // The next start has all devices as before.
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    check::io(&guest, DISK, 510)?;
    guest.power_off()?;
    passed()
}

pub fn a_guest_that_is_not_there_yet_keeps_its_drive(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    // Without a system on that disk, the firmware finds none and stops.
    let guest = cluster.guest("a").boot_from("disk0").start()?;
    let before = cluster.wait_state("a", "disk0", BorrowState::Ready)?;

    // QEMU serves one monitor client at a time: the message names a client that holds it.
    let monitor = cluster.directory().join("vm/a/qmp");
    let kept = UnixStream::connect(&monitor).context("the monitor")?;
    let message = refused(cluster, &["detach", "a", "disk0"])?;
    ensure!(
        message.contains("serves one client at a time, so close any other"),
        "{message}"
    );
    drop(kept);

    let message = refused(cluster, &["detach", "a", "disk0", "--limit", "1"])?;
    ensure!(
        message.contains("the guest of VM a has not released disk0 within 1s"),
        "{message}"
    );
    ensure!(has(&guest, "disk0")?);
    let after = cluster.wait_state("a", "disk0", BorrowState::Ready)?;
    ensure!(after.generation == before.generation, "{after:?}");
    guest.kill_qemu()?;
    cluster.wait_free("disk0")?;
    passed()
}
