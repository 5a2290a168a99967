//! Physical devices, lent in VMs that play hosts; the scenes are those of the tests
//! ([`farside_tests::hosts`]), and this reports on them.

mod report;

use std::{fs, process::ExitCode};

use anyhow::{Context, Result};
use farside_testbed::{Progress, Testbed};
use farside_tests::{
    Cluster as Directory,
    hosts::{self, Programs, Set},
};

use crate::{
    args::{Cluster, Only},
    interrupt,
};
use report::Report;

pub(crate) fn run(args: &Cluster) -> Result<ExitCode> {
    let progress = Progress::auto();
    let testbed = Testbed::prepare(&progress)?;
    let task = progress.spinner("Building the product");
    let programs = Programs::build()?;
    task.done();

    interrupt::watch_all()?;

    let wanted = |what| args.only.is_empty() || args.only.contains(&what);
    let mut report = Report::default();
    if wanted(Only::SameHost) {
        report.same_host = Some(scene(&testbed, &programs, "One host", hosts::same_host)?);
    }
    if wanted(Only::TwoHosts) {
        report.two_hosts = Some(scene(&testbed, &programs, "Two hosts", hosts::two_hosts)?);
    }
    if wanted(Only::Network) {
        report.network = Some(scene(&testbed, &programs, "Network", hosts::network)?);
    }
    if wanted(Only::Vfs) {
        let name = "Virtual functions";
        report.vfs = Some(scene(&testbed, &programs, name, hosts::virtual_functions)?);
    }
    print!("{}", report.text());
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report.document())?;
        fs::write(path, json + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(match report.checks().iter().all(|check| check.holds) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Runs one scene in a separate directory.
fn scene<T>(
    testbed: &Testbed,
    programs: &Programs,
    name: &'static str,
    play: impl FnOnce(&Set<'_>) -> Result<T>,
) -> Result<T> {
    interrupt::check()?;
    let directory = Directory::new()?;
    let progress = Progress::auto();
    let task = progress.spinner(name);
    let facts = play(&Set {
        testbed,
        programs,
        cluster: &directory,
        tell: &|what| task.detail(what),
    })
    .map_err(|error| error.context(format!("{name}{}", directory.story())))?;
    task.done();
    Ok(facts)
}
