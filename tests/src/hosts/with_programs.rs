//! Guests of VMs that play hosts, with programs that those have.

use anyhow::{Context, Result};
use farside_testbed::{HostVm, Nested, NestedBuilder};

use crate::{BOOT, SHORT};

/// An archive of programs and their libraries, at the host.
const ARCHIVE: &str = "/tmp/programs.tar";

/// Boots a guest with fio: see [`start_with`].
///
/// # Errors
/// As there.
pub fn start_with_fio<'a>(host: &HostVm, guest: NestedBuilder<'a>) -> Result<Nested<'a>> {
    start_with(host, guest, &["/usr/bin/fio"])
}

/// Boots a guest, and unpacks programs there, which it gets from its host as an archive on a disk.
///
/// # Errors
/// If the guest does not boot, or has no such programs then.
pub fn start_with<'a>(
    host: &HostVm,
    guest: NestedBuilder<'a>,
    programs: &[&str],
) -> Result<Nested<'a>> {
    let all = programs.join(" ");
    let archive = format!(
        "libraries=$(for program in {all}; do
            /lib64/ld-linux-x86-64.so.2 --list $program | grep -o '/[^ ]*'
        done | sort -u)
        tar -c -h -f {ARCHIVE} {all} $libraries 2>/dev/null
        truncate -c -s $(( ($(stat -c %s {ARCHIVE}) + 511) / 512 * 512 )) {ARCHIVE}"
    );
    host.exec_ok(&archive, SHORT)
        .context("an archive of programs")?;
    let disk = format!("driver=file,node-name=programs,filename={ARCHIVE},read-only=on");
    let device = "virtio-blk-pci,drive=programs,serial=programs";
    let guest = guest
        .args(["-blockdev", &disk, "-device", device])
        .launch()?;
    guest.wait_agent(BOOT)?;
    unpack(&guest, programs)?;
    Ok(guest)
}

/// Unpacks programs in a guest of [`start_with`], as after each boot.
///
/// # Errors
/// If the guest does not have them then.
pub(super) fn unpack(guest: &Nested<'_>, programs: &[&str]) -> Result<()> {
    let unpack = format!(
        "set -e
        mkdir -p /usr/lib64 /usr/lib/x86_64-linux-gnu
        tar -x -C / -f /dev/{}
        for program in {}; do $program --version; done",
        disk_of(guest, "programs")?,
        programs.join(" ")
    );
    guest
        .exec_ok(&unpack, BOOT)
        .context("programs in the guest")
        .map(drop)
}

/// The name of the virtio-blk disk with a serial number.
///
/// # Errors
/// If the guest does not answer.
pub fn disk_of(guest: &Nested<'_>, serial: &str) -> Result<String> {
    let find = format!(
        "modprobe virtio_blk; cd /sys/block
        for disk in vd*; do [ \"$(cat $disk/serial)\" != {serial} ] || echo $disk; done"
    );
    Ok(guest.exec_ok(&find, BOOT)?.trim().to_owned())
}
