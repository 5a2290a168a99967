//! Test suites of Linux's storage in a guest, on borrowed disks. Debian has no packages of them: each runs where an
//! environment variable names a checkout. The guest's userland is Debian's, so they need root, which may be a user
//! namespace's.

mod blktests;
mod suite;
mod userland;
mod xfstests;

use farside_tests::{Weight, trial};
use libtest_mimic::Arguments;

fn main() {
    farside_testbed::become_root();
    env_logger::init();
    let trials = vec![
        trial(
            "borrowed_disks_pass_blktests",
            Weight::Hosts,
            blktests::borrowed_disks_pass_blktests,
        ),
        trial(
            "borrowed_disks_pass_xfstests",
            Weight::Suite,
            xfstests::borrowed_disks_pass_xfstests,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
