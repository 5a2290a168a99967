//! Runs a binary of the host and turns its failure into an error with the reason.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs a command to its end and returns its output. `provided_by` names the package to
/// install if it is missing.
pub(crate) fn output(command: &mut Command, provided_by: &str) -> Result<String> {
    let program = command.get_program().display().to_string();
    let output = match command.stdin(Stdio::null()).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("{program} is not installed; {provided_by}")
        }
        result => result.with_context(|| format!("running {program}"))?,
    };
    if !output.status.success() {
        // Some (apt) report errors on one stream, some on the other.
        let said = [output.stderr, output.stdout].concat();
        let said = String::from_utf8_lossy(&said);
        bail!("{program}: {}\n{}", output.status, said.trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
