//! libvirt's operations on a running domain: those that a borrowed device does not allow
//! are refused, and the domain continues; the others work.

use anyhow::{Result, ensure};
use farside_tests::BOOT;

use crate::{
    domain::{Domain, read, write_and_read},
    stage::Stage,
};

/// Size of the NVMe namespace.
const DRIVE: u64 = 64 << 20;

pub fn a_domain_is_not_saved_nor_moved_but_paused_and_rebooted(stage: &Stage) -> Result<()> {
    let (_lender, _) = stage.cluster.lend_disk(DRIVE)?;
    let domain = Domain::define(stage, "web1", &["disk0"])?;
    let guest = domain.boot()?;
    let written = write_and_read(&guest, "/dev/nvme0n1")?;
    let lent = || stage.cluster.status()?.lent("disk0");

    // All of these save the state of its devices.
    let refused: [&[&str]; 5] = [
        &["managedsave", "web1"],
        &["save", "web1", "/tmp/web1.save"],
        &[
            "snapshot-create-as",
            "web1",
            "one",
            "--memspec",
            "/tmp/web1.memory",
        ],
        &["migrate", "web1", "qemu:///session"],
        &["migrate", "--live", "--unsafe", "web1", "qemu:///session"],
    ];
    for words in refused {
        let said = stage.fails(&[&["virsh", "--quiet"], words].concat())?;
        ensure!(
            said.contains("farside-borrowed-devices"),
            "{words:?}: {said}"
        );
    }
    ensure!(stage.virsh(&["domstate", "web1"])? == "running");
    ensure!(
        stage
            .virsh(&["list", "--with-managed-save", "--all", "--name"])?
            .is_empty()
    );
    ensure!(read(&guest, "/dev/nvme0n1")? == written);

    stage.virsh(&["suspend", "web1"])?;
    stage.virsh(&["resume", "web1"])?;
    ensure!(read(&guest, "/dev/nvme0n1")? == written);

    // libvirt sends an ACPI shutdown, and resets the machine after the power-off: QEMU
    // keeps running, and so the lease is kept.
    let before = lent()?;
    stage.virsh(&["reboot", "web1", "--mode", "acpi"])?;
    guest.wait_boot(2, BOOT)?;
    ensure!(read(&guest, "/dev/nvme0n1")? == written);
    ensure!(lent()?.borrowed_by == before.borrowed_by);
    domain.destroy()?;
    stage.nothing_left_of("web1")
}

/// The entry that prevents a domain from being saved can be removed from its XML.
pub fn a_state_that_was_saved_without_its_devices_is_not_restored(stage: &Stage) -> Result<()> {
    let (_lender, _) = stage.cluster.lend_disk(DRIVE)?;
    let domain = Domain::define(stage, "web1", &["disk0"])?;
    let xml = domain.xml()?;
    let without: Vec<_> = xml
        .lines()
        .filter(|line| !line.contains("'-blockdev'") && !line.contains("farside-borrowed-devices"))
        .collect();
    ensure!(without.len() + 2 == xml.lines().count(), "{xml}");
    domain.redefine(&without.join("\n"))?;
    stage.virsh(&["start", "--paused", "web1"])?;
    stage.virsh(&["save", "web1", "/tmp/web1.save"])?;
    stage.nothing_left_of("web1")?;
    let said = stage.fails(&["virsh", "restore", "/tmp/web1.save"])?;
    for word in ["borrows devices", "--force-boot"] {
        ensure!(said.contains(word), "no {word:?} in {said}");
    }
    stage.nothing_left_of("web1")?;

    // libvirt 11.3 prints "started", and does not start it.
    stage.virsh(&["start", "--paused", "web1"])?;
    stage.virsh(&["managedsave", "web1"])?;
    stage.run(&["virsh", "start", "web1"])?;
    stage.nothing_left_of("web1")?;
    stage.virsh(&["start", "--paused", "--force-boot", "web1"])?;
    domain.destroy()?;
    stage.nothing_left_of("web1")
}
