//! The Debian package, installed by dpkg in a clean Debian root, and used by systemd in a
//! VM that boots from that root. Requires root, which may be a user namespace's; skipped
//! without it. `$FARSIDE_DEB` is the package, else the output of `cargo xtask deb`.
//!
//! - [`installed`]: the package's contents, and its removal without a trace;
//! - [`booted`]: units, sockets and restarts under a real systemd;
//! - [`guest`]: a nested guest in that VM, whose QEMU is a unit, too.

mod booted;
mod exposure;
mod guest;
mod installed;
mod machine;
mod stage;

use farside_testbed::DebianRoot;
use farside_tests::{Weight, trial};
use libtest_mimic::{Arguments, Completion, Failed};

use stage::Stage;

type Test = fn(&Stage) -> anyhow::Result<()>;

fn main() {
    farside_testbed::become_root();
    env_logger::init();
    let mut args = Arguments::from_args();
    // Emulated guests are expensive.
    args.test_threads.get_or_insert(2);
    let tests: [(&str, Test); 2] = [
        (
            "installed::it_brings_what_is_needed_and_goes_without_a_trace",
            installed::it_brings_what_is_needed_and_goes_without_a_trace,
        ),
        (
            "booted::systemd_starts_restarts_and_ends_lender_and_backend",
            booted::systemd_starts_restarts_and_ends_lender_and_backend,
        ),
    ];
    let trials = tests.map(|(name, test)| trial(name, Weight::Hosts, move || run(test)));
    libtest_mimic::run(&args, trials.into()).exit();
}

fn run(test: Test) -> Result<Completion, Failed> {
    if let Some(why) = DebianRoot::missing() {
        return Ok(Completion::ignored_with(why));
    }
    Stage::shared()
        .and_then(test)
        .map(|()| Completion::Completed)
        .map_err(|error| format!("{error:#}").into())
}
