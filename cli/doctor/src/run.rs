//! Runs external commands with a deadline.

use std::{
    io,
    path::Path,
    process::{Command, ExitStatus},
    time::Duration,
};

use farside_daemon::{OutputError, output_within};

use crate::Host;

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum RunError {
    /// It cannot be run.
    Run(io::Error),
    /// It did not answer in time.
    Late(Duration),
    /// It exited with an error and a message.
    Failed { status: ExitStatus, said: String },
}

impl std::fmt::Display for RunError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Run(error) => write!(f, "it cannot be run: {error}"),
            Self::Late(limit) => write!(f, "it did not answer within {limit:?}"),
            Self::Failed { status, said } => write!(f, "it failed ({status}): {said}"),
        }
    }
}

impl Host {
    /// Runs a command, and returns its output.
    pub(crate) fn ask(&self, program: &Path, args: &[&str]) -> Result<String, RunError> {
        let mut command = Command::new(program);
        // The output is parsed.
        command.args(args).env("LC_ALL", "C");
        if let Some(path) = &self.path {
            command.env("PATH", path);
        }
        let output = output_within(&mut command, self.patience).map_err(|error| match error {
            OutputError::Run(error) => RunError::Run(error),
            OutputError::Late(limit) => RunError::Late(limit),
        })?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(RunError::Failed {
                status: output.status,
                said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, patience: Duration) -> Result<String, RunError> {
        let host = Host::this().with_patience(patience);
        host.ask(Path::new("/bin/sh"), &["-c", script])
    }

    #[test]
    fn an_answer_a_complaint_and_silence() {
        let long = Duration::from_secs(60);
        assert_eq!(sh("echo yes", long).unwrap(), "yes\n");
        let failed = sh("echo no >&2; exit 3", long).unwrap_err().to_string();
        assert!(
            failed.contains("exit status: 3") && failed.ends_with(": no"),
            "{failed}"
        );
        let late = sh("sleep 1000", Duration::from_millis(50)).unwrap_err();
        assert!(matches!(late, RunError::Late(_)), "{late}");
        let missing = Host::this().ask(Path::new("/no/such"), &[]).unwrap_err();
        assert!(matches!(missing, RunError::Run(_)), "{missing}");
    }
}
