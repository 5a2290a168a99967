//! `farside attach` and `farside detach` on running VMs.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use farside_qemu_configs::qemu_id;
use farside_testbed::Machine;
use farside_tests::{BorrowState, Cluster, Guest, MIB, NVME, SHORT, from_env};
use libtest_mimic::Completion;
use serde_json::json;

use crate::{check, passed};

const DISK: &str = "/dev/nvme0n1";

/// The NVMe disk that is attached and detached beside [`DISK`].
const SECOND: &str = "/dev/nvme1n1";

/// Reads and writes the first disk until /tmp/stop exists, and fails when one of its passes
/// does.
const BUSY: &str = "set -e; n=0; while ! [ -e /tmp/stop ]; do \
    dd if=/dev/urandom of=/tmp/busy bs=64k count=4 2> /dev/null; \
    dd if=/tmp/busy of=/dev/nvme0n1 bs=64k oflag=direct 2> /dev/null; \
    dd if=/dev/nvme0n1 bs=64k count=4 iflag=direct 2> /dev/null | cmp - /tmp/busy; \
    n=$((n+1)); done; echo passes $n";

/// Timeout of all rounds on a loaded machine.
const LONG: Duration = Duration::from_secs(900);

/// Rounds of attach and detach, unless `FARSIDE_HOTPLUGS` is set.
const ROUNDS: u64 = 4;

/// Linux's hot-plug modes: ACPI (the default, on a q35 too) or native PCIe hot plug.
const NO_ACPI_HOT_PLUG: [&str; 2] = [
    "-global",
    "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
];

pub fn a_drive_comes_and_goes_repeatedly_on_a_q35(cluster: &Cluster) -> anyhow::Result<Completion> {
    comes_and_goes(cluster, Machine::Q35, &[], rounds()?)
}

pub fn a_drive_comes_and_goes_repeatedly_on_an_i440fx(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    comes_and_goes(cluster, Machine::I440fx, &[], rounds()?)
}

pub fn native_pcie_hot_plug_works_without_acpi(cluster: &Cluster) -> anyhow::Result<Completion> {
    comes_and_goes(cluster, Machine::Q35, &NO_ACPI_HOT_PLUG, 2)
}

fn rounds() -> anyhow::Result<u64> {
    Ok(from_env("FARSIDE_HOTPLUGS")?.unwrap_or(ROUNDS))
}

fn comes_and_goes(
    cluster: &Cluster,
    machine: Machine,
    args: &[&str],
    rounds: u64,
) -> anyhow::Result<Completion> {
    let lender: Vec<String> = ["disk0", "disk1"]
        .iter()
        .map(|id| Ok(format!("{id}={}", cluster.image(id, 64 * MIB)?.display())))
        .collect::<anyhow::Result<_>>()?;
    let _lender = cluster.lend(&["--nvme", &lender[0], "--nvme", &lender[1]])?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").machine(machine).args(args).boot()?;
    guest.wait_disk()?;
    let stays = cluster.wait_state("a", "disk0", BorrowState::Ready)?;
    let busy = guest.exec_start(BUSY, LONG)?;
    let mut place = None;
    let mut times = Times::default();
    for round in 0..rounds {
        let begin = Instant::now();
        attach(cluster, "a", "disk1")?;
        times.attach.push(begin.elapsed().as_millis());
        guest.wait_path(SECOND, SHORT)?;
        times.seen.push(begin.elapsed().as_millis());
        check::open(cluster, &guest, "disk1", 1)?;
        check::io(&guest, SECOND, 100 + round)?;
        // To the guest it is the same device at the same address each time.
        let here = guest.sh("cat /sys/class/nvme/nvme1/address")?;
        ensure!(*place.get_or_insert(here.clone()) == here, "now at {here}");

        let begin = Instant::now();
        let said = detach(cluster, "a", "disk1")?;
        times.detach.push(begin.elapsed().as_millis());
        ensure!(said.contains("disk1 is returned; the guest"), "{said}");
        // No waiting: the state has changed when the command returns.
        let status = cluster.status()?;
        let lent = status.lent("disk1")?;
        ensure!(lent.borrowed_by.is_none() && lent.is_closed(), "{lent:?}");
        ensure!(status.borrow("a", "disk1").is_err(), "it is still served");
        guest.wait_no_path(SECOND, SHORT)?;
        guest.find(NVME)?;
    }
    // The other device was not disturbed: its I/O never failed, and its lease is still the
    // first.
    guest.sh("touch /tmp/stop")?;
    let output = busy.wait()?;
    ensure!(output.success(), "{output:?}");
    let last = cluster.status()?.borrow("a", "disk0")?;
    ensure!(
        (last.state, last.generation) == (BorrowState::Ready, stays.generation),
        "{last:?}"
    );
    println!("{machine:?} {args:?}: {times:?} (ms)");
    check::no_faults(cluster, &["disk0", "disk1"])?;
    guest.power_off()?;
    passed()
}

/// Times from a command's start, ms.
#[derive(Debug, Default)]
struct Times {
    /// Until its end.
    attach: Vec<u128>,
    /// Until the guest has the block device.
    seen: Vec<u128>,
    /// Until its end, when the lender has the device back.
    detach: Vec<u128>,
}

pub fn what_a_killed_command_left_is_gone_on_from(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster.serve("a", &["dma0"]).start()?;
    let guest = cluster.guest("a").boot()?;

    // Killed as soon as the backend serves the device: before, during or after QEMU's part.
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

    // Only the backend has it; detach undoes that.
    let mut command = cluster.start("farside attach", &["attach", "a", "disk0"])?;
    cluster.wait_status("disk0 served", SHORT, |status| {
        Ok(status.borrow("a", "disk0").ok())
    })?;
    let _ = command.kill();
    detach(cluster, "a", "disk0")?;
    ensure!(cluster.status()?.borrow("a", "disk0").is_err());
    guest.wait_no_path(DISK, SHORT)?;

    // Attaching is idempotent.
    attach(cluster, "a", "disk0")?;
    let again = attach(cluster, "a", "disk0")?;
    ensure!(again.contains("was plugged into VM a before"), "{again}");
    guest.wait_disk()?;

    // A detach that was interrupted after QEMU's part.
    let id = qemu_id(&"disk0".parse()?);
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

/// `farside attach`, which must succeed. Returns its output.
pub fn attach(cluster: &Cluster, vm: &str, device: &str) -> anyhow::Result<String> {
    done(cluster, &["attach", vm, device])
}

/// `farside detach`, which must succeed; its timeout allows for an emulated guest on a
/// loaded machine.
pub fn detach(cluster: &Cluster, vm: &str, device: &str) -> anyhow::Result<String> {
    done(cluster, &["detach", vm, device, "--limit", "120"])
}

/// Runs `farside`, which must succeed. Returns its output.
pub fn done(cluster: &Cluster, args: &[&str]) -> anyhow::Result<String> {
    let ended = cluster.run(args)?;
    ensure!(ended.status.success(), "farside {args:?}: {ended:?}");
    Ok(ended.stdout)
}

/// Whether QEMU has the device: hot plug through the monitor needs no farside command.
pub fn has(guest: &Guest<'_>, device: &str) -> anyhow::Result<bool> {
    let path = json!({ "path": "/machine/peripheral" });
    let listed = guest.qmp().execute("qom-list", path)?;
    let names = listed.as_array().context("a list")?;
    let id = qemu_id(&device.parse()?);
    Ok(names.iter().any(|entry| entry["name"] == id))
}
