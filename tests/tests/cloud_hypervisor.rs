//! A borrowed disk in a guest of cloud-hypervisor, in a VM that plays a host and has KVM. Debian has no package of
//! cloud-hypervisor: the test runs where `FARSIDE_CLOUD_HYPERVISOR` names its binary.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use farside_tests::{
    Cluster, Weight,
    hosts::{self, Programs, Set},
    testbed, trial,
};
use libtest_mimic::{Arguments, Completion, Failed};

const PROGRAM: &str = "FARSIDE_CLOUD_HYPERVISOR";

fn main() {
    env_logger::init();
    let name = "a_guest_of_cloud_hypervisor_outlives_farsides_processes";
    let trial = trial(name, Weight::Hosts, run);
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
}

fn run() -> Result<Completion, Failed> {
    let Some(program) = std::env::var_os(PROGRAM) else {
        return Ok(Completion::ignored_with(format!(
            "{PROGRAM} does not name the binary of cloud-hypervisor"
        )));
    };
    let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
    test(&cluster, program.into()).map_err(|error| format!("{error:#}\n{}", cluster.story()).into())
}

fn test(cluster: &Cluster, program: PathBuf) -> Result<Completion> {
    let set = Set {
        testbed: testbed()?,
        programs: &Programs::build()?,
        cluster,
        tell: &|what| log::info!("{what}"),
    };
    let facts = hosts::cloud_hypervisor(&set, &program)?;
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
