//! Domains that are started, ended and started again.

use anyhow::{Context, Result, ensure};
use farside_tests::{BOOT, sha256_of};

use crate::{
    domain::{DATA, Domain, read, write_and_read},
    stage::Stage,
};

/// Size of the NVMe namespace.
const DRIVE: u64 = 64 << 20;

pub fn a_domain_keeps_its_data_when_it_is_destroyed_started_and_shut_down(
    stage: &Stage,
) -> Result<()> {
    let (_lender, image) = stage.cluster.lend_disk(DRIVE)?;
    let domain = Domain::define(stage, "web1", &["disk0"])?;
    stage.nothing_left_of("web1")?;

    let guest = domain.boot()?;
    let written = write_and_read(&guest, "/dev/nvme0n1")?;
    ensure!(
        sha256_of(&image, 0, DATA)? == written,
        "the image has other data"
    );
    let place = guest.exec_ok("readlink -f /sys/block/nvme0n1", BOOT)?;
    ensure!(
        stage
            .cluster
            .status()?
            .lent("disk0")?
            .borrowed_by
            .as_deref()
            == Some("web1")
    );

    // When virsh returns, the hook has returned the device.
    domain.destroy()?;
    guest.wait_gone(BOOT)?;
    stage.nothing_left_of("web1")?;
    ensure!(stage.cluster.status()?.lent("disk0")?.borrowed_by.is_none());

    let guest = domain.boot()?;
    ensure!(read(&guest, "/dev/nvme0n1")? == written, "the data is gone");
    let again = guest.exec_ok("readlink -f /sys/block/nvme0n1", BOOT)?;
    ensure!(place == again, "the disk was at {place}, and is at {again}");

    stage.virsh(&["shutdown", "web1"])?;
    guest.wait_gone(BOOT)?;
    stage.wait_off("web1")?;
    stage.nothing_left_of("web1")?;
    stage.virsh(&["undefine", "web1"])?;
    let log = domain.backend_log()?;
    ensure!(
        log.matches("returned").count() == 2,
        "not two returns in {log}"
    );
    Ok(())
}

pub fn two_domains_have_their_own_drives_and_a_third_is_told_who_has_one(
    stage: &Stage,
) -> Result<()> {
    let _lender = stage.lend_two(DRIVE)?;
    let first = Domain::define(stage, "web1", &["disk0"])?;
    let second = Domain::define(stage, "web2", &["disk1"])?;
    let third = Domain::define(stage, "web3", &["disk0"])?;

    let guests = (first.boot()?, second.boot()?);
    let written = (
        write_and_read(&guests.0, "/dev/nvme0n1")?,
        write_and_read(&guests.1, "/dev/nvme0n1")?,
    );
    ensure!(written.0 != written.1);
    let image = |name: &str| stage.cluster.directory().join(name);
    ensure!(sha256_of(&image("disk0.img"), 0, DATA)? == written.0);
    ensure!(sha256_of(&image("disk1.img"), 0, DATA)? == written.1);

    let said = stage.fails(&["virsh", "start", &third.vm])?;
    ensure!(!said.is_empty(), "virsh says nothing");
    stage.nothing_left_of("web3")?;
    let log = third.backend_log().context("why it did not start")?;
    ensure!(log.contains("web1"), "no word of who has it in {log}");

    // One domain ends without disturbing the other.
    first.destroy()?;
    stage.nothing_left_of("web1")?;
    ensure!(read(&guests.1, "/dev/nvme0n1")? == written.1);
    second.destroy()?;
    stage.nothing_left_of("web2")
}
