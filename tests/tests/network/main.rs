//! A device crosses between two hosts over a network that is cut, with the scripted VMM in QEMU's place.
//!
//! Each host has its own network, IPC and mount namespace, and a file system of its own in memory, where all of its
//! files are. The hosts share the wire, and the programs.

mod bad_input;
mod cluster;
mod cuts;
mod etcd;
mod mdns;
mod page;
mod stage;
mod tester;

use std::cell::RefCell;

use farside_tests::{Weight, told, trial, two_hosts::unable};
use libtest_mimic::{Arguments, Completion};

use cluster::Cluster;
use stage::Stage;

type Test = fn(&mut Stage) -> anyhow::Result<()>;

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
    let trials = tests![
        bad_input::a_small_mtu_carries_a_drive,
        bad_input::a_lender_that_cannot_be_used_is_an_error_in_words,
        bad_input::the_lenders_of_a_file_are_known,
        bad_input::a_borrower_that_stops_reading_slows_nobody_else,
        bad_input::a_lender_that_stops_reading_slows_nobody_else,
        cuts::a_drive_crosses_with_one_round_trip_for_each_command,
        cuts::a_drive_crosses_with_tls,
        cuts::limits_hold_over_the_network,
        cuts::a_young_lease_is_kept_for_all_of_the_time,
        cuts::io_goes_on_after_a_silent_cut,
        cuts::io_goes_on_after_short_cuts,
        cuts::io_goes_on_when_worker_and_lender_are_killed,
        cuts::io_goes_on_when_the_backend_is_killed,
        cuts::a_drive_that_is_out_of_reach_for_too_long_is_given_up,
        cuts::a_vm_does_not_go_on_with_another_image_of_the_same_size,
        cuts::a_revoked_vm_does_not_go_on_when_the_network_is_back,
        cuts::a_vm_does_not_go_on_after_another_has_written,
        cuts::a_vm_does_not_go_on_after_its_lenders_host_has_restarted,
        mdns::lenders_on_a_lan_are_found_where_that_is_turned_on,
        page::the_page_prints_what_the_commands_print,
        tester::a_device_without_a_medium_crosses,
        tester::a_device_without_a_medium_waits_for_its_lender,
        tester::a_device_without_a_medium_is_revoked,
    ]
    .map(|(name, test)| {
        let weight = match name.starts_with("cuts::") {
            true => Weight::of_kills(),
            false => Weight::Guests,
        };
        trial(name, weight, move || {
            if let Some(reason) = unable() {
                return Ok(Completion::ignored_with(reason));
            }
            let stage = Stage::new().map_err(|error| format!("{error:#}"))?;
            let stage = RefCell::new(stage);
            let tested = told(|| test(&mut stage.borrow_mut()), || stage.borrow().story());
            tested.map(|()| Completion::Completed)
        })
    });
    let mut trials = Vec::from(trials);
    let name = "etcd::ids_are_unique_and_leases_stay_while_members_die";
    trials.push(trial(name, Weight::Guests, || {
        if let Some(reason) = unable() {
            return Ok(Completion::ignored_with(reason));
        }
        let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
        let cluster = RefCell::new(cluster);
        let tested = told(
            || etcd::ids_are_unique_and_leases_stay_while_members_die(&mut cluster.borrow_mut()),
            || cluster.borrow().story(),
        );
        tested.map(|()| Completion::Completed)
    }));
    libtest_mimic::run(&args, trials).exit();
}
