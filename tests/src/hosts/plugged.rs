//! A physical drive that is attached to a running VM, of its host or of another one through an NTB, and detached.

use std::path::Path;

use anyhow::{Context, Result};
use farside_testbed::Nested;

use super::{
    Set,
    facts::{NtbPlugFacts, PlugFacts},
    host::Host,
    moves::describe,
    network::VM,
    play::{DEVICE, DRIVE, IO, LONG, NTB, write_and_read},
    sharing, stage,
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

/// The VM's first device through an NTB, which stays.
const FIRST: (&str, &str) = ("first", "0000:00:05.0");

/// The same through an NTB, where QEMU maps the device's BAR in its own host's window, and has no descriptor of the function.
pub(super) fn plugged_through_ntb(set: &Set<'_>) -> Result<NtbPlugFacts> {
    let mut facts = NtbPlugFacts::default();
    let image = stage::image(set, "plugged.img")?;
    let (first, at) = FIRST;
    let mut drives = stage::drive(&image).to_vec();
    let own = stage::image(set, "first.img")?;
    drives.extend([
        "-drive".to_owned(),
        format!("if=none,id={first},format=raw,file={}", own.display()),
        "-device".to_owned(),
        format!("nvme,drive={first},serial={first},addr=5"),
    ]);
    stage::across_ntb(set, &drives, |a, b| {
        let lender = b.lend(&format!(
            "--name b --listen tls:10.0.0.2:4000 --borrower host=a --ntb {NTB} \
             --vfio {DEVICE}={DRIVE} --vfio {first}={at}"
        ))?;
        let text = format!("lenders = [\"tls:10.0.0.2:4000\"]\nntb = \"{NTB}\"");
        let write = format!("cat >/etc/farside/host.toml <<'END'\n{text}\nEND");
        a.exec_ok(&write, SHORT)?;
        let guest = start_with(set, a, first, "ntb = true\nopen-timeout = 100\n")?;
        guest.exec_ok("modprobe nvme", LONG)?;
        guest.wait_path("/dev/nvme0n1", LONG)?;
        facts.entries_before = sharing::lut_entries(b)?;
        for _ in 0..2 {
            (set.tell)("attaching the disk");
            a.exec_ok(&format!("farside attach {VM} {DEVICE}"), BOOT)?;
            guest.wait_path("/dev/nvme1n1", LONG)?;
            facts
                .entries_of_disk
                .push(b.lent(DEVICE)?.lut_entries.into());
            let written = sharing::write_and_read(&guest, "nvme1")?;
            facts.data_ok.push(sharing::written(&image)? == written);
            (set.tell)("detaching the disk");
            a.exec_ok(&format!("farside detach {VM} {DEVICE}"), BOOT)?;
            guest.wait_no_path("/dev/nvme1n1", SHORT)?;
            b.wait_returned(DEVICE)?;
        }
        let written = sharing::write_and_read(&guest, "nvme0")?;
        facts.other_goes_on = sharing::written(&own)? == written;
        facts.entries_after = sharing::lut_entries(b)?;
        a.exec_ok(&format!("farside stop {VM}"), BOOT)?;
        drop(guest);
        b.wait_returned(first)?;
        lender.stop()
    })?;
    Ok(facts)
}

fn start<'a>(set: &Set<'_>, host: &'a Host) -> Result<Nested<'a>> {
    start_with(set, host, OTHER, "")
}

/// Starts the VM with `device` and these lines of its configuration.
fn start_with<'a>(set: &Set<'_>, host: &'a Host, device: &str, lines: &str) -> Result<Nested<'a>> {
    (set.tell)("starting a guest");
    let expected = host.expect_guest(VM)?;
    describe(host, &expected, device, lines)?;
    host.exec_ok(&format!("farside start {VM}"), BOOT)?;
    let guest = expected.adopt(BOOT)?;
    guest.wait_agent(BOOT).context("the guest")?;
    Ok(guest)
}
