//! Invalid input fails with a clear error, and has no effect.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use anyhow::{Context, Result, ensure};
use farside_tests::farside_program;

/// Runs a command, which must fail with a message that contains all of `says`.
fn refused(command: &mut Command, says: &[&str]) -> Result<()> {
    let Output { status, stderr, .. } = command.output().context("running a program")?;
    let stderr = String::from_utf8_lossy(&stderr);
    ensure!(!status.success(), "{command:?} succeeded: {stderr}");
    ensure!(
        status.code().is_some() && !stderr.contains("panicked"),
        "{command:?}: {status}: {stderr}"
    );
    for word in says {
        ensure!(
            stderr.contains(word),
            "{command:?}: no {word:?} in {stderr}"
        );
    }
    Ok(())
}

fn compare(before: &Path, after: &Path) -> Result<Command> {
    let mut command = Command::new(farside_program()?);
    command.args(["bench", "--compare"]).args([before, after]);
    Ok(command)
}

pub(crate) fn files() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = |name: &str, text: &str| -> Result<_> {
        let path = directory.path().join(name);
        fs::write(&path, text)?;
        Ok(path)
    };
    let missing = directory.path().join("missing.json");
    refused(&mut compare(&missing, &missing)?, &["missing.json"])?;
    let text = file("text.json", "fio said no")?;
    refused(&mut compare(&text, &text)?, &["text.json"])?;
    let other = file("other.json", r#"{"format": 77}"#)?;
    refused(&mut compare(&other, &other)?, &["other.json", "77"])?;
    let cut = file("cut.json", r#"{"format": 1, "jobs": ["#)?;
    refused(&mut compare(&cut, &cut)?, &["cut.json"])?;
    let mut report = Command::new(farside_program()?);
    report.args(["bench", "report"]).arg(&text);
    let out = directory.path().join("out");
    refused(report.arg("--out").arg(&out), &["text.json"])?;
    ensure!(!out.exists(), "a report of nothing was begun");
    Ok(())
}

pub(crate) fn no_fio() -> Result<()> {
    let nothing = tempfile::tempdir()?;
    let mut run = Command::new(farside_program()?);
    run.args(["bench", "run", "--borrowed", "/dev/null"])
        .args(["--beside", "/dev/zero", "--write"])
        .env("PATH", nothing.path());
    refused(&mut run, &["fio is not installed", "apt install fio"])
}

pub(crate) fn arguments() -> Result<()> {
    let xtask = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.arg("bench");
        command
    };
    refused(
        xtask().args(["--program", "/no/farside"]),
        &["/no/farside", "--program"],
    )?;
    refused(xtask().args(["--job", "fast"]), &["fast", "seqread-128k"])?;
    refused(xtask().args(["--only", "nothing"]), &["ping-pong"])?;
    refused(xtask().args(["--repeats", "0"]), &["--repeats"])?;
    refused(
        Command::new(farside_program()?).args(["bench", "run", "--borrowed", "/dev/null"]),
        &["--beside"],
    )
}
