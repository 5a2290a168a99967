//! Refusals of `farside attach` and `farside detach`; the VM continues.

use anyhow::ensure;
use farside_tests::{BorrowState, Cluster, MIB, SHORT};
use libtest_mimic::Completion;
use serde_json::json;

use crate::{
    check,
    hotplug::{attach, detach, has},
    passed,
};

const DISK: &str = "/dev/nvme0n1";

pub fn a_guest_that_does_not_let_go_keeps_its_drive(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    // This guest does not handle hot plug.
    let guest = cluster
        .guest("a")
        .append("acpiphp.disable=1 pcie_ports=compat")
        .boot()?;
    guest.wait_disk()?;
    check::io(&guest, DISK, 301)?;
    let before = cluster.status()?.borrow("a", "disk0")?;
    for _ in 0..2 {
        let message = refused(cluster, &["detach", "a", "disk0", "--limit", "2"])?;
        ensure!(
            message.contains("the guest of VM a has not released disk0 within 2s")
                && message.contains("no hot-plug driver")
                && message.contains("stays plugged in"),
            "{message}"
        );
    }
    ensure!(has(&guest, "disk0")?);
    let after = cluster.status()?.borrow("a", "disk0")?;
    ensure!(
        (after.state, after.generation) == (BorrowState::Ready, before.generation),
        "{after:?}"
    );
    check::io(&guest, DISK, 302)?;
    check::no_faults(cluster, &["disk0"])?;
    guest.power_off()?;
    passed()
}

pub fn a_paused_guest_lets_go_when_it_goes_on(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    guest.qmp().execute("stop", json!({}))?;
    let message = refused(cluster, &["detach", "a", "disk0", "--limit", "1"])?;
    ensure!(
        message.contains("it does not run (QEMU's state: paused)"),
        "{message}"
    );
    ensure!(has(&guest, "disk0")?);
    ensure!(cluster.status()?.lent("disk0")?.borrowed_by.as_deref() == Some("a"));
    guest.qmp().execute("cont", json!({}))?;
    // The earlier request is still pending, and is completed now.
    guest.wait_no_path(DISK, SHORT)?;
    cluster.wait_free("disk0")?;
    detach(cluster, "a", "disk0")?;
    ensure!(!has(&guest, "disk0")?);
    ensure!(cluster.status()?.lent("disk0")?.borrowed_by.is_none());
    attach(cluster, "a", "disk0")?;
    guest.wait_disk()?;
    check::io(&guest, DISK, 303)?;
    guest.power_off()?;
    passed()
}

pub fn what_cannot_be_plugged_in_leaves_the_vm_as_it_was(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let image = cluster.image("disk0", 64 * MIB)?;
    let _lender = cluster.lend(&[
        "--nvme",
        &format!("disk0={}", image.display()),
        "--dma-test",
        "dma0",
        "--dma-test",
        "dma1",
        "--dma-test",
        "dma2",
        "--dma-test",
        "dma3",
        "--dma-test",
        "dma4",
    ])?;
    let _backend_b = cluster.serve("b", &["dma4"]).start()?;
    let other = cluster.guest("b").paused().start()?;
    cluster.wait_state("b", "dma4", BorrowState::Leased)?;

    let says = |args: &[&str], words: &[&str]| -> anyhow::Result<()> {
        let message = refused(cluster, args)?;
        for word in words {
            ensure!(message.contains(word), "{args:?}: {message}");
        }
        Ok(())
    };
    says(
        &["attach", "ghost", "disk0"],
        &["VM ghost does not run", "no configuration"],
    )?;
    says(&["attach", "../a", "disk0"], &["VM name \"../a\""])?;
    says(&["attach", "a", "x/y"], &["device id \"x/y\""])?;

    let backend = cluster.serve("a", &["disk0"]).start()?;
    says(&["attach", "a", "dma0"], &["VM a does not run"])?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    says(&["attach", "a", "dma7"], &["no lender has device \"dma7\""])?;
    says(&["attach", "a", "dma4"], &["VM b"])?;
    says(
        &["attach", "a", "dma0", "--port", "0"],
        &["port 0 of VM a is taken"],
    )?;
    says(
        &["attach", "a", "dma0", "--port", "60"],
        &["port 60 of VM a is not there", "0, 1, 2"],
    )?;
    says(
        &["attach", "a", "disk0", "--port", "1"],
        &["already, at port 0"],
    )?;
    says(
        &["detach", "a", "dma0"],
        &["dma0 is not plugged into VM a; it has disk0"],
    )?;
    attach(cluster, "a", "dma0")?;
    attach(cluster, "a", "dma1")?;
    says(
        &["attach", "a", "dma2"],
        &["no free port for device dma2", "0, 1, 2", "spare-ports"],
    )?;

    // None of this has left any state.
    let status = cluster.status()?;
    for device in ["dma2", "dma4", "dma7"] {
        ensure!(status.borrow("a", device).is_err(), "{device} is served");
    }
    ensure!(status.lent("dma4")?.borrowed_by.as_deref() == Some("b"));
    check::io(&guest, DISK, 310)?;

    // A killed QEMU leaves its socket.
    guest.kill_qemu()?;
    ensure!(cluster.directory().join("vm/a/qmp").exists());
    says(
        &["attach", "a", "dma2"],
        &["VM a does not run", "what a QEMU that ended has left"],
    )?;
    cluster.wait_free("disk0")?;
    backend.terminate()?;
    other.kill_qemu()?;
    passed()
}

/// Runs `farside`, which must fail. Returns its message.
pub fn refused(cluster: &Cluster, args: &[&str]) -> anyhow::Result<String> {
    let ended = cluster.run(args)?;
    ensure!(
        !ended.status.success() && ended.stdout.is_empty(),
        "farside {args:?} succeeds: {ended:?}"
    );
    Ok(ended.stderr)
}
