//! Background processes that do not outlive this one.

use std::{
    fs::File,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use farside_testbed::Process;
use rustix::process::Signal;

use crate::interrupt::{self, Registration};

/// How many lines of a log an error quotes.
const QUOTE: usize = 20;

/// Time for the kernel to end a killed process.
const KILL: Duration = Duration::from_secs(10);

/// A background process, with its output in a file. Killed on drop.
#[derive(Debug)]
pub(crate) struct Child {
    name: String,
    process: Process,
    log: PathBuf,
    _registration: Registration,
}

impl Child {
    /// Starts a command.
    pub(crate) fn spawn(name: &str, mut command: Command, log: &Path) -> Result<Self> {
        interrupt::check()?;
        let file = File::create(log).with_context(|| format!("creating {}", log.display()))?;
        let out = file.try_clone().context("duplicating a log file")?;
        command.stdin(Stdio::null()).stdout(out).stderr(file);
        // In a separate process group, so that a terminal's Ctrl-C does not reach it: this
        // process ends all of them in order, whatever the signal's source.
        command.process_group(0);
        let process = Process::spawn(command).with_context(|| name.to_owned())?;
        Ok(Self {
            name: name.to_owned(),
            _registration: Registration::new(process.id())?,
            process,
            log: log.to_owned(),
        })
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Fails, with the end of its log, if it has ended.
    pub(crate) fn check_running(&mut self) -> Result<()> {
        match self.process.wait(Instant::now())? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}){}", self.name, self.last_words()),
        }
    }

    /// Stops it by SIGTERM; it must exit successfully in time.
    pub(crate) fn stop(mut self, timeout: Duration) -> Result<()> {
        self.check_running()?;
        self.process
            .signal(Signal::TERM)
            .with_context(|| format!("stopping {}", self.name))?;
        let Some(status) = self.process.wait(Instant::now() + timeout)? else {
            bail!(
                "{} did not end within {timeout:?} of SIGTERM{}",
                self.name,
                self.last_words()
            );
        };
        ensure!(
            status.success(),
            "{} ended badly at SIGTERM ({}){}",
            self.name,
            match status.signal() {
                Some(signal) => format!("killed by signal {signal}"),
                None => status.to_string(),
            },
            self.last_words()
        );
        Ok(())
    }

    /// Kills it (SIGKILL).
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.check_running()?;
        self.process
            .signal(Signal::KILL)
            .with_context(|| format!("killing {}", self.name))?;
        let ended = self.process.wait(Instant::now() + KILL)?;
        ensure!(
            ended.is_some(),
            "{} did not end within {KILL:?} of SIGKILL",
            self.name
        );
        Ok(())
    }

    /// Waits for its end; it must succeed in time. Returns its output.
    pub(crate) fn wait(self, timeout: Duration) -> Result<String> {
        let status = self.process.wait(Instant::now() + timeout)?;
        ensure!(
            status.is_some_and(|status| status.success()),
            "{} {}{}",
            self.name,
            match status {
                Some(status) => format!("failed ({status})"),
                None => format!("did not end within {timeout:?}"),
            },
            self.last_words()
        );
        let log = std::fs::read(&self.log);
        let log = log.with_context(|| format!("reading {}", self.log.display()))?;
        Ok(String::from_utf8_lossy(&log).into_owned())
    }

    /// The end of its log, for an error.
    pub(crate) fn last_words(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.trim_end().lines().collect();
        if lines.is_empty() {
            return String::new();
        }
        let tail = &lines[lines.len().saturating_sub(QUOTE)..];
        format!("; its log ends with:\n{}", tail.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A shell that has run the first line of `script` when this returns.
    fn shell(script: &str) -> (tempfile::TempDir, Child) {
        let directory = tempfile::tempdir().unwrap();
        let ready = directory.path().join("ready");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &ready,
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        let mut command = Command::new("sh");
        command.arg("-c").arg(script).env("READY", &ready);
        let child = Child::spawn("a shell", command, &directory.path().join("log")).unwrap();
        // Blocks until the shell opens it.
        std::fs::read(&ready).unwrap();
        (directory, child)
    }

    #[test]
    fn a_process_that_ends_at_sigterm_is_fine() {
        let (_directory, child) =
            shell("trap 'exit 0' TERM; : > $READY; while :; do sleep 0.05; done");
        child.stop(LONG).unwrap();
    }

    #[test]
    fn one_that_does_not_end_well_is_quoted() {
        let (_directory, child) = shell("echo moo >&2; : > $READY; exec sleep 600");
        let error = child.stop(LONG).unwrap_err().to_string();
        assert!(error.contains("killed by signal 15"), "{error}");
        assert!(error.ends_with("moo"), "{error}");
    }

    #[test]
    fn one_that_ignores_sigterm_is_reported_and_killed() {
        let (_directory, child) = shell("trap '' TERM; : > $READY; exec sleep 600");
        let pid = child.pid();
        let error = child.stop(Duration::from_millis(100)).unwrap_err();
        assert!(error.to_string().contains("did not end"), "{error}");
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
