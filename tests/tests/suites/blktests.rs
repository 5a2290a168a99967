//! blktests. `FARSIDE_BLKTESTS` names the directory of a checkout, of which a copy is built and run.
//!
//! Those tests of its groups `nvme` and `block` run that take a device, on an NVMe model and on a virtio-blk model. The
//! others (null_blk, scsi_debug, files behind NVMe targets over loop and TCP) use devices that they make themselves, and
//! none that is borrowed.

use std::{collections::BTreeSet, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use farside_testbed::DebianRoot;
use farside_tests::{
    BorrowState, Cluster, MIB,
    blktests::{Ending, Outcome, outcomes},
    told,
};
use libtest_mimic::{Completion, Failed};

use crate::userland::{self, SUITE, Userland};

const CHECKOUT: &str = "FARSIDE_BLKTESTS";

/// Used by the tests besides Debian's minimal system, and to build their programs.
const PACKAGES: &[&str] = &[
    "bsdextrautils",
    "expect",
    "fio",
    "g++",
    "gawk",
    "gcc",
    "kmod",
    "libc6-dev",
    "liburing-dev",
    "make",
    "mount",
    "nvme-cli",
    "pciutils",
    "sudo",
    "udev",
    "xfsprogs",
];

/// The release of Debian's kernel, 7.3.4+deb13-amd64, is to be of version 7.3.4: blktests takes a dash only for the end of it.
const BUILD: &str =
    r"make clean && make && useradd tester && sed -i 's|s/-\.\*//|s/[-+].*//|' common/rc";

/// For the tests that would take longer, in seconds.
const LIMIT: u32 = 5;

/// Timeout of all tests.
const RUN: Duration = Duration::from_secs(2400);

/// A GiB is what some tests use of the device.
const LEN: u64 = 1280 * MIB;

const PASS_ON_ALL: &[&str] = &[
    "block/003",
    "block/004",
    "block/005",
    "block/007",
    "block/008",
    "block/011",
    "block/012",
    "block/019",
    "block/042",
];

/// 033 to 037 are of a target that passes commands through to the device.
const PASS_ON_NVME: &[&str] = &[
    "nvme/032", "nvme/033", "nvme/034", "nvme/035", "nvme/036", "nvme/037", "nvme/046", "nvme/049",
    "nvme/053", "nvme/059", "nvme/067",
];

/// Parts of reasons for which a test may not run.
const REASONS: &[&str] = &[
    // Debian's kernel injects no faults.
    "kernel option FAULT_INJECTION",
    "kernel option FAIL_IO_TIMEOUT",
    "debugfs does not exist",
    // Debian's fio; and the test needs metadata.
    "fio version is older than 3.40",
    // The models have none of these optional features.
    "does not have metadata",
    "does not have namespace flbas field",
    "doesn't support SED operations",
    // The group nvme, of the virtio-blk disk.
    "is not a NVMe device",
];

pub fn borrowed_disks_pass_blktests() -> Result<Completion, Failed> {
    let Some(checkout) = std::env::var_os(CHECKOUT) else {
        return Ok(Completion::ignored_with(format!(
            "{CHECKOUT} does not name the directory of a checkout of blktests"
        )));
    };
    if let Some(why) = DebianRoot::missing() {
        return Ok(Completion::ignored_with(why));
    }
    let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
    told(|| test(&cluster, Path::new(&checkout)), || cluster.story())?;
    Ok(Completion::Completed)
}

fn test(cluster: &Cluster, checkout: &Path) -> Result<()> {
    let userland = userland::make(cluster, PACKAGES, checkout, BUILD)?;
    let nvme = format!("nvme={}", cluster.image("nvme", LEN)?.display());
    let virtio = format!("virtio={}", cluster.image("virtio", LEN)?.display());
    let _lender = cluster.lend(&["--nvme", &nvme, "--virtio-blk", &virtio])?;
    let _backend = cluster.serve("a", &["nvme", "virtio"]).start()?;
    let guest = cluster.guest("a").cpus(2).memory(2048 * MIB);
    let guest = userland::attach(guest, &userland).boot()?;
    guest.wait_disk()?;
    let userland = Userland::mount(&guest)?;
    let virtio = userland.other_virtio_disk()?;
    let devices = ["nvme0n1", virtio.as_str()];
    let config = format!(
        "TEST_DEVS=({}) NORMAL_USER=tester TIMEOUT={LIMIT} OUTPUT=/results",
        devices.map(|device| format!("/dev/{device}")).join(" ")
    );
    userland.sh(&format!("echo '{config}' >{SUITE}/config"))?;
    let output = userland.exec(
        &format!("cd {SUITE} && ./check --device-only nvme block"),
        RUN,
    )?;
    let outcomes = outcomes(&output.stdout);
    for it in &outcomes {
        let reasons = it.details.join("; ");
        log::info!("{} on {}: {:?} {reasons}", it.test, it.device, it.ending);
    }
    let wrong: Vec<String> = outcomes
        .iter()
        .filter(|it| !is_expected(it))
        .map(|it| format!("{it:#?}\n{}", results(&userland, it)))
        .collect();
    ensure!(wrong.is_empty(), "{}\n{output}", wrong.join("\n"));
    let missing = missing(&outcomes, devices);
    ensure!(missing.is_empty(), "{missing:?} did not pass\n{output}");
    ensure!(output.success(), "{output}");

    // A worker that had crashed would have been replaced.
    for device in ["nvme", "virtio"] {
        let borrow = cluster.wait_state("a", device, BorrowState::Ready)?;
        let connection = borrow.connection.context("a connection to the lender")?;
        ensure!(connection.restarts == 0, "{device}: {connection:?}");
    }
    guest.power_off()
}

/// The tests of the lists that have not passed, with their devices.
fn missing(outcomes: &[Outcome], [nvme, virtio]: [&str; 2]) -> BTreeSet<(String, String)> {
    let of = |tests: &'static [&str], device: &str| {
        let device = device.to_owned();
        tests
            .iter()
            .map(move |test| ((*test).to_owned(), device.clone()))
    };
    let passed: BTreeSet<_> = outcomes
        .iter()
        .filter(|it| it.ending == Ending::Passed)
        .map(|it| (it.test.clone(), it.device.clone()))
        .collect();
    of(PASS_ON_ALL, nvme)
        .chain(of(PASS_ON_ALL, virtio))
        .chain(of(PASS_ON_NVME, nvme))
        .filter(|test| !passed.contains(test))
        .collect()
}

fn is_expected(outcome: &Outcome) -> bool {
    match outcome.ending {
        Ending::Passed => true,
        Ending::NotRun => {
            let mut reasons = outcome.details.iter();
            !outcome.details.is_empty()
                && reasons.all(|reason| REASONS.iter().any(|it| reason.contains(it)))
        }
        Ending::Failed | Ending::Missing => false,
    }
}

/// The files that a test left: its output, its log, the kernel's messages.
fn results(userland: &Userland<'_>, outcome: &Outcome) -> String {
    let Outcome { test, device, .. } = outcome;
    let show = format!("tail -n 60 /results/{device}*/{test}.* && dmesg | tail -n 40");
    match userland.sh(&show) {
        Ok(text) => text,
        Err(error) => format!("{error:#}"),
    }
}
