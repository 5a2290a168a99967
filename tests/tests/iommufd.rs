//! Physical NVMe devices lent through VFIO's newer interface, iommufd, in a VM whose kernel
//! has it by modules that the test bed builds: Debian's has type1 only.

use anyhow::{Result, ensure};
use farside_testbed::{IommufdModules, PackagesUnavailable, Progress};
use farside_tests::{
    Cluster, Weight,
    hosts::{self, Programs, Set},
    testbed, trial,
};
use libtest_mimic::{Arguments, Completion, Failed};

fn main() {
    env_logger::init();
    let mut args = Arguments::from_args();
    // Both use the whole machine.
    args.test_threads.get_or_insert(1);
    let tests: [(&str, Scene); 2] = [
        (
            "a_scripted_guest_uses_a_drive_that_is_lent_by_iommufd",
            a_scripted_guest_uses_a_drive_that_is_lent_by_iommufd,
        ),
        (
            "devices_of_a_guest_reach_the_memory_of_each_other_by_dma_bufs",
            devices_of_a_guest_reach_the_memory_of_each_other_by_dma_bufs,
        ),
    ];
    let trials = tests.map(|(name, scene)| trial(name, Weight::Hosts, move || run(scene)));
    libtest_mimic::run(&args, trials.into()).exit();
}

type Scene = fn(&Set<'_>, &IommufdModules) -> Result<()>;

fn run(scene: Scene) -> Result<Completion, Failed> {
    let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
    test(scene, &cluster).map_err(|error| format!("{error:#}\n{}", cluster.story()).into())
}

fn test(scene: Scene, cluster: &Cluster) -> Result<Completion> {
    let testbed = testbed()?;
    let modules = match testbed.iommufd_modules(&Progress::auto()) {
        Err(error) if error.is::<PackagesUnavailable>() => {
            let why = format!("{error:#}").replace('\n', "; ");
            return Ok(Completion::ignored_with(why));
        }
        modules => modules?,
    };
    let set = Set {
        testbed,
        programs: &Programs::build()?,
        cluster,
        tell: &|what| log::info!("{what}"),
    };
    scene(&set, &modules)?;
    Ok(Completion::Completed)
}

fn a_scripted_guest_uses_a_drive_that_is_lent_by_iommufd(
    set: &Set<'_>,
    modules: &IommufdModules,
) -> Result<()> {
    let facts = hosts::iommufd(set, modules)?;
    judge(facts.checks(), &facts)
}

fn devices_of_a_guest_reach_the_memory_of_each_other_by_dma_bufs(
    set: &Set<'_>,
    modules: &IommufdModules,
) -> Result<()> {
    let facts = hosts::peers(set, Some(modules))?;
    judge(facts.checks(), &facts)
}

fn judge(checks: Vec<(String, bool)>, facts: &impl std::fmt::Debug) -> Result<()> {
    let broken: Vec<String> = checks
        .into_iter()
        .filter_map(|(what, holds)| (!holds).then_some(what))
        .collect();
    ensure!(
        broken.is_empty(),
        "not so: {}; seen: {facts:#?}",
        broken.join("; ")
    );
    log::info!("{facts:#?}");
    Ok(())
}
