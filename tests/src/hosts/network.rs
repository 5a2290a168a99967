//! An image of one host, lent to a guest of another over the network: nothing else joins the two.
//! The commands are those of the README, as printed there. Then a VM with it moves to a third host
//! and back, and through all three.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use farside_lender_protocol::DeviceStatus;
use farside_testbed::{Width, acquaint};
use serde_json::json;

use super::{
    Set,
    facts::{NetworkFacts, seconds},
    host::{Host, socket},
    moves::{self, Rack},
    play::{BME, IO, LONG, find_drive, write_and_read},
    scripted::Scripted,
    stage::{hub, reaches, set_up_network, spoke},
};
use crate::{BOOT, MIB, SHORT, shared_ram};

pub(super) const README: &str = include_str!("../../../README.md");

/// Names in the README's commands.
pub(super) const VM: &str = "web1";
pub(super) const DEVICE: &str = "disk0";
pub(super) const IMAGE: &str = "/tmp/disk0.img";

/// The guest's disk in the README. The guest here boots from a kernel and an initramfs instead.
const GUESTS_DISK: &str = " -drive file=root.qcow2,if=virtio";

/// RAM of the borrower, bytes: more than that of the README's guest.
const BORROWERS_RAM: u64 = 2560 * MIB;

/// QEMU's option to allocate guest RAM before it starts: an emulated host under load does that too
/// slowly for the time limit of bus-master enable.
pub(super) const PREALLOCATED: &str = "-mem-prealloc";

/// The README's commands for two machines.
struct Commands {
    /// At the lender, before `farside lend`.
    prepare: String,
    lend: &'static str,
    /// At the borrower, before `farside serve`.
    fetch: String,
    serve: &'static str,
    qemu: &'static str,
}

impl Commands {
    fn of_readme() -> Result<Self> {
        let (_, section) = README
            .split_once("\n### A device of another host\n")
            .context("the README has no such section")?;
        let section = section.split("\n### ").next().unwrap_or_default();
        let blocks: Vec<Vec<&str>> = section
            .split("```sh\n")
            .skip(1)
            .filter_map(|block| Some(block.split_once("```")?.0.lines().collect()))
            .collect();
        let [lender, borrower] = &blocks[..] else {
            bail!("one block of commands for each host, not {blocks:?}");
        };
        let count = lender.len() + borrower.len();
        ensure!(count < 10, "{count} commands: {blocks:?}");
        let ([prepare @ .., lend], [fetch @ .., serve, qemu]) = (&lender[..], &borrower[..]) else {
            bail!("too few commands: {blocks:?}");
        };
        let farside = |line: &'static str| {
            let args = line.strip_prefix("farside ");
            args.with_context(|| format!("not a command of farside: {line}"))
        };
        Ok(Self {
            prepare: prepare.join("\n"),
            lend: farside(lend)?,
            fetch: fetch.join("\n"),
            serve: farside(serve)?,
            qemu: qemu
                .strip_suffix(GUESTS_DISK)
                .with_context(|| format!("another disk of the guest: {qemu}"))?,
        })
    }
}

pub(super) fn network(set: &Set<'_>) -> Result<NetworkFacts> {
    let started = Instant::now();
    let mut facts = NetworkFacts::default();
    (set.tell)("booting the hosts");
    let rack = boot(set)?;
    facts.hosts_boot_s = seconds(started.elapsed());
    let played = play(set, &rack, &mut facts);
    played.map_err(|error: anyhow::Error| {
        let stories: String = rack.all().iter().map(|host| host.story()).collect();
        error.context(stories)
    })?;
    for host in [rack.a, rack.c, rack.b] {
        host.shutdown()?;
    }
    facts.wall_s = seconds(started.elapsed());
    Ok(facts)
}

/// The lender b, which the wires lead to, and the borrowers.
pub(super) fn boot(set: &Set<'_>) -> Result<Rack> {
    let host = |name: &str, network: Vec<String>| set.testbed.host_vm(name).args(network);
    let b = host("b", hub(set, 2, &["wire-a", "wire-c"]));
    let b = Host::launch(b, set.programs)?;
    let a = host("a", spoke(set, 1, "wire-a")).memory(BORROWERS_RAM);
    let c = host("c", spoke(set, 3, "wire-c"));
    let (a, c) = std::thread::scope(|scope| {
        let c = scope.spawn(|| Host::launch(c, set.programs));
        let a = Host::launch(a, set.programs);
        let c = c.join().map_err(|_| anyhow::anyhow!("booting c panicked"));
        Ok::<_, anyhow::Error>((a?, c??))
    })?;
    let rack = Rack { a, b, c };
    for (host, _, address) in rack.names() {
        set_up_network(host, address)?;
    }
    reaches(&rack.a, "10.0.0.2")?;
    reaches(&rack.c, "10.0.0.2")?;
    acquaint(
        &rack
            .names()
            .map(|(host, name, address)| (&**host, name, address)),
    )?;
    Ok(rack)
}

fn play(set: &Set<'_>, rack: &Rack, facts: &mut NetworkFacts) -> Result<()> {
    let Rack { a, b, .. } = rack;
    let commands = Commands::of_readme()?;
    let type_in =
        |host: &Host, lines: &str| host.exec_ok(&format!("set -e; cd /tmp\n{lines}"), SHORT);
    type_in(b, &commands.prepare)?;
    let lender = b.start_lender(commands.lend)?;
    type_in(a, &commands.fetch)?;
    let backend = a.start_backend(VM, DEVICE, commands.serve)?;
    guest_uses_drive(set, a, b, commands.qemu, facts)?;
    rogue(set, a, facts)?;
    backend.stop()?;
    lender.stop()?;
    moves::moves(set, rack, commands.lend, facts)
}

fn pinned(a: &Host) -> Result<u64> {
    Ok(a.borrow(VM, DEVICE)?.bytes_pinned)
}

fn guest_uses_drive(
    set: &Set<'_>,
    a: &Host,
    b: &Host,
    launcher: &str,
    facts: &mut NetworkFacts,
) -> Result<()> {
    (set.tell)("starting a guest in the borrower");
    let started = Instant::now();
    let guest = a
        .guest(VM)
        .launcher(launcher)
        .args(["-S", PREALLOCATED])
        .launch();
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
    let near = controller(a, VM, DEVICE)?;
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
    facts.rogue_dma_refused = controller(a, VM, DEVICE)?.faults.total;
    vmm.step("unbind")?;
    let report = vmm.quit()?;
    facts.rogue_bytes_written = report["rogue_bytes_written"]
        .as_u64()
        .with_context(|| format!("no rogue_bytes_written in {report}"))?;
    Ok(())
}

/// The status of a controller, at the borrower.
pub(super) fn controller(a: &Host, vm: &str, device: &str) -> Result<DeviceStatus> {
    let status = a.status()?.0;
    let device = status.backend(vm).and_then(|it| it.device(device));
    let controller = device.and_then(|device| device.controller.clone());
    controller.context("no controller in the backend's status")
}

fn count(status: &DeviceStatus, name: &str) -> Result<f64> {
    let mut counters = status.counters.iter();
    let counter = counters.find(|counter| counter.name == name);
    Ok(counter.with_context(|| format!("no counter {name}"))?.value as f64)
}
