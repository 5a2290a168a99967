//! Refusals caused by physical devices, IOMMUs and NTBs, with the real binary on a real
//! kernel: each command fails with a remedy in its message, before any VM starts, and
//! leaves the host unchanged. Also, on the same hosts, behaviour that only hardware shows.
//!
//! `RUST_LOG=info` shows each message.

mod borrow;
mod forwarded;
mod functions;
mod host;
mod killed;
mod line;
mod ntb;
mod rom;
mod scripted;
mod stage;
mod unfit;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Result, anyhow};
use farside_tests::{Weight, trial};
use libtest_mimic::{Arguments, Completion, Failed};

use host::Host;
use stage::Stage;

/// A test with its own hosts, and a test on the shared host.
type Alone = fn() -> Result<()>;
type Shared = fn(&Host) -> Result<()>;

/// Test functions; trials have their names.
macro_rules! tests {
    ($($module:ident :: $name:ident),* $(,)?) => {
        [$((concat!(stringify!($module), "::", stringify!($name)), $module::$name as _)),*]
    };
}

fn main() {
    env_logger::init();
    let mut args = Arguments::from_args();
    // Most share one host, which the first of them boots.
    args.test_threads = Some(1);
    let stage: Arc<Mutex<Option<Stage>>> = Arc::default();
    let alone: [(&str, Alone); 2] = tests![
        unfit::a_host_without_an_iommu_says_how_to_turn_one_on,
        unfit::an_iommu_that_the_kernel_leaves_off_is_told_from_none,
    ];
    let shared: [(&str, Shared); 29] = tests![
        functions::what_cannot_be_lent_stays_with_its_driver,
        functions::a_group_that_the_host_uses_names_its_members,
        functions::what_is_in_use_is_taken_by_force_alone,
        functions::vfio_pci_that_is_missing_says_how_to_get_it,
        borrow::guest_ram_that_a_device_cannot_reach_is_told_before_the_vm_starts,
        borrow::the_memlock_limit_is_looked_at_before_the_vm_starts,
        borrow::a_lender_without_privileges_lends_what_root_has_bound,
        borrow::a_device_that_another_vm_has_names_that_vm,
        borrow::a_vmm_that_keeps_a_device_open_keeps_it_from_others,
        borrow::what_cannot_be_reset_is_lent_to_one_vm,
        borrow::what_cannot_be_reset_alone_is_reset_with_its_bus,
        borrow::a_group_that_is_in_use_keeps_no_other_device_from_being_lent,
        line::interrupt_status_is_that_of_the_function,
        forwarded::device_control_is_the_functions_in_the_borrowers_bits,
        forwarded::link_status_and_device_specific_registers_are_the_functions,
        rom::a_guest_sees_the_rom_of_its_function_or_the_configured_one,
        rom::a_file_that_is_no_rom_is_refused,
        ntb::what_no_ntb_can_do_is_told_before_the_vm_starts,
        ntb::ports_that_do_not_fit_together_are_told_so,
        killed::a_killed_lender_does_not_stop_its_function,
        killed::a_worker_that_is_killed_does_not_stop_its_function,
        killed::a_backend_that_is_killed_does_not_stop_its_function,
        killed::a_function_goes_on_without_lender_and_worker,
        killed::a_kept_function_is_stopped_when_its_backend_goes,
        killed::a_kept_function_is_stopped_by_a_revocation,
        killed::a_kept_function_is_stopped_when_its_lender_stops,
        killed::a_revocation_stops_a_function_whose_worker_hangs,
        killed::a_killed_backend_gives_its_device_back,
        killed::a_killed_vmm_gives_its_device_back,
    ];
    let alone = alone
        .into_iter()
        .map(|(name, test)| trial(name, Weight::Hosts, move || run(test)));
    let shared = shared.into_iter().map(|(name, test)| {
        let stage = Arc::clone(&stage);
        trial(name, Weight::Hosts, move || run(|| on(&stage, test)))
    });
    let conclusion = libtest_mimic::run(&args, alone.chain(shared).collect());
    if let Some(stage) = lock(&stage).take()
        && let Err(error) = stage.end()
    {
        eprintln!("the host did not end well: {error:#}");
        std::process::exit(101);
    }
    conclusion.exit();
}

/// Runs a test on a shared host.
fn on(stage: &Mutex<Option<Stage>>, test: fn(&Host) -> Result<()>) -> Result<()> {
    let mut stage = lock(stage);
    if stage.is_none() {
        *stage = Some(Stage::new()?);
    }
    let host = &stage.as_ref().expect("just made").host;
    let tested = test(host).and(host.verdict());
    tested.map_err(|error| {
        let story = host.story();
        let cleaned = host.clean_up().err();
        anyhow!(
            "{error:#}\n{story}\n{}",
            cleaned.map_or(String::new(), |error| format!("{error:#}"))
        )
    })
}

fn lock(stage: &Mutex<Option<Stage>>) -> std::sync::MutexGuard<'_, Option<Stage>> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run(test: impl FnOnce() -> Result<()>) -> Result<Completion, Failed> {
    match catch_unwind(AssertUnwindSafe(test)) {
        Ok(Ok(())) => Ok(Completion::Completed),
        Ok(Err(error)) => Err(format!("{error:#}").into()),
        Err(_) => Err("a panic".into()),
    }
}
