//! Two functions of one IOMMU group, as a GPU and its audio function are, lent to one VM at a time.

use anyhow::{Context, Result, ensure};
use farside_testbed::{Nested, kernel_view::LiveMappings};
use serde_json::json;

use super::{
    Set,
    facts::GroupFacts,
    host::{Host, socket},
    play::{GUEST_RAM, LONG, VM},
    scripted::Scripted,
    sharing::{read, unbind, write_and_read, written},
    stage,
};
use crate::{BOOT, SHORT, shared_ram};

/// Each device: id, address in the host. Without ACS, functions of one device are in one group.
const DEVICES: [(&str, &str); 2] = [("first", "0000:00:05.0"), ("second", "0000:00:05.1")];
/// The VM that has to wait.
const OTHER: &str = "other";

pub(super) fn grouped(set: &Set<'_>) -> Result<GroupFacts> {
    let images = [
        stage::image(set, "first.img")?,
        stage::image(set, "second.img")?,
    ];
    let mut args = Vec::new();
    for (image, (name, at)) in images.iter().zip(DEVICES) {
        let function = at.rsplit('.').next().unwrap_or_default();
        args.extend([
            "-drive".to_owned(),
            format!("if=none,id={name},format=raw,file={}", image.display()),
            "-device".to_owned(),
            format!("nvme,drive={name},serial={name},addr=5.{function},multifunction=on"),
        ]);
    }
    let mut facts = GroupFacts::default();
    (set.tell)("booting the host");
    let host = Host::launch(set.testbed.host_vm("host").args(args), set.programs)?;
    let played = play(set, &host, &mut facts);
    played.map_err(|error| error.context(host.story()))?;
    host.shutdown()?;
    for image in &images {
        facts.on_images.insert(written(image)?);
    }
    Ok(facts)
}

fn play(set: &Set<'_>, host: &Host, facts: &mut GroupFacts) -> Result<()> {
    let [(first, at), (second, at_second)] = DEVICES;
    let group = |at: &str| {
        let group = format!("readlink /sys/bus/pci/devices/{at}/iommu_group");
        host.exec_ok(&group, SHORT)
    };
    ensure!(group(at)? == group(at_second)?, "two IOMMU groups");
    let lender = host.lend(&format!(
        "--name rack1 --vfio {first}={at} --vfio {second}={at_second}"
    ))?;
    let both = format!("--device {second}");
    let backend = host.serve(VM, first, &both)?;
    let other = host.serve(OTHER, second, "")?;
    let launch_other = || {
        let guest = host.guest(OTHER).memory(GUEST_RAM);
        guest.vfio_user(&socket(OTHER, second)).launch()
    };
    host.trace_iommu()?;
    let mapped = || Ok::<_, anyhow::Error>(LiveMappings::after(&host.iommu_trace()?).bytes());
    let guest = start(set, host)?;
    let slots = "for drive in nvme0 nvme1; do
        device=$(readlink -f /sys/class/nvme/$drive/device); device=${device##*/}; echo ${device%.*}
    done | uniq | wc -l";
    facts.is_one_device = guest.exec_ok(slots, SHORT)?.trim() == "1";
    (set.tell)("the guest writes to both and reads from both");
    for drive in ["nvme0", "nvme1"] {
        facts.read_back.insert(write_and_read(&guest, drive)?);
    }
    let ram = shared_ram(guest.qmp())?;
    facts.guest_ram_bytes = ram.iter().map(|(_, len)| len).sum();
    facts.bytes_of_both = mapped()?;
    unbind(&guest, "nvme0")?;
    facts.bytes_of_one = mapped()?;
    facts.read_after = read(&guest, "nvme1")?;
    unbind(&guest, "nvme1")?;
    facts.bytes_of_none = mapped()?;
    let ended = guest.shutdown(SHORT)?;
    ensure!(ended.success(), "QEMU in the host: {ended}");
    for (device, _) in DEVICES {
        host.wait_returned(device)?;
    }
    (set.tell)("a VM has one of them, and another VM asks for the other one");
    let mut vmm = Scripted::start(host, &socket(VM, first), "--ram 64M --low 32M")?;
    vmm.step("place")?;
    vmm.step("bme")?;
    let refused = launch_other();
    ensure!(refused.is_err(), "{OTHER} has started");
    let borrow = host.borrow(OTHER, second)?;
    facts.refusal = borrow.last_error.clone().unwrap_or_default();
    vmm.quit()?;
    host.wait_returned(first)?;
    (set.tell)("the other VM has it");
    let next = launch_other()?;
    next.wait_agent(BOOT)?;
    next.exec_ok("modprobe nvme", LONG)?;
    next.wait_path("/dev/nvme0n1", LONG)?;
    facts.read_by_next = read(&next, "nvme0")?;
    let ended = next.shutdown(SHORT)?;
    ensure!(ended.success(), "QEMU of {OTHER}: {ended}");
    host.wait_returned(second)?;
    other.stop()?;
    backend.stop()?;
    lender.stop()
}

/// A guest that has both as functions of one device.
fn start<'a>(set: &Set<'_>, host: &'a Host) -> Result<Nested<'a>> {
    (set.tell)("starting a guest with both devices");
    let port = "pcie-root-port,id=port0,chassis=1,slot=1";
    let mut guest = host
        .guest(VM)
        .memory(GUEST_RAM)
        .args(["-device".to_owned(), port.to_owned()]);
    for (function, (device, _)) in DEVICES.iter().enumerate() {
        let device = json!({
            "driver": "vfio-user-pci",
            "bus": "port0",
            "addr": format!("0.{function}"),
            "multifunction": true,
            "socket": {"type": "unix", "path": socket(VM, device)},
            "x-msg-timeout": 120_000,
        });
        guest = guest.args(["-device".to_owned(), device.to_string()]);
    }
    let guest = guest.launch()?;
    guest.wait_agent(BOOT)?;
    guest.exec_ok("modprobe nvme", LONG)?;
    for drive in ["nvme0", "nvme1"] {
        guest
            .wait_path(&format!("/dev/{drive}n1"), LONG)
            .context("the guest's drives")?;
    }
    Ok(guest)
}
