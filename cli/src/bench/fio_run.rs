//! Runs fio on a disk of this machine.

use std::{
    fs, io,
    process::{Command, Output},
};

use anyhow::{Context, Result, bail, ensure};
use farside_bench::{
    Measurement,
    fio::{self, Hooks, Sample, Timing},
    job::Job,
};

use super::disk::Disk;

/// fio's version, or the command that installs it.
pub(super) fn version() -> Result<String> {
    let output = call(Command::new("fio").arg("--version"))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Runs a job once.
pub(super) fn measure(job: &Job, disk: &Disk, timing: Timing) -> Result<Measurement> {
    let directory = tempfile::tempdir().context("creating a directory for fio")?;
    let sample = fio::sample_command(&disk.name);
    let hooks = Hooks {
        begin: sample.clone(),
        end: sample,
    };
    let arguments = fio::arguments(job, &disk.name, timing, &hooks);
    let output = call(
        Command::new("fio")
            .args(arguments)
            .current_dir(directory.path()),
    )?;
    // On failure its output is more informative than its status.
    let outcome = fio::read_output(&String::from_utf8_lossy(&output.stdout));
    ensure!(
        output.status.success() || outcome.is_err(),
        "fio failed ({}): {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let outcome = outcome.with_context(|| {
        format!(
            "fio ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )
    })?;
    let sample = |when: &str| -> Result<Sample> {
        let path = directory.path().join(format!("job.{when}.txt"));
        let text = fs::read_to_string(&path);
        let text = text.with_context(|| format!("reading what fio ran {when} its job"))?;
        Ok(Sample::parse(&text)?)
    };
    let work = sample("postrun")?.since(&sample("prerun")?);
    Ok(Measurement::new(job, &outcome, &work, None))
}

fn call(command: &mut Command) -> Result<Output> {
    match command.output() {
        Ok(output) => Ok(output),
        Err(error) if error.kind() == io::ErrorKind::NotFound => bail!("{}", fio::INSTALL),
        Err(error) => Err(error).context("running fio"),
    }
}
