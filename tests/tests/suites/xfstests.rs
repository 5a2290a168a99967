//! xfstests on XFS. `FARSIDE_XFSTESTS` names the directory of a checkout, of which a copy is built and run. `TEST_DEV` is an
//! NVMe model, `SCRATCH_DEV` a virtio-blk model.

use std::time::Duration;

use anyhow::{Result, ensure};
use farside_tests::{
    MIB,
    check::{Ending, xfstests::outcomes},
};
use libtest_mimic::{Completion, Failed};

use crate::{
    suite::Suite,
    userland::{SUITE, Userland},
};

const XFSTESTS: Suite = Suite {
    name: "xfstests",
    checkout: "FARSIDE_XFSTESTS",
    packages: PACKAGES,
    build: BUILD,
    len: LEN,
    reasons: REASONS,
};

/// Of the group `quick`, the tests of what a disk is used for: reads and writes by each of Linux's interfaces, discards, and
/// the log of a file system that was shut down. Without eight of the longest.
const SELECT: &str = r#"/ quick( |$)/ && / (aio|io_uring|rw|shutdown|trim)( |$)/ && !/^(032|247|347|366|446|615|630|775) / { print "generic/" $1 }"#;

/// Of those, 99 of 106 have passed: fewer than this, and a reason for which tests may not run hides something.
const ENOUGH: usize = 95;

/// Used by the tests besides Debian's minimal system, and to build their programs.
const PACKAGES: &[&str] = &[
    "acl",
    "attr",
    "autoconf",
    "automake",
    "bc",
    "bsdextrautils",
    "dbench",
    "dmsetup",
    "e2fsprogs",
    "file",
    "fio",
    "gawk",
    "gcc",
    "gettext",
    "hostname",
    "indent",
    "keyutils",
    "kmod",
    "libacl1-dev",
    "libaio-dev",
    "libattr1-dev",
    "libc6-dev",
    "libcap-dev",
    "libcap2-bin",
    "libgdbm-compat-dev",
    "libgdbm-dev",
    "libtool",
    "libtool-bin",
    "liburing-dev",
    "lvm2",
    "make",
    "mount",
    "perl",
    "pkg-config",
    "procps",
    "psmisc",
    "python3",
    "quota",
    "sqlite3",
    "thin-provisioning-tools",
    "udev",
    "uuid-dev",
    "uuid-runtime",
    "xfsdump",
    "xfslibs-dev",
    "xfsprogs",
];

/// With the users that tests look for. Each test looks for the same hundred programs in as many processes, which takes an
/// emulated CPU longer than most tests: it inherits what `check` has found.
const BUILD: &str = r#"make -j2 && useradd -m fsgqa && useradd fsgqa2 && useradd --badname 123456-fsgqa &&
    sed -i -E 's/^export (\w+)="?\$\(type -P ([^)]*)\)"?$/: "${\1=$(type -P \2)}"; export \1/' common/config"#;

/// Timeout of these tests, and of a group.
const RUN: Duration = Duration::from_secs(5400);
const RUN_GROUP: Duration = Duration::from_secs(5 * 3600);

const LEN: u64 = 6144 * MIB;

/// Parts of reasons for which a test may not run.
const REASONS: &[&str] = &[
    // Use a disk that the test makes itself, or a third one.
    "scsi_debug module not found",
    "requires a valid $LOGWRITES_DEV",
    "requires a valid $SCRATCH_LOGDEV",
    // Debian's kernel may hibernate.
    "userspace hibernation to swap is enabled",
    // The models do not have this optional feature.
    "write atomic not supported by this block device",
];

/// A group that is to run instead.
fn group() -> Option<String> {
    std::env::var("FARSIDE_XFSTESTS_GROUP").ok()
}

pub fn borrowed_disks_pass_xfstests() -> Result<Completion, Failed> {
    XFSTESTS.run(test)
}

fn test(userland: &Userland<'_>, [nvme, virtio]: [&str; 2]) -> Result<()> {
    let (tests, limit) = match group() {
        Some(group) => (format!("-g {group}"), RUN_GROUP),
        None => (format!("$(awk '{SELECT}' tests/generic/group.list)"), RUN),
    };
    userland.sh(&format!(
        "set -e
        modprobe loop
        mkfs.xfs -q -f /dev/{nvme}
        mkdir /test /scratch
        cat >{SUITE}/local.config <<end
        export FSTYP=xfs RESULT_BASE=/results
        export TEST_DEV=/dev/{nvme} TEST_DIR=/test
        export SCRATCH_DEV=/dev/{virtio} SCRATCH_MNT=/scratch
end"
    ))?;
    // Without tests, `check` would run all.
    let check = format!("cd {SUITE} && tests=\"{tests}\" && [ \"$tests\" ] && ./check $tests");
    let output = userland.exec(&check, limit)?;
    let outcomes = outcomes(&output.stdout);
    XFSTESTS.judge(userland, &outcomes, &output, |it| {
        format!("/results/{}.*", it.test)
    })?;
    let passed = outcomes.iter().filter(|it| it.ending == Ending::Passed);
    let enough = match group() {
        Some(_) => 1,
        None => ENOUGH,
    };
    ensure!(output.success() && passed.count() >= enough, "{output}");
    Ok(())
}
