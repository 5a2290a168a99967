//! A real libvirt: Debian's libvirtd runs domains that borrow devices, and farside's hook
//! starts and stops their backends. Requires root, which may be a user namespace's; skipped
//! without it.
//!
//! Each test has a separate host; unless `--test-threads` is given, two run concurrently.

mod doctor;
mod domain;
mod edit;
mod hosts;
mod life;
mod loss;
mod moves;
mod plug;
mod refusals;
mod stage;
mod state;
mod users;

use farside_testbed::DebianRoot;
use farside_tests::{Cluster, Weight, told, trial, two_hosts};
use libtest_mimic::{Arguments, Completion, Failed};

use hosts::Hosts;
use stage::{AS_DEFAULT_USER, AS_ROOT, Stage};

type Test = fn(&Stage) -> anyhow::Result<()>;
type OfHosts = fn(&Hosts) -> anyhow::Result<()>;

/// Test functions, whose names the trials have, with their host's `qemu.conf`.
macro_rules! tests {
    ($($module:ident :: $name:ident on $conf:ident),* $(,)?) => {
        [$((
            concat!(stringify!($module), "::", stringify!($name)),
            $module::$name as Test,
            $conf,
        )),*]
    };
}

fn main() {
    farside_testbed::become_root();
    env_logger::init();
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(2);
    let trials = tests![
        life::a_domain_keeps_its_data_when_it_is_destroyed_started_and_shut_down on AS_ROOT,
        life::two_domains_have_their_own_drives_and_a_third_is_told_who_has_one on AS_ROOT,
        loss::libvirtd_is_killed_and_the_domain_does_not_notice on AS_ROOT,
        loss::a_domain_is_destroyed_during_io_and_its_backend_killed_under_it on AS_ROOT,
        plug::drives_are_attached_to_a_running_domain_and_detached on AS_ROOT,
        plug::what_cannot_be_attached_or_detached_is_refused on AS_ROOT,
        state::a_domain_is_not_saved_nor_moved_but_paused_and_rebooted on AS_ROOT,
        users::qemu_of_another_user_reaches_its_devices_by_a_group on AS_DEFAULT_USER,
        state::a_state_that_was_saved_without_its_devices_is_not_restored on AS_ROOT,
        edit::what_libvirt_wrote_anew_is_edited_again_and_undone on AS_ROOT,
        doctor::what_it_says_to_type_makes_a_domain_start on AS_DEFAULT_USER,
        refusals::a_domain_whose_lender_is_away_does_not_start_and_says_why on AS_ROOT,
        refusals::the_hook_leaves_other_domains_alone on AS_ROOT,
        refusals::the_hook_says_what_is_wrong_with_a_domain_of_ours on AS_ROOT,
    ]
    .map(|(name, test, conf)| trial(name, Weight::Guests, move || run(test, conf)));
    let moves = [
        (
            "moves::a_domain_moves_to_another_host_and_back_with_its_drive",
            moves::a_domain_moves_to_another_host_and_back_with_its_drive as OfHosts,
        ),
        (
            "moves::a_domain_has_one_home_whatever_command_of_virsh_was_the_last",
            moves::a_domain_has_one_home_whatever_command_of_virsh_was_the_last,
        ),
    ]
    .map(|(name, test)| trial(name, Weight::Guests, move || run_on_two(test)));
    let trials = trials.into_iter().chain(moves).collect();
    libtest_mimic::run(&args, trials).exit();
}

fn run_on_two(test: OfHosts) -> Result<Completion, Failed> {
    if let Some(why) = DebianRoot::missing() {
        return Ok(Completion::ignored_with(why));
    }
    if let Some(why) = two_hosts::unable() {
        return Ok(Completion::ignored_with(why));
    }
    let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
    let hosts = Hosts::new(&cluster).map_err(|error| format!("{error:#}"))?;
    let story = || format!("{}\n{}", cluster.story(), hosts.story());
    told(|| test(&hosts), story).map(|()| Completion::Completed)
}

fn run(test: Test, conf: &str) -> Result<Completion, Failed> {
    if let Some(why) = DebianRoot::missing() {
        return Ok(Completion::ignored_with(why));
    }
    let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
    let stage = Stage::new(&cluster, conf).map_err(|error| format!("{error:#}"))?;
    let story = || format!("{}\n{}", cluster.story(), stage.story());
    told(|| test(&stage), story).map(|()| Completion::Completed)
}
