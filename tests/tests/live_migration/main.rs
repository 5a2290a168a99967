//! Live migration with real guests, between two network namespaces, and the preceding
//! check.
//!
//! The guest has its own disk (virtio) on an image that both hosts share, and the borrowed
//! NVMe device.

mod checks;
mod counter;
mod moves;
mod troubles;

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use farside_testbed::{Vm, VmBuilder};
use farside_tests::{
    BOOT, MIB, SHORT, Weight, trial,
    two_hosts::{Stage, play},
};
use libtest_mimic::{Arguments, Completion};

type Make = fn() -> Result<Stage>;
type Test = fn(&Stage) -> Result<Completion>;

/// The image of the guest's own disk, in the stage's directory.
const ROOT: &str = "root.img";

/// The addresses at which the hosts' QEMUs are reachable.
const ADDRESSES: [(&str, &str); 2] = [("a", "10.99.0.1"), ("b", "10.99.0.2")];

/// Test functions, whose names the trials have, and the stage of each.
macro_rules! tests {
    ($($module:ident :: $name:ident on $stage:ident),* $(,)?) => {
        [$((
            concat!(stringify!($module), "::", stringify!($name)),
            $stage as Make,
            $module::$name as Test,
        )),*]
    };
}

fn main() {
    farside_testbed::become_root();
    env_logger::init();
    let args = Arguments::from_args();
    let trials = tests![
        moves::a_running_guest_goes_there_and_back on usual,
        troubles::a_guest_that_cannot_go_stays_and_gets_its_drive_back on usual,
        troubles::a_transfer_goes_on_without_the_command_that_began_it on usual,
        checks::what_would_stop_a_migration_is_told_before on deaf,
    ]
    .map(|(name, make, test)| trial(name, Weight::Guests, move || play(make, test)));
    libtest_mimic::run(&args, trials.into()).exit();
}

fn usual() -> Result<Stage> {
    Stage::with(with_root)
}

/// A stage whose guest does not handle hot plug.
fn deaf() -> Result<Stage> {
    Stage::with(|directory, builder| {
        with_root(directory, builder).append("acpiphp.disable=1 pcie_ports=compat")
    })
}

fn with_root(directory: &Path, builder: VmBuilder) -> VmBuilder {
    let disk = serde_json::json!({
        "driver": "raw",
        "node-name": "root",
        // One host's page cache is not coherent with the other's.
        "cache": { "direct": true },
        "file": { "driver": "file", "filename": directory.join(ROOT) },
    });
    builder.args([
        "-blockdev",
        &disk.to_string(),
        "-device",
        "virtio-blk-pci,drive=root,id=root-disk",
    ])
}

fn root_image(stage: &Stage) -> std::path::PathBuf {
    stage.directory().join(ROOT)
}

/// Starts the VM on host `a`.
fn start(stage: &Stage) -> Result<Vm> {
    fs::File::create(root_image(stage))?.set_len(64 * MIB)?;
    stage.ok("a", &["start", farside_tests::two_hosts::VM])?;
    let guest = stage.guest()?;
    guest.exec_ok("modprobe virtio_blk", SHORT)?;
    guest.wait_path(counter::DISK, SHORT)?;
    Ok(guest)
}

/// The arguments of a live migration to a host.
fn live(to: &'static str) -> [&'static str; 7] {
    let address = ADDRESSES
        .iter()
        .find_map(|(host, address)| (*host == to).then_some(*address));
    let vm = farside_tests::two_hosts::VM;
    let address = address.unwrap_or_default();
    [
        "migrate",
        vm,
        "--to",
        to,
        "--live",
        "--migrate-address",
        address,
    ]
}

/// The guest that has arrived on another host.
fn arrived(stage: &Stage) -> Result<Vm> {
    let guest = stage.adopt(BOOT)?;
    guest.wait_path(DRIVE, SHORT)?;
    Ok(guest)
}

/// The borrowed disk.
const DRIVE: &str = "/dev/nvme0n1";

/// Fills the start of the borrowed disk in the guest. Returns the checksum.
fn fill(guest: &Vm) -> Result<String> {
    let command = format!("head -c 1048576 /dev/urandom | dd of={DRIVE} bs=64k conv=fsync");
    guest.exec_ok(&command, SHORT)?;
    checksum(guest)
}

fn checksum(guest: &Vm) -> Result<String> {
    let command = format!("dd if={DRIVE} bs=64k count=16 iflag=direct 2>/dev/null | sha256sum");
    let printed = guest.exec_ok(&command, SHORT)?;
    let sum = printed.split_whitespace().next();
    let sum = sum.context("sha256sum printed nothing")?;
    ensure!(sum.len() == 64, "{sum}");
    Ok(sum.to_owned())
}
