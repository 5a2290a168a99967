//! A physical drive that is attached to a running VM of its host, and detached.

use std::path::Path;

use anyhow::{Context, Result};
use farside_testbed::Nested;

use super::{
    Set,
    facts::PlugFacts,
    host::Host,
    moves::describe,
    network::VM,
    play::{DEVICE, DRIVE, IO, LONG, write_and_read},
    stage,
};
use crate::{BOOT, SHORT, sha256_of};

/// The device of the VM's configuration.
const OTHER: &str = "dma0";

pub(super) fn plugged(set: &Set<'_>) -> Result<PlugFacts> {
    let mut facts = PlugFacts::default();
    let image = stage::image(set, "plugged.img")?;
    (set.tell)("booting the host");
    let builder = set.testbed.host_vm("host").args(stage::drive(&image));
    let host = Host::launch(builder, set.programs)?;
    let played = play(set, &host, &image, &mut facts);
    played.map_err(|error| error.context(host.story()))?;
    host.shutdown()?;
    Ok(facts)
}

fn play(set: &Set<'_>, host: &Host, image: &Path, facts: &mut PlugFacts) -> Result<()> {
    let lender = host.lend(&format!(
        "--name rack1 --vfio {DEVICE}={DRIVE} --dma-test {OTHER}"
    ))?;
    let guest = start(set, host)?;
    (set.tell)("attaching the disk");
    host.exec_ok(&format!("farside attach {VM} {DEVICE}"), BOOT)?;
    guest.exec_ok("modprobe nvme", LONG)?;
    guest.wait_path("/dev/nvme0n1", LONG)?;
    let sums = write_and_read(&guest)?;
    facts.data_ok = sums.written == sums.back && sha256_of(image, 0, IO)? == sums.written;
    (set.tell)("detaching the disk");
    host.exec_ok(&format!("farside detach {VM} {DEVICE}"), BOOT)?;
    guest.wait_no_path("/dev/nvme0n1", SHORT)?;
    let lent = host.lent(DEVICE)?;
    facts.is_returned = lent.borrowed_by.is_none() && lent.is_closed();
    // QEMU never frees a device of vfio-user that it had, and with it the function's descriptor.
    let again = host.exec(&format!("farside attach {VM} {DEVICE}"), BOOT)?;
    facts.is_refused_by_name =
        !again.success() && again.stderr.contains(&format!("VM {VM} had it last"));
    host.exec_ok(&format!("farside stop {VM}"), BOOT)?;
    drop(guest);
    let guest = start(set, host)?;
    host.exec_ok(&format!("farside attach {VM} {DEVICE}"), BOOT)?;
    guest.exec_ok("modprobe nvme", LONG)?;
    guest.wait_path("/dev/nvme0n1", LONG)?;
    let read = format!(
        "dd if=/dev/nvme0n1 bs=256k count={} iflag=direct 2>/dev/null | sha256sum",
        IO / (256 << 10)
    );
    facts.works_again = guest.exec_ok(&read, LONG)?.starts_with(&sums.written);
    host.exec_ok(&format!("farside stop {VM}"), BOOT)?;
    host.wait_returned(DEVICE)?;
    lender.stop()
}

fn start<'a>(set: &Set<'_>, host: &'a Host) -> Result<Nested<'a>> {
    (set.tell)("starting a guest");
    let expected = host.expect_guest(VM)?;
    describe(host, &expected, OTHER, "")?;
    host.exec_ok(&format!("farside start {VM}"), BOOT)?;
    let guest = expected.adopt(BOOT)?;
    guest.wait_agent(BOOT).context("the guest")?;
    Ok(guest)
}
