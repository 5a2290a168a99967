//! End-to-end tests with real guests. Each test has a separate cluster; if it fails, the
//! logs of all its processes are shown.
//!
//! Emulated guests are expensive: unless `--test-threads` is given, two tests run
//! concurrently.

mod check;
mod crowd;
mod firmware;
mod growth;
mod hotplug;
mod hotplug_losses;
mod hotplug_refusals;
mod interrupts;
mod io;
mod isolation;
mod layout;
mod life;
mod loss;
mod network_device;
mod outlive;
mod peer_to_peer;
mod refusals;
mod revoke;
mod shared;
mod sharing;
mod start;
mod u_boot;
mod viommu;
mod virtio;

use farside_tests::{Cluster, Weight, told, trial};
use libtest_mimic::{Arguments, Completion, Failed};

/// A test passes, fails, or returns the reason why it cannot run here.
type Test = fn(&Cluster) -> anyhow::Result<Completion>;

/// Heavy trials, and why they run only on request.
const HEAVY: [(&str, &str); 2] = [
    (
        "crowd::twenty_guests_started_at_once_have_their_disks",
        "takes about eight minutes and 5 GiB; run with --include-ignored",
    ),
    (
        "outlive::half_an_hour_of_kills_costs_a_guest_no_io_error",
        "takes half an hour; run with --include-ignored",
    ),
];

/// Test functions; trials have their names.
macro_rules! tests {
    ($($module:ident :: $name:ident),* $(,)?) => {
        [$((concat!(stringify!($module), "::", stringify!($name)), $module::$name as Test)),*]
    };
}

fn main() {
    env_logger::init();
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(2);
    let with_heavy = args.ignored || args.include_ignored;
    let trials = tests![
        layout::a_5_gib_guest_gets_two_windows_and_dma_above_4_gib,
        layout::memory_that_is_plugged_in_is_reached_at_once_and_not_before,
        layout::a_virtio_mem_device_is_resized_under_io,
        crowd::twenty_guests_started_at_once_have_their_disks,
        io::bytes_are_the_same_on_both_sides,
        io::file_systems_fio_and_discard_work,
        io::every_processor_has_a_queue_and_a_busy_guest_traps_no_doorbell,
        io::an_idle_drive_costs_no_processor_time,
        firmware::ovmf_boots_the_guest_from_the_borrowed_drive,
        u_boot::u_boots_own_drivers_use_borrowed_disks,
        firmware::ovmf_on_an_i440fx_leaves_the_drive_to_the_guest,
        interrupts::intx_on_an_i440fx_carries_io,
        interrupts::a_driver_of_a_shared_line_takes_its_interrupts,
        interrupts::relayed_interrupts_carry_io_and_are_counted_alike,
        interrupts::interrupts_that_are_lost_without_bus_mastering_are_raised_again,
        isolation::dma_reaches_guest_ram_and_nothing_else,
        life::nothing_is_pinned_before_bus_master_enable_and_after_its_end,
        life::a_guest_reboots_and_a_vm_starts_again,
        life::devices_are_plugged_in_and_unplugged_while_the_guest_runs,
        hotplug::a_drive_comes_and_goes_repeatedly_on_a_q35,
        hotplug::a_drive_comes_and_goes_repeatedly_on_an_i440fx,
        hotplug::native_pcie_hot_plug_works_without_acpi,
        hotplug::what_a_killed_command_left_is_gone_on_from,
        hotplug_refusals::a_guest_that_does_not_let_go_keeps_its_drive,
        hotplug_refusals::a_paused_guest_lets_go_when_it_goes_on,
        hotplug_refusals::what_cannot_be_plugged_in_leaves_the_vm_as_it_was,
        hotplug_losses::a_backend_killed_in_an_attach_gives_the_device_back,
        hotplug_losses::a_drive_whose_backend_was_killed_is_brought_back,
        hotplug_losses::a_dead_drive_that_no_driver_ran_stays_until_the_vm_ends,
        hotplug_losses::a_qemu_killed_in_a_detach_gives_the_device_back,
        hotplug_losses::a_guest_that_is_not_there_yet_keeps_its_drive,
        revoke::a_revoked_drive_leaves_a_running_guest_in_order,
        revoke::a_revoked_drive_is_taken_from_a_guest_that_does_not_answer,
        start::a_vm_is_started_and_stopped_and_started_again,
        start::devices_at_one_port_are_functions_of_one_device,
        start::what_was_killed_is_started_again,
        start::a_start_that_fails_leaves_nothing_behind,
        start::a_guest_that_does_not_power_off_is_ended_by_force_only,
        sharing::two_vms_use_their_own_drives_of_one_lender,
        shared::two_guests_reserve_a_shared_namespace,
        shared::two_guests_mount_a_cluster_file_system_on_a_shared_namespace,
        sharing::a_device_that_another_vm_has_is_refused_with_the_name_of_that_vm,
        loss::a_killed_qemu_gives_its_device_back_and_its_neighbour_goes_on,
        loss::a_killed_backend_gives_its_device_back,
        loss::a_killed_lender_leaves_backend_and_vm_alive_until_it_returns,
        loss::a_lender_told_to_stop_takes_all_back,
        loss::a_backend_told_to_stop_gives_all_back,
        outlive::workers_that_are_killed_cost_a_guest_no_io_error,
        outlive::lenders_that_are_killed_or_stopped_cost_a_guest_no_io_error,
        outlive::backends_that_are_killed_cost_a_guest_no_io_error,
        outlive::workers_that_are_killed_cost_a_guest_with_virtio_blk_no_io_error,
        outlive::backends_that_are_killed_cost_a_guest_with_virtio_blk_no_io_error,
        outlive::workers_that_are_killed_cost_a_guest_with_mapped_doorbells_no_io_error,
        outlive::backends_that_are_killed_cost_a_guest_with_mapped_doorbells_no_io_error,
        outlive::half_an_hour_of_kills_costs_a_guest_no_io_error,
        refusals::private_guest_ram_is_refused_with_the_option_to_add,
        refusals::a_guest_too_large_for_the_window_is_told_what_fits,
        refusals::memory_that_may_not_be_locked_is_refused,
        growth::disks_grow_under_a_guest_whose_processes_are_killed,
        growth::disks_of_another_host_grow_under_a_guest,
        viommu::pages_are_mapped_for_each_io_and_for_no_longer,
        viommu::one_that_hides_its_mappings_is_named,
        virtio::a_virtio_blk_disk_is_used_reset_and_removed,
        network_device::a_network_device_carries_data_is_reset_and_removed,
        network_device::processes_that_are_killed_cost_a_guest_no_connection,
        peer_to_peer::disks_transfer_data_through_the_memory_of_one,
    ]
    .map(|(name, test)| {
        let heavy = HEAVY.iter().find(|(it, _)| *it == name);
        let weight = match heavy.is_some() || name.starts_with("crowd::") {
            true => Weight::Hosts,
            false if name.starts_with("outlive::") => Weight::of_kills(),
            false => Weight::Guests,
        };
        // libtest-mimic prints no reason for an ignored trial, so the flag is set only
        // where the trial runs.
        trial(name, weight, move || match heavy {
            Some((_, why)) if !with_heavy => Ok(Completion::ignored_with(*why)),
            _ => run(test),
        })
        .with_ignored_flag(heavy.is_some() && with_heavy)
    });
    libtest_mimic::run(&args, trials.into()).exit();
}

fn run(test: Test) -> Result<Completion, Failed> {
    let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
    told(|| test(&cluster), || cluster.story())
}

/// The result of a test that has run.
fn passed() -> anyhow::Result<Completion> {
    Ok(Completion::Completed)
}
