//! Guests of VMs that play hosts, with fio.

use anyhow::{Context, Result};
use farside_testbed::{HostVm, Nested, NestedBuilder};

use crate::{BOOT, SHORT};

/// An archive of fio and its libraries, at the host.
const FIO: &str = "/tmp/fio.tar";

/// Boots a guest, and unpacks fio there, which it gets from its host as an archive on a disk.
///
/// # Errors
/// If the guest does not boot, or has no fio then.
pub fn start_with_fio<'a>(host: &HostVm, guest: NestedBuilder<'a>) -> Result<Nested<'a>> {
    let archive = format!(
        "libraries=$(/lib64/ld-linux-x86-64.so.2 --list /usr/bin/fio | grep -o '/[^ ]*')
        tar -c -h -f {FIO} /usr/bin/fio $libraries 2>/dev/null
        truncate -c -s $(( ($(stat -c %s {FIO}) + 511) / 512 * 512 )) {FIO}"
    );
    host.exec_ok(&archive, SHORT).context("an archive of fio")?;
    let disk = format!("driver=file,node-name=fio,filename={FIO},read-only=on");
    let device = "virtio-blk-pci,drive=fio,serial=fio";
    let guest = guest
        .args(["-blockdev", &disk, "-device", device])
        .launch()?;
    guest.wait_agent(BOOT)?;
    let unpack = format!(
        "set -e
        mkdir -p /usr/lib64 /usr/lib/x86_64-linux-gnu
        tar -x -C / -f /dev/{}
        fio --version",
        disk_of(&guest, "fio")?
    );
    guest.exec_ok(&unpack, BOOT).context("fio in the guest")?;
    Ok(guest)
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
