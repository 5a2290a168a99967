//! Runs a program of the host and turns its failure into an error that says why.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs a command to its end and returns what it printed. `provided_by` is what
/// to install when it is not there.
pub(crate) fn output(command: &mut Command, provided_by: &str) -> Result<String> {
    let program = command.get_program().display().to_string();
    let output = match command.stdin(Stdio::null()).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("{program} is not installed; {provided_by}")
        }
        result => result.with_context(|| format!("running {program}"))?,
    };
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("{program}: {}\n{}", output.status, stderr.trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
