//! blktests. `FARSIDE_BLKTESTS` names the directory of a checkout, of which a copy is built and run.
//!
//! Those tests of its groups `nvme` and `block` run that take a device, on an NVMe model and on a virtio-blk model. The
//! others (null_blk, scsi_debug, files behind NVMe targets over loop and TCP) use devices that they make themselves, and
//! none that is borrowed.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Result, ensure};
use farside_tests::{
    MIB,
    check::{Ending, Outcome, blktests::outcomes},
};
use libtest_mimic::{Completion, Failed};

use crate::{
    suite::Suite,
    userland::{SUITE, Userland},
};

const BLKTESTS: Suite = Suite {
    name: "blktests",
    checkout: "FARSIDE_BLKTESTS",
    packages: PACKAGES,
    build: BUILD,
    len: LEN,
    reasons: REASONS,
};

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
    BLKTESTS.run(test)
}

fn test(userland: &Userland<'_>, devices: [&str; 2]) -> Result<()> {
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
    BLKTESTS.judge(userland, &outcomes, &output, |it| {
        let device = it.device.as_deref().unwrap_or_default();
        format!("/results/{device}*/{}.*", it.test)
    })?;
    let missing = missing(&outcomes, devices);
    ensure!(missing.is_empty(), "{missing:?} did not pass\n{output}");
    ensure!(output.success(), "{output}");
    Ok(())
}

/// The tests of the lists that have not passed, with their devices.
fn missing(outcomes: &[Outcome], [nvme, virtio]: [&str; 2]) -> BTreeSet<(String, Option<String>)> {
    let of = |tests: &'static [&str], device: &str| {
        let device = Some(device.to_owned());
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
