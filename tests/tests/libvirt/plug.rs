//! Devices attached to a running domain, and detached.

use anyhow::{Result, ensure};
use farside_tests::SHORT;

use crate::{
    domain::{Domain, read, write_and_read},
    stage::Stage,
};

/// Size of each NVMe namespace.
const DRIVE: u64 = 64 << 20;

/// A domain without a farside configuration: its XML has all the data.
pub fn drives_are_attached_to_a_running_domain_and_detached(stage: &Stage) -> Result<()> {
    let _lender = stage.lend_two(DRIVE)?;
    let free = |device: &str| -> Result<()> {
        let lent = stage.cluster.status()?.lent(device)?;
        ensure!(lent.borrowed_by.is_none(), "{lent:?}");
        Ok(())
    };
    let domain = Domain::define(stage, "web1", &["disk0"])?;
    let guest = domain.boot()?;
    let (defined, running) = (domain.xml()?, stage.virsh(&["dumpxml", "web1"])?);
    let on_first = write_and_read(&guest, "/dev/nvme0n1")?;
    ensure!(!guest.exec("ls /dev/nvme1n1", SHORT)?.success());

    stage.ok(&["farside", "attach", "web1", "disk1"])?;
    let on_second = write_and_read(&guest, "/dev/nvme1n1")?;
    let again = stage.ok(&["farside", "attach", "web1", "disk1"])?;
    ensure!(again.contains("before"), "{again}");
    stage.ok(&["farside", "detach", "web1", "disk1"])?;
    guest.wait_no_path("/dev/nvme1n1", SHORT)?;
    free("disk1")?;
    ensure!(read(&guest, "/dev/nvme0n1")? == on_first);

    stage.ok(&["farside", "attach", "web1", "disk1"])?;
    ensure!(
        read(&guest, "/dev/nvme1n1")? == on_second,
        "the data is gone"
    );
    // A cold-plugged device can be detached in the same way.
    stage.ok(&["farside", "detach", "web1", "disk0"])?;
    guest.wait_no_path("/dev/nvme0n1", SHORT)?;
    free("disk0")?;
    ensure!(read(&guest, "/dev/nvme1n1")? == on_second);

    // Changes apply to the running domain only: its XML is unchanged, and so is its next
    // start.
    ensure!(domain.xml()? == defined, "{}", domain.xml()?);
    ensure!(stage.virsh(&["dumpxml", "web1"])? == running);
    domain.destroy()?;
    stage.nothing_left_of("web1")?;
    stage.cluster.wait_free("disk1")?;
    stage.virsh(&["start", "--paused", "web1"])?;
    let lent = stage.cluster.status()?.lent("disk0")?;
    ensure!(lent.borrowed_by.as_deref() == Some("web1"), "{lent:?}");
    free("disk1")?;
    domain.destroy()
}

pub fn what_cannot_be_attached_or_detached_is_refused(stage: &Stage) -> Result<()> {
    let _lender = stage.lend_two(DRIVE)?;
    let domain = Domain::define(stage, "web1", &["disk0"])?;
    domain.describe(&["disk0"], "")?;
    let other = Domain::define(stage, "web2", &["disk1"])?;
    let refused = |words: &[&str], expected: &[&str]| -> Result<()> {
        let said = stage.fails(&[&["farside"], words].concat())?;
        for word in expected {
            ensure!(said.contains(word), "{words:?}: no {word:?} in {said}");
        }
        Ok(())
    };
    for verb in ["attach", "detach"] {
        refused(&[verb, "web1", "disk1"], &["web1 does not run"])?;
        refused(&[verb, "web9", "disk1"], &["web9", "configuration"])?;
    }
    stage.virsh(&["start", "--paused", "web2"])?;
    let guest = domain.boot()?;
    let written = write_and_read(&guest, "/dev/nvme0n1")?;

    refused(&["attach", "web1", "disk1"], &["disk1", "web2"])?;
    refused(&["attach", "web1", "disk7"], &["disk7"])?;
    refused(&["detach", "web1", "disk1"], &["disk1", "it has disk0"])?;
    other.destroy()?;
    refused(
        &["attach", "web1", "disk1", "--port", "0"],
        &["port 0", "is taken"],
    )?;

    // A suspended guest cannot release the device; it does so later, and then another
    // `detach` returns the device.
    stage.virsh(&["suspend", "web1"])?;
    refused(
        &["detach", "web1", "disk0", "--limit", "1"],
        &["paused", "stays plugged in"],
    )?;
    let lent = stage.cluster.status()?.lent("disk0")?;
    ensure!(lent.borrowed_by.as_deref() == Some("web1"), "{lent:?}");
    stage.virsh(&["resume", "web1"])?;
    guest.wait_no_path("/dev/nvme0n1", SHORT)?;
    stage.ok(&["farside", "detach", "web1", "disk0"])?;
    stage.cluster.wait_free("disk0")?;
    stage.ok(&["farside", "attach", "web1", "disk0"])?;
    ensure!(read(&guest, "/dev/nvme0n1")? == written, "the data is gone");
    domain.destroy()?;
    stage.nothing_left_of("web1")
}
