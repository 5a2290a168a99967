//! A physical NVMe device lent through VFIO's newer interface, iommufd, in a VM whose kernel
//! has it by modules that the test bed builds: Debian's has type1 only.

use anyhow::{Result, ensure};
use farside_testbed::{PackagesUnavailable, Progress};
use farside_tests::{
    Cluster, Weight,
    hosts::{self, Programs, Set},
    testbed, trial,
};
use libtest_mimic::{Arguments, Completion, Failed};

fn main() {
    env_logger::init();
    let name = "a_scripted_guest_uses_a_drive_that_is_lent_by_iommufd";
    let trial = trial(name, Weight::Hosts, run);
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
}

fn run() -> Result<Completion, Failed> {
    let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
    test(&cluster).map_err(|error| format!("{error:#}\n{}", cluster.story()).into())
}

fn test(cluster: &Cluster) -> Result<Completion> {
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
    let facts = hosts::iommufd(&set, &modules)?;
    let broken: Vec<String> = facts
        .checks()
        .into_iter()
        .filter_map(|(what, holds)| (!holds).then_some(what))
        .collect();
    ensure!(
        broken.is_empty(),
        "not so: {}; seen: {facts:#?}",
        broken.join("; ")
    );
    log::info!("{facts:#?}");
    Ok(Completion::Completed)
}
