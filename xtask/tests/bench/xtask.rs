//! `cargo xtask bench`, and the use of its results.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use farside_bench::{Results, output};
use farside_tests::farside_program;

use crate::{all_positive, begins, job_names, section_is_full};

pub(crate) const NAME: &str = "one_command_measures_all_and_reports_it";

pub(crate) fn run() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let out = directory.path().join("out");
    let json = directory.path().join("copy.json");
    let bench = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["bench", "--quick", "--repeats", "1", "--program"])
        .arg(farside_program()?)
        .arg("--out")
        .arg(&out)
        .arg("--json")
        .arg(&json)
        .output()
        .context("running xtask bench")?;
    let stdout = String::from_utf8_lossy(&bench.stdout);
    ensure!(
        bench.status.success(),
        "xtask bench: {}\n{stdout}\n{}",
        bench.status,
        String::from_utf8_lossy(&bench.stderr)
    );

    let results = output::read(&out.join("results.json"))?;
    ensure!(output::read(&json)? == results, "two files, two results");
    let jobs = job_names(true);
    all_positive(&results, &jobs, 1, true)?;
    section_is_full(&results, "sweep", 4, 1)?;
    let ways = match results.environment.accel.as_deref() {
        Some("kvm") => 1,
        _ => 3,
    };
    section_is_full(&results, "ping-pong", ways, 1)?;
    if cpus()? > 1 {
        section_is_full(&results, "neighbour", 8, 1)?;
    } else {
        let left_out = results.sections.iter().all(|it| it.name != "neighbour");
        ensure!(left_out, "the neighbour's section on one CPU");
        // For `cargo xtask test`.
        println!("skipped: {NAME}: the neighbour's section needs two CPUs");
    }
    section_is_full(&results, "pauses", 14, 1)?;
    knows_where(&results)?;
    for job in jobs {
        ensure!(stdout.contains(job), "{job} is not in the table:\n{stdout}");
    }
    is_drawn(&out, &results)?;
    compares(&out, directory.path())
}

/// The number of CPUs available to this test, and so to the bench.
fn cpus() -> Result<u32> {
    let set = rustix::thread::sched_getaffinity(None).context("reading the CPU affinity")?;
    Ok(set.count())
}

/// Machine, kernels, QEMU and sources are recorded.
fn knows_where(results: &Results) -> Result<()> {
    let environment = &results.environment;
    let unknown: Vec<_> = environment
        .facts()
        .into_iter()
        .filter(|(_, fact)| fact.contains("unknown") || fact.is_empty())
        .collect();
    ensure!(unknown.is_empty(), "{unknown:?}");
    ensure!(
        environment.memory > 0 && environment.cores > 0 && !environment.farside.is_empty(),
        "{environment:?}"
    );
    Ok(())
}

/// The report contains every plot, and every plot exists as SVG and as PNG.
fn is_drawn(out: &Path, results: &Results) -> Result<()> {
    let report = fs::read_to_string(out.join("report.html"))?;
    ensure!(report.starts_with("<!DOCTYPE html>"), "{report}");
    let mut plots = 0;
    for entry in fs::read_dir(out)? {
        let path = entry?.path();
        if path.extension().is_some_and(|suffix| suffix == "svg") {
            begins(&path, b"<svg")?;
            begins(&path.with_extension("png"), b"\x89PNG")?;
            plots += 1;
        }
    }
    // At least one of fio's jobs, and one of each section.
    ensure!(plots > results.sections.len(), "{plots} plots");
    let drawn = report.matches("<svg").count();
    ensure!(drawn == plots, "{drawn} of {plots} plots are in the report");
    for section in &results.sections {
        ensure!(report.contains(&section.title), "{} is not", section.title);
    }
    Ok(())
}

/// The product makes the same report from the file, and detects changes in it.
fn compares(out: &Path, directory: &Path) -> Result<()> {
    let farside = |args: &[&Path]| -> Result<String> {
        let output = Command::new(farside_program()?)
            .arg("bench")
            .args(args)
            .output()
            .context("running farside bench")?;
        ensure!(
            output.status.success(),
            "farside bench {args:?}: {output:?}"
        );
        Ok(String::from_utf8(output.stdout)?)
    };
    let before = out.join("results.json");
    let again = directory.join("again");
    farside(&["report".as_ref(), &before, "--out".as_ref(), &again])?;
    ensure!(
        fs::read(again.join("report.html"))? == fs::read(out.join("report.html"))?,
        "the second report of the same results is another"
    );

    // Three repeats, and then a borrowed disk with half the speed in one job.
    let mut results = output::read(&before)?;
    for job in &mut results.jobs {
        job.pairs = [job.pairs[0]; 3].to_vec();
    }
    output::write_json(&results, &before)?;
    for pair in &mut results.jobs[0].pairs {
        pair.borrowed.iops /= 2.0;
    }
    let after = directory.join("after.json");
    output::write_json(&results, &after)?;
    let same = farside(&["--compare".as_ref(), &before, &before])?;
    ensure!(same.contains(" 0 worse, 0 better"), "{same}");
    let worse = farside(&["--compare".as_ref(), &before, &after])?;
    ensure!(
        worse.contains(&results.jobs[0].job) && !worse.contains(" 0 worse"),
        "{worse}"
    );
    Ok(())
}
