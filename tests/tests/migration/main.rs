//! Cold migration with real guests, between two network namespaces.
//!
//! Each test has a separate stage; if it fails, the stage's logs are shown. There are eight
//! moves and four kills, each of which boots a guest, unless `FARSIDE_MIGRATIONS` and
//! `FARSIDE_KILLS` are set; `cargo xtask soak` runs 50 and 20. `FARSIDE_SEED` repeats the
//! random choices.

mod attacks;
mod kills;
mod moves;
mod network;

use std::sync::{PoisonError, RwLock};

use farside_tests::{
    SHORT, Weight, trial,
    two_hosts::{self as stage, Stage, play},
};
use libtest_mimic::{Arguments, Completion};

/// Tests that run at the same time share it.
static AT_ONCE: RwLock<()> = RwLock::new(());

type Test = fn(&Stage) -> anyhow::Result<Completion>;

/// Test functions; trials have their names.
macro_rules! tests {
    ($($module:ident :: $name:ident),* $(,)?) => {
        [$((concat!(stringify!($module), "::", stringify!($name)), $module::$name as Test)),*]
    };
}

fn main() {
    farside_testbed::become_root();
    env_logger::init();
    let args = Arguments::from_args();
    let lean = tests![
        moves::what_cannot_move_is_refused_and_runs_on,
        moves::a_host_that_was_left_does_not_get_the_drive_whatever_it_does,
        moves::a_vm_moves_back_and_forth_with_its_drive,
        moves::the_lender_may_be_one_of_the_two_hosts,
        network::a_guest_outlasts_a_cut_longer_than_its_drivers_limit,
        network::a_guest_loses_a_drive_that_stays_out_of_reach_and_lives_on,
        attacks::two_migrations_at_once_are_one,
        attacks::both_hosts_go_on_at_once_and_one_has_the_vm,
        attacks::garbage_for_the_agent_changes_nothing,
        attacks::a_full_lender_and_a_changed_journal_stop_it,
        attacks::a_full_disk_stops_it_and_room_lets_it_go_on,
        kills::a_migration_survives_the_death_of_anything,
    ]
    .map(|(name, test)| {
        trial(name, Weight::Hosts, move || {
            let _others = AT_ONCE.read().unwrap_or_else(PoisonError::into_inner);
            play(Stage::new, test)
        })
    });
    // It measures how long a VM is off.
    let alone = tests![network::a_drive_moves_with_its_large_vm].map(|(name, test)| {
        trial(name, Weight::Hosts, move || {
            let _alone = AT_ONCE.write().unwrap_or_else(PoisonError::into_inner);
            play(Stage::new, test)
        })
    });
    // Their drivers are not in the lean guest.
    let whole = tests![
        network::a_virtio_blk_disk_waits_for_its_lender,
        network::a_network_device_waits_for_its_lender_and_moves_with_its_vm,
    ]
    .map(|(name, test)| {
        let stage = || Stage::with(|_, builder| builder);
        trial(name, Weight::Hosts, move || {
            let _others = AT_ONCE.read().unwrap_or_else(PoisonError::into_inner);
            play(stage, test)
        })
    });
    let trials = lean.into_iter().chain(alone).chain(whole).collect();
    libtest_mimic::run(&args, trials).exit();
}
