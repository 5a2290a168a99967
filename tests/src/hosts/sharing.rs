//! Two NVMe devices of a VM, lent across an NTB, share the windows onto its RAM.

use std::{fs::File, io::Read, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use farside_lender_protocol::Resource;
use farside_testbed::Nested;

use super::{
    Set,
    facts::SharingFacts,
    host::{Host, socket},
    play::{DRIVE, GUEST_RAM, NTB, VM},
    stage,
};
use crate::{BOOT, MIB, SHORT, sha256};

/// Each device: id, address in the lending host.
const DEVICES: [(&str, &str); 2] = [("disk0", DRIVE), ("disk1", "0000:00:05.0")];
/// Bytes that the guest writes to each.
const IO: u64 = 2 * MIB;
/// Timeout of transfers of megabytes in an emulated nested guest.
const LONG: Duration = Duration::from_secs(600);

pub(super) fn sharing(set: &Set<'_>) -> Result<SharingFacts> {
    let images = [
        stage::image(set, "first.img")?,
        stage::image(set, "second.img")?,
    ];
    let mut args = stage::drive(&images[0]).to_vec();
    args.extend([
        "-drive".to_owned(),
        format!("if=none,id=disk1,format=raw,file={}", images[1].display()),
        "-device".to_owned(),
        "nvme,drive=disk1,serial=farside1,addr=5".to_owned(),
    ]);
    let mut facts = SharingFacts::default();
    stage::across_ntb(set, &args, |a, b| play(set, a, b, &mut facts))?;
    for image in &images {
        facts.on_images.insert(written(image)?);
    }
    Ok(facts)
}

fn play(set: &Set<'_>, a: &Host, b: &Host, facts: &mut SharingFacts) -> Result<()> {
    let [(first, at), (second, at_second)] = DEVICES;
    let lender = b.lend(&format!(
        "--name b --listen tls:10.0.0.2:4000 --borrower host=a --ntb {NTB} \
         --vfio {first}={at} --vfio {second}={at_second}"
    ))?;
    let args = format!("--device {second} --lender tls:10.0.0.2:4000 --ntb {NTB}");
    let backend = a.serve(VM, first, &args)?;
    (set.tell)("starting a guest with both devices in the borrower");
    let guest = a.guest(VM).memory(GUEST_RAM);
    let guest = DEVICES.iter().fold(guest, |guest, (device, _)| {
        guest.vfio_user(&socket(VM, device))
    });
    let guest = guest.launch()?;
    guest.wait_agent(BOOT)?;
    guest.exec_ok("modprobe nvme", LONG)?;
    let bound =
        || ["nvme0", "nvme1"].map(|drive| guest.wait_path(&format!("/dev/{drive}n1"), LONG));
    bound().into_iter().collect::<Result<()>>()?;
    // The firmware has enabled bus mastering, and has remapped RAM below 1 MiB since. Memory that is
    // mapped anew meanwhile gets windows of each device's own.
    let rebind = "cd /sys/bus/pci/drivers/nvme
        for device in 0000:*; do echo $device >unbind; echo $device >>/tmp/devices; done
        while read device; do echo $device >bind; done </tmp/devices";
    guest.exec_ok(rebind, LONG)?;
    bound().into_iter().collect::<Result<()>>()?;
    for (device, _) in DEVICES {
        facts.of_devices.push(b.lent(device)?.lut_entries.into());
    }
    facts.of_both = lut_entries(b)?;
    (set.tell)("the guest writes to both and reads from both");
    for drive in ["nvme0", "nvme1"] {
        facts.read_back.insert(write_and_read(&guest, drive)?);
    }
    unbind(&guest, "nvme0")?;
    facts.of_one = lut_entries(b)?;
    // The windows of the other device are open still.
    facts.read_after = read(&guest, "nvme1")?;
    unbind(&guest, "nvme1")?;
    facts.of_none = lut_entries(b)?;
    let ended = guest.shutdown(SHORT)?;
    ensure!(ended.success(), "QEMU in the borrower: {ended}");
    for (device, _) in DEVICES {
        b.wait_returned(device)?;
    }
    backend.stop()?;
    lender.stop()
}

/// LUT entries in use of the lender's endpoint.
pub(super) fn lut_entries(lender: &Host) -> Result<u64> {
    let status = lender.status()?.0;
    let mut limits = status.lenders.iter().flat_map(|lender| &lender.limits);
    let found = limits.find(|limit| limit.resource == Resource::NtbLutEntries);
    let found = found.with_context(|| format!("no LUT entries in {:?}", status.lenders))?;
    Ok(found.used)
}

/// Writes noise to a device; the checksum of what is read back.
pub(super) fn write_and_read(guest: &Nested<'_>, drive: &str) -> Result<String> {
    let count = IO / MIB;
    let write = format!(
        "dd if=/dev/urandom of=/tmp/noise bs=1M count={count} 2>/dev/null &&
        dd if=/tmp/noise of=/dev/{drive}n1 bs=256k oflag=direct 2>/dev/null && sync"
    );
    guest.exec_ok(&write, LONG)?;
    let noise = guest.exec_ok("sha256sum </tmp/noise", LONG)?;
    let back = read(guest, drive)?;
    ensure!(noise.starts_with(&back), "{drive}: {noise} was written");
    Ok(back)
}

/// The checksum of what a device has.
pub(super) fn read(guest: &Nested<'_>, drive: &str) -> Result<String> {
    let blocks = IO / (256 << 10);
    let read =
        format!("dd if=/dev/{drive}n1 bs=256k count={blocks} iflag=direct 2>/dev/null | sha256sum");
    let sum = guest.exec_ok(&read, LONG)?;
    Ok(sum.trim_end_matches(['-', ' ', '\n']).to_owned())
}

pub(super) fn unbind(guest: &Nested<'_>, drive: &str) -> Result<()> {
    let unbind = format!(
        "device=$(readlink -f /sys/class/nvme/{drive}/device)
        echo ${{device##*/}} >$device/driver/unbind"
    );
    guest.exec_ok(&unbind, LONG).map(drop)
}

/// The checksum of what was written to an image.
pub(super) fn written(image: &Path) -> Result<String> {
    let mut bytes = vec![0; IO as usize];
    File::open(image)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .with_context(|| format!("reading {}", image.display()))?;
    Ok(sha256(&bytes))
}
