//! The guest with both disks.

use std::{ffi::OsString, path::Path};

use anyhow::{Context, Result, bail, ensure};
use farside_testbed::{Testbed, Vm};

use crate::scene::{BOOT, Guest, Model, SHORT, Scene, Size};

/// The guest's size.
const SIZE: Size = Size {
    memory_mib: 1024,
    cpus: 2,
};
/// Serial number of QEMU's own device, which identifies it in the guest.
const OWN_SERIAL: &str = "qemu-own";

/// A vIOMMU that supports borrowed devices.
const VIOMMU: &str = "intel-iommu,caching-mode=on";
/// Makes the guest's kernel use it for all DMA.
const TRANSLATE: &[&str] = &["intel_iommu=on", "iommu.passthrough=0"];

/// Block devices of the guest.
pub(super) struct Drives {
    pub(super) borrowed: String,
    pub(super) own: String,
}

/// Boots it, with additional arguments for QEMU.
pub(super) fn boot(
    scene: &Scene,
    testbed: &Testbed,
    model: Model,
    own_image: &Path,
    own_aio: &str,
    viommu: bool,
    more: &[OsString],
) -> Result<(Guest, Drives)> {
    let drive = format!(
        "if=none,id=own,file={},format=raw,cache=writeback,aio={own_aio}",
        // Commas in a value are doubled.
        own_image.display().to_string().replace(',', ",,"),
    );
    let driver = match model {
        Model::Nvme => "nvme",
        Model::VirtioBlk => "virtio-blk-pci",
        Model::VirtioNet => bail!("a network device has no disk"),
    };
    let device = format!("{driver},drive=own,serial={OWN_SERIAL}");
    // QEMU creates devices in this order, and a vIOMMU must precede the devices behind it.
    let (before, kernel): (&[&str], &[&str]) = match viommu {
        true => (&["-device", VIOMMU], TRANSLATE),
        false => (&[], &[]),
    };
    let mut arguments: Vec<OsString> = before.iter().map(Into::into).collect();
    arguments.extend(["-drive", &drive, "-device", &device].map(Into::into));
    arguments.extend_from_slice(more);
    let guest = scene.launch(testbed, &SIZE, kernel, &arguments)?;
    guest.vm.qmp().execute("cont", serde_json::json!({}))?;
    guest.vm.wait_agent(BOOT)?;
    let drives = match model {
        Model::Nvme => find_drives(&guest.vm)?,
        Model::VirtioBlk | Model::VirtioNet => find_virtio(&guest.vm)?,
    };
    Ok((guest, drives))
}

fn find_drives(vm: &Vm) -> Result<Drives> {
    for path in ["/dev/nvme0n1", "/dev/nvme1n1"] {
        vm.wait_path(path, SHORT)?;
    }
    let serials = vm.exec_ok("cat /sys/block/nvme[01]n1/device/serial", SHORT)?;
    let serials: Vec<&str> = serials.lines().map(str::trim).collect();
    let own = serials.iter().position(|serial| *serial == OWN_SERIAL);
    let own = own.with_context(|| format!("no disk {OWN_SERIAL} among {serials:?}"))?;
    ensure!(serials.len() == 2, "not two disks: {serials:?}");
    Ok(Drives {
        borrowed: format!("nvme{}n1", 1 - own),
        own: format!("nvme{own}n1"),
    })
}

fn find_virtio(vm: &Vm) -> Result<Drives> {
    vm.exec_ok("modprobe virtio_blk", SHORT)?;
    for path in ["/dev/vda", "/dev/vdb"] {
        vm.wait_path(path, SHORT)?;
    }
    // Without a line end.
    let serial = vm.exec_ok("cat /sys/block/vda/serial", SHORT)?;
    let own_is_first = serial.trim() == OWN_SERIAL;
    let (own, borrowed) = if own_is_first {
        ("vda", "vdb")
    } else {
        ("vdb", "vda")
    };
    let serial = vm.exec_ok(&format!("cat /sys/block/{own}/serial"), SHORT)?;
    ensure!(
        serial.trim() == OWN_SERIAL,
        "no disk {OWN_SERIAL}: the serial number of {own} is {serial:?}"
    );
    Ok(Drives {
        borrowed: borrowed.into(),
        own: own.into(),
    })
}
