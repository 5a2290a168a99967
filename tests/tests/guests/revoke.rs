//! `farside revoke` of a disk that a guest uses.

use anyhow::ensure;
use farside_tests::{BorrowState, Cluster, MIB, SHORT};
use libtest_mimic::Completion;
use serde_json::json;

use crate::{
    check,
    hotplug::{attach, done, has},
    hotplug_refusals::refused,
    passed,
};

const DISK: &str = "/dev/nvme0n1";

pub fn a_revoked_drive_leaves_a_running_guest_in_order(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (lender, _image) = cluster.lend_disk(64 * MIB)?;
    let backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    check::io(&guest, DISK, 601)?;
    let told = done(cluster, &["revoke", "disk0", "--limit", "120"])?;
    ensure!(
        told.contains("disk0 is back: the guest of VM a released it"),
        "{told}"
    );
    lender.wait_log("device disk0: returned (VM a", SHORT)?;
    let lent = cluster.status()?.lent("disk0")?;
    ensure!(lent.borrowed_by.is_none() && lent.is_closed(), "{lent:?}");
    check::no_faults(cluster, &["disk0"])?;
    ensure!(!has(&guest, "disk0")?);
    guest.wait_no_path(DISK, SHORT)?;
    backend.wait_log("device disk0 (VM a): released for its lender", SHORT)?;
    let refusal = "device disk0 is unavailable";
    let message = refused(cluster, &["attach", "a", "disk0"])?;
    ensure!(message.contains(refusal), "{message}");
    comes_back(cluster, &guest, 602)?;
    guest.power_off()?;
    passed()
}

pub fn a_revoked_drive_is_taken_from_a_guest_that_does_not_answer(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    check::io(&guest, DISK, 611)?;
    guest.qmp().execute("stop", json!({}))?;
    let told = done(cluster, &["revoke", "disk0", "--limit", "3"])?;
    ensure!(
        told.contains("the guest of VM a did not release it, and the lender ended the lease"),
        "{told}"
    );
    let lent = cluster.status()?.lent("disk0")?;
    ensure!(lent.borrowed_by.is_none() && lent.is_closed(), "{lent:?}");
    cluster.wait_state("a", "disk0", BorrowState::Lost)?;
    ensure!(has(&guest, "disk0")?);
    backend.wait_log("the guest has not released it for its lender", SHORT)?;
    // The guest has been asked, and releases a device that is gone.
    guest.qmp().execute("cont", json!({}))?;
    guest.wait_no_path(DISK, SHORT)?;
    cluster.wait_state("a", "disk0", BorrowState::Unleased)?;
    comes_back(cluster, &guest, 612)?;
    guest.power_off()?;
    passed()
}

/// Attaches the device again, and uses it.
fn comes_back(
    cluster: &Cluster,
    guest: &farside_tests::Guest<'_>,
    seed: u64,
) -> anyhow::Result<()> {
    done(cluster, &["devices", "--available", "disk0"])?;
    attach(cluster, "a", "disk0")?;
    guest.wait_disk()?;
    check::io(guest, DISK, seed)
}
