//! Physical devices lent in VMs that play hosts, with Linux's VFIO and an emulated VT-d,
//! and used by nested guests. The checks use the kernels' own output: IOMMU trace events,
//! interrupt counts, DMA faults.

use anyhow::ensure;
use farside_tests::{
    Cluster, Weight,
    hosts::{self, Programs, Set},
    testbed, told, trial,
};
use libtest_mimic::{Arguments, Completion, Failed};

type Test = fn(&Set<'_>) -> anyhow::Result<()>;

fn main() {
    env_logger::init();
    let mut args = Arguments::from_args();
    // Each runs two or three VMs, some of them nested, and uses the whole machine.
    args.test_threads.get_or_insert(1);
    let tests: [(&str, Test); 13] = [
        (
            "a_guest_uses_a_physical_drive_of_its_own_host",
            a_guest_uses_a_physical_drive_of_its_own_host,
        ),
        (
            "a_guest_uses_a_physical_drive_of_another_host_through_an_ntb",
            a_guest_uses_a_physical_drive_of_another_host_through_an_ntb,
        ),
        (
            "a_guest_uses_an_image_of_another_host_over_the_network",
            a_guest_uses_an_image_of_another_host_over_the_network,
        ),
        (
            "guests_of_two_hosts_share_an_image_of_a_third_and_fence_each_other",
            guests_of_two_hosts_share_an_image_of_a_third_and_fence_each_other,
        ),
        (
            "two_devices_of_a_guest_share_windows_through_an_ntb",
            two_devices_of_a_guest_share_windows_through_an_ntb,
        ),
        (
            "a_vm_with_a_physical_drive_moves_through_an_ntb",
            a_vm_with_a_physical_drive_moves_through_an_ntb,
        ),
        (
            "a_physical_drive_is_attached_to_a_running_guest",
            a_physical_drive_is_attached_to_a_running_guest,
        ),
        (
            "a_physical_drive_of_another_host_is_attached_to_a_running_guest",
            a_physical_drive_of_another_host_is_attached_to_a_running_guest,
        ),
        (
            "a_guest_uses_two_functions_of_one_iommu_group",
            a_guest_uses_two_functions_of_one_iommu_group,
        ),
        (
            "devices_of_a_guest_reach_the_memory_of_each_other",
            devices_of_a_guest_reach_the_memory_of_each_other,
        ),
        (
            "devices_of_two_lenders_reach_the_memory_of_each_other_through_an_ntb",
            devices_of_two_lenders_reach_the_memory_of_each_other_through_an_ntb,
        ),
        (
            "two_guests_use_a_virtual_function_each_of_one_adapter",
            two_guests_use_a_virtual_function_each_of_one_adapter,
        ),
        (
            "a_guest_uses_virtual_functions_of_an_nvme_controller",
            a_guest_uses_virtual_functions_of_an_nvme_controller,
        ),
    ];
    let trials = tests.map(|(name, test)| {
        trial(name, Weight::Hosts, move || {
            run(test).map(|()| Completion::Completed)
        })
    });
    libtest_mimic::run(&args, trials.into()).exit();
}

fn run(test: Test) -> Result<(), Failed> {
    let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
    let run = || {
        test(&Set {
            testbed: testbed()?,
            programs: &Programs::build()?,
            cluster: &cluster,
            tell: &|what| log::info!("{what}"),
        })
    };
    told(run, || cluster.story())
}

fn a_guest_uses_a_physical_drive_of_its_own_host(set: &Set<'_>) -> anyhow::Result<()> {
    let facts = hosts::same_host(set)?;
    judge(facts.checks(), &facts)
}

fn a_guest_uses_a_physical_drive_of_another_host_through_an_ntb(
    set: &Set<'_>,
) -> anyhow::Result<()> {
    let facts = hosts::two_hosts(set)?;
    judge(facts.checks(), &facts)
}

fn a_guest_uses_an_image_of_another_host_over_the_network(set: &Set<'_>) -> anyhow::Result<()> {
    let facts = hosts::network(set)?;
    judge(facts.checks(), &facts)
}

fn guests_of_two_hosts_share_an_image_of_a_third_and_fence_each_other(
    set: &Set<'_>,
) -> anyhow::Result<()> {
    hosts::fencing(set)
}

fn two_devices_of_a_guest_share_windows_through_an_ntb(set: &Set<'_>) -> anyhow::Result<()> {
    let facts = hosts::shared_windows(set)?;
    judge(facts.checks(), &facts)
}

fn a_vm_with_a_physical_drive_moves_through_an_ntb(set: &Set<'_>) -> anyhow::Result<()> {
    let facts = hosts::moves_through_ntb(set)?;
    judge(facts.checks(), &facts)
}

fn a_physical_drive_is_attached_to_a_running_guest(set: &Set<'_>) -> anyhow::Result<()> {
    let facts = hosts::plugged(set)?;
    judge(facts.checks(), &facts)
}

fn a_physical_drive_of_another_host_is_attached_to_a_running_guest(
    set: &Set<'_>,
) -> anyhow::Result<()> {
    let facts = hosts::plugged_through_ntb(set)?;
    judge(facts.checks(), &facts)
}

fn a_guest_uses_two_functions_of_one_iommu_group(set: &Set<'_>) -> anyhow::Result<()> {
    let facts = hosts::grouped(set)?;
    judge(facts.checks(), &facts)
}

fn devices_of_a_guest_reach_the_memory_of_each_other(set: &Set<'_>) -> anyhow::Result<()> {
    let facts = hosts::peers(set, None)?;
    judge(facts.checks(), &facts)
}

fn devices_of_two_lenders_reach_the_memory_of_each_other_through_an_ntb(
    set: &Set<'_>,
) -> anyhow::Result<()> {
    let facts = hosts::peers_through_ntb(set)?;
    judge(facts.checks(), &facts)
}

fn two_guests_use_a_virtual_function_each_of_one_adapter(set: &Set<'_>) -> anyhow::Result<()> {
    let facts = hosts::virtual_functions(set)?;
    judge(facts.checks(), &facts)
}

fn a_guest_uses_virtual_functions_of_an_nvme_controller(set: &Set<'_>) -> anyhow::Result<()> {
    hosts::nvme_virtual_functions(set)
}

fn judge(checks: Vec<(String, bool)>, facts: &impl std::fmt::Debug) -> anyhow::Result<()> {
    let broken: Vec<String> = checks
        .into_iter()
        .filter_map(|(what, holds)| (!holds).then_some(what))
        .collect();
    ensure!(
        broken.is_empty(),
        "not so: {}; seen: {facts:#?}",
        broken.join("; ")
    );
    Ok(())
}
