//! `farside attach` and `farside detach` on running VMs.

use std::time::Instant;

use anyhow::{Context, ensure};
use farside_qemu_configs::qemu_id;
use farside_testbed::Machine;
use farside_tests::{Cluster, Guest, MIB, NVME, SHORT};
use libtest_mimic::Completion;
use serde_json::json;

use crate::{check, passed};

const DISK: &str = "/dev/nvme0n1";

/// Rounds of a drive's coming and going.
const ROUNDS: u64 = 10;

/// As Linux has it: hot plug by ACPI (the default, on a q35 too) or by the PCIe
/// port itself.
const NO_ACPI_HOT_PLUG: [&str; 2] = [
    "-global",
    "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
];

pub fn a_drive_comes_and_goes_ten_times_on_a_q35(cluster: &Cluster) -> anyhow::Result<Completion> {
    comes_and_goes(cluster, Machine::Q35, &[], ROUNDS)
}

pub fn a_drive_comes_and_goes_ten_times_on_an_i440fx(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    comes_and_goes(cluster, Machine::I440fx, &[], ROUNDS)
}

pub fn native_pcie_hot_plug_works_without_acpi(cluster: &Cluster) -> anyhow::Result<Completion> {
    comes_and_goes(cluster, Machine::Q35, &NO_ACPI_HOT_PLUG, 2)
}

fn comes_and_goes(
    cluster: &Cluster,
    machine: Machine,
    args: &[&str],
    rounds: u64,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("a", &["dma0"]).start()?;
    let guest = cluster.guest("a").machine(machine).args(args).boot()?;
    let mut place = None;
    let (mut attach_ms, mut detach_ms) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        attach_ms.push(timed(|| attach(cluster, "a", "disk0"))?.1);
        guest.wait_disk()?;
        check::open(cluster, &guest, "disk0", 1)?;
        check::io(&guest, DISK, 100 + round)?;
        // To the guest it is the same drive at the same place each time.
        let here = guest.find(NVME)?;
        ensure!(*place.get_or_insert(here.clone()) == here, "now at {here}");

        let (said, ms) = timed(|| detach(cluster, "a", "disk0"))?;
        detach_ms.push(ms);
        ensure!(said.contains("disk0 is returned; the guest"), "{said}");
        // Nothing is waited for: what the command says is so.
        let status = cluster.status()?;
        let lent = status.lent("disk0")?;
        ensure!(lent.borrowed_by.is_none() && lent.is_closed(), "{lent:?}");
        ensure!(status.borrow("a", "disk0").is_err(), "it is still served");
        guest.wait_no_path(DISK, SHORT)?;
        ensure!(guest.sh(&format!("lspci -d {NVME}"))?.is_empty());
    }
    println!("attach: {attach_ms:?} ms; detach: {detach_ms:?} ms ({machine:?} {args:?})");
    check::no_faults(cluster, &["disk0"])?;
    ensure!(guest.power_off()?.success());
    passed()
}

pub fn what_a_killed_command_left_is_gone_on_from(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("a", &["dma0"]).start()?;
    let guest = cluster.guest("a").boot()?;

    // Killed as soon as the backend serves the device: before, in or after
    // QEMU's part.
    for round in 0..3 {
        let mut command = cluster.start("farside attach", &["attach", "a", "disk0"])?;
        cluster.wait_status("disk0 served", SHORT, |status| {
            Ok(status.borrow("a", "disk0").ok())
        })?;
        let _ = command.kill();
        attach(cluster, "a", "disk0")?;
        guest.wait_disk()?;
        check::io(&guest, DISK, 200 + round)?;
        detach(cluster, "a", "disk0")?;
        guest.wait_no_path(DISK, SHORT)?;
    }

    // Only the backend has it: what detach undoes.
    let mut command = cluster.start("farside attach", &["attach", "a", "disk0"])?;
    cluster.wait_status("disk0 served", SHORT, |status| {
        Ok(status.borrow("a", "disk0").ok())
    })?;
    let _ = command.kill();
    detach(cluster, "a", "disk0")?;
    ensure!(cluster.status()?.borrow("a", "disk0").is_err());
    guest.wait_no_path(DISK, SHORT)?;

    // Twice is once.
    attach(cluster, "a", "disk0")?;
    let again = attach(cluster, "a", "disk0")?;
    ensure!(again.contains("was plugged into VM a before"), "{again}");
    guest.wait_disk()?;

    // A detach that was cut off after QEMU's part.
    let id = qemu_id("disk0");
    guest.qmp().execute("device_del", json!({ "id": id }))?;
    guest.wait_no_path(DISK, SHORT)?;
    detach(cluster, "a", "disk0")?;
    ensure!(cluster.status()?.lent("disk0")?.borrowed_by.is_none());
    let ended = cluster.run(&["detach", "a", "disk0"])?;
    ensure!(
        !ended.status.success() && ended.stderr.contains("disk0 is not plugged into VM a"),
        "{ended:?}"
    );
    ensure!(ended.stderr.contains("it has dma0"), "{ended:?}");
    guest.power_off()?;
    passed()
}

/// `farside attach`, which has to succeed. Returns what it prints.
pub fn attach(cluster: &Cluster, vm: &str, device: &str) -> anyhow::Result<String> {
    done(cluster, &["attach", vm, device])
}

/// `farside detach`, which has to succeed; with patience for an emulated guest on
/// a busy machine.
pub fn detach(cluster: &Cluster, vm: &str, device: &str) -> anyhow::Result<String> {
    done(cluster, &["detach", vm, device, "--limit", "120"])
}

/// Runs `farside`, which has to succeed. Returns what it prints.
pub fn done(cluster: &Cluster, args: &[&str]) -> anyhow::Result<String> {
    let ended = cluster.run(args)?;
    ensure!(ended.status.success(), "farside {args:?}: {ended:?}");
    Ok(ended.stdout)
}

/// Plugging in by hand needs no command of ours: whether QEMU has the device.
pub fn has(guest: &Guest<'_>, device: &str) -> anyhow::Result<bool> {
    let path = json!({ "path": "/machine/peripheral" });
    let listed = guest.qmp().execute("qom-list", path)?;
    let names = listed.as_array().context("a list")?;
    Ok(names.iter().any(|entry| entry["name"] == qemu_id(device)))
}

fn timed(run: impl FnOnce() -> anyhow::Result<String>) -> anyhow::Result<(String, u128)> {
    let begin = Instant::now();
    let said = run()?;
    Ok((said, begin.elapsed().as_millis()))
}
