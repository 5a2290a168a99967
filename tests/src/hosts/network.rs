//! An image of one host, lent to a guest of another over the network: nothing else joins the two.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use farside_lender_protocol::DeviceStatus;
use farside_testbed::Width;
use serde_json::json;

use super::{
    Set,
    facts::{NetworkFacts, seconds},
    host::{Host, socket},
    play::{BME, DEVICE, GUEST_RAM, IO, LONG, VM, find_drive, write_and_read},
    scripted::Scripted,
    stage::{certify, join, network_card},
};
use crate::{BOOT, MIB, SHORT, shared_ram};

/// The image, in the lending host's memory.
const IMAGE: &str = "/tmp/disk0.img";

const ADDRESS: &str = "tls:10.0.0.2:7410";

pub(super) fn network(set: &Set<'_>) -> Result<NetworkFacts> {
    let started = Instant::now();
    let mut facts = NetworkFacts::default();
    (set.tell)("booting both hosts");
    let host = |name: &str, server, mac| {
        let builder = set
            .testbed
            .host_vm(name)
            .args(network_card(set, server, mac));
        Host::launch(builder, set.programs)
    };
    let b = host("b", "on", 2)?;
    let a = host("a", "off", 1)?;
    join(&a, &b)?;
    certify(&a, &b)?;
    let played = play(set, &a, &b, &mut facts);
    played.map_err(|error: anyhow::Error| error.context(format!("{}{}", a.story(), b.story())))?;
    a.shutdown()?;
    b.shutdown()?;
    facts.wall_s = seconds(started.elapsed());
    Ok(facts)
}

fn play(set: &Set<'_>, a: &Host, b: &Host, facts: &mut NetworkFacts) -> Result<()> {
    b.exec_ok(&format!("truncate -s 64M {IMAGE}"), SHORT)?;
    let lender = b.lend(&format!(
        "--name b --nvme {DEVICE}={IMAGE} --listen {ADDRESS} --borrower host=a"
    ))?;
    let backend = a.serve(VM, DEVICE, &format!("--lender {ADDRESS}"))?;
    guest_uses_drive(set, a, b, facts)?;
    rogue(set, a, facts)?;
    backend.stop()?;
    lender.stop()
}

fn pinned(a: &Host) -> Result<u64> {
    Ok(a.borrow(VM, DEVICE)?.bytes_pinned)
}

fn guest_uses_drive(set: &Set<'_>, a: &Host, b: &Host, facts: &mut NetworkFacts) -> Result<()> {
    (set.tell)("starting a guest in the borrower");
    let started = Instant::now();
    let guest = a.guest(VM).memory(GUEST_RAM).vfio_user(&socket(VM, DEVICE));
    let guest = guest.args(["-S"]).launch();
    let guest = guest.map_err(|error| anyhow::anyhow!("{error:#}{}", a.story()))?;
    facts.bytes_pinned_before_bme = pinned(a)?;
    guest.qmp().execute("cont", json!({}))?;
    guest.wait_agent(BOOT)?;
    facts.nested_boot_s = seconds(started.elapsed());
    let drive = find_drive(&guest)?;
    if guest.config_read(&drive, 4, Width::U16)? & BME == 0 {
        facts.bytes_pinned_before_bme += pinned(a)?;
    }
    (set.tell)("loading the guest's NVMe driver");
    guest.exec_ok("modprobe nvme", LONG)?;
    guest.wait_path("/dev/nvme0n1", LONG)?;
    let ram = shared_ram(guest.qmp())?;
    facts.guest_ram_bytes = ram.iter().map(|(_, len)| len).sum();
    facts.bytes_pinned_after_bme = pinned(a)?;

    (set.tell)("the guest writes and reads 2 MiB");
    let started = Instant::now();
    let sums = write_and_read(&guest)?;
    facts.nested_io_s = seconds(started.elapsed());
    let near = controller(a)?;
    let far = b.status()?.0;
    let far = far
        .lent(DEVICE)
        .context("the lender lends no such device")?;
    let ratio = |name: &str| Ok::<_, anyhow::Error>(count(far, name)? / count(&near, name)?);
    facts.round_trips_per_read = ratio("reads")?;
    facts.round_trips_per_write = ratio("writes")?;
    let ended = guest.shutdown(SHORT)?;
    ensure!(ended.success(), "QEMU in the borrower: {ended}");
    b.wait_returned(DEVICE)?;
    let count = IO / MIB;
    let medium = b.exec_ok(
        &format!("dd if={IMAGE} bs=1M count={count} 2>/dev/null | sha256sum"),
        SHORT,
    )?;
    let medium = medium.trim_end().trim_end_matches(['-', ' ']);
    facts.checksum_ok = sums.written == sums.back && sums.written == medium;
    Ok(())
}

/// A guest that makes the device access addresses outside its RAM.
fn rogue(set: &Set<'_>, a: &Host, facts: &mut NetworkFacts) -> Result<()> {
    (set.tell)("a scripted guest points the device outside of its RAM");
    let mut vmm = Scripted::start(a, &socket(VM, DEVICE), "--ram 64M --low 32M")?;
    vmm.step("place")?;
    vmm.step("before-bme")?;
    facts.bytes_pinned_before_bme += pinned(a)?;
    vmm.step("bme")?;
    vmm.step("io 1M")?;
    vmm.step("rogue hole")?;
    vmm.step("rogue 0x30000000")?;
    // High RAM that was just unmapped.
    vmm.step("unmap high")?;
    vmm.step("rogue 0x100000000")?;
    facts.rogue_dma_refused = controller(a)?.faults.total;
    vmm.step("unbind")?;
    let report = vmm.quit()?;
    facts.rogue_bytes_written = report["rogue_bytes_written"]
        .as_u64()
        .with_context(|| format!("no rogue_bytes_written in {report}"))?;
    Ok(())
}

/// The controller's status, at the borrower.
fn controller(a: &Host) -> Result<DeviceStatus> {
    let status = a.status()?.0;
    let device = status.backend(VM).and_then(|it| it.device(DEVICE));
    let controller = device.and_then(|device| device.controller.clone());
    controller.context("no controller in the backend's status")
}

fn count(status: &DeviceStatus, name: &str) -> Result<f64> {
    let mut counters = status.counters.iter();
    let counter = counters.find(|counter| counter.name == name);
    Ok(counter.with_context(|| format!("no counter {name}"))?.value as f64)
}
