//! The bench commands as users type them, with real guests and real fio: with short runs,
//! whose figures are meaningless, but which cover everything.

mod in_a_guest;
mod network;
mod wrong;
mod xtask;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use farside_bench::{METRICS, Results, Spread, job::JOBS};
use farside_tests::{Weight, trial};
use libtest_mimic::{Arguments, Completion};

fn main() {
    env_logger::init();
    let mut args = Arguments::from_args();
    // Emulated guests are expensive.
    args.test_threads.get_or_insert(2);
    let test = |name: &str, run: fn() -> Result<()>| {
        trial(name, Weight::Guests, move || {
            let run = run().map(|()| Completion::Completed);
            run.map_err(|error| format!("{error:#}").into())
        })
    };
    let trials = vec![
        test("what_is_missing_or_no_result_is_named", wrong::files),
        test("without_fio_it_says_how_to_get_it", wrong::no_fio),
        test("what_cannot_be_measured_is_refused", wrong::arguments),
        test("a_user_measures_two_drives_of_a_guest", in_a_guest::run),
        test(network::NAME, network::run),
        test(xtask::NAME, xtask::run),
    ];
    libtest_mimic::run(&args, trials).exit();
}

/// Jobs with these names exist, each `repeats` times, and no figure is missing or 0, except
/// those that only a guest's host can measure.
fn all_positive(results: &Results, jobs: &[&str], repeats: usize, host_cpu: bool) -> Result<()> {
    let found: Vec<&str> = results.jobs.iter().map(|job| &*job.job).collect();
    ensure!(found == jobs, "measured {found:?}, not {jobs:?}");
    for job in &results.jobs {
        for metric in &METRICS {
            let figures = [job.borrowed(metric), job.beside(metric)];
            let expected = match metric.name {
                "host CPU" if !host_cpu => 0,
                _ => repeats,
            };
            let fine = figures.iter().all(|of_one| {
                of_one.len() == expected && of_one.iter().all(|f| f.is_finite() && *f > 0.0)
            });
            ensure!(fine, "{} {}: {figures:?}", job.job, metric.name);
        }
    }
    Ok(())
}

/// Every series of a section has `repeats` figures, all above 0.
fn section_is_full(results: &Results, name: &str, series: usize, repeats: usize) -> Result<()> {
    let section = results.sections.iter().find(|section| section.name == name);
    let section = section.with_context(|| format!("no section {name}"))?;
    ensure!(section.series.len() == series, "{section:?}");
    for series in &section.series {
        let figures = series.figures();
        ensure!(!figures.is_empty(), "{} has no figures", series.name);
        for figure in figures {
            let least = Spread::of(figure.repeats.iter().copied()).map(|spread| spread.min);
            ensure!(
                figure.repeats.len() == repeats && least > Some(0.0),
                "{name}, {}: {figure:?}",
                series.name
            );
        }
    }
    Ok(())
}

/// Names of all jobs, or of the read-only ones.
fn job_names(writes: bool) -> Vec<&'static str> {
    let jobs = JOBS.iter().filter(|job| writes || !job.writes());
    jobs.map(|job| &*job.name).collect()
}

/// Checks that a file starts with its type's magic bytes.
fn begins(path: &Path, with: &[u8]) -> Result<()> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    ensure!(
        bytes.starts_with(with),
        "{} begins with {:?}",
        path.display(),
        String::from_utf8_lossy(&bytes[..bytes.len().min(20)])
    );
    Ok(())
}
