//! `farside migrate` in the background.

use std::{
    fs,
    io::Read,
    path::PathBuf,
    process::{Child, Stdio},
    time::Instant,
};

use anyhow::{Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::{LOOK_AGAIN, MIGRATION, Stage, VM};

/// A running `farside migrate`.
pub struct Migration {
    child: Child,
    stderr: std::thread::JoinHandle<String>,
    stdout: std::thread::JoinHandle<String>,
    command: String,
}

impl Stage {
    /// Starts `farside migrate` on a host.
    pub fn begin(&self, host: &str, args: &[&str]) -> Result<Migration> {
        let mut command = self.command(host, args)?;
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let read = |stream: Option<Box<dyn Read + Send>>| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                if let Some(mut stream) = stream {
                    // Keeps the output that precedes an error.
                    let _ = stream.read_to_end(&mut text);
                }
                String::from_utf8_lossy(&text).into_owned()
            })
        };
        let stdout = child.stdout.take().map(|s| Box::new(s) as Box<_>);
        let stderr = child.stderr.take().map(|s| Box::new(s) as Box<_>);
        Ok(Migration {
            child,
            stderr: read(stderr),
            stdout: read(stdout),
            command: format!("{host}: farside {args:?}"),
        })
    }

    /// Path of a host's journal of the VM's migration.
    pub fn journal_path(&self, host: &str) -> PathBuf {
        self.path(host, &format!("state/migrations/{VM}.json"))
    }

    /// The journal's text; empty if there is none.
    pub fn journal(&self, host: &str) -> String {
        fs::read_to_string(self.journal_path(host)).unwrap_or_default()
    }
}

impl Migration {
    /// The process id of `farside`, which replaces the script by exec.
    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Waits for its end. Returns whether it succeeded, and its output.
    pub fn end(mut self, stage: &Stage) -> Result<(bool, String)> {
        let deadline = Instant::now() + MIGRATION;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() > deadline {
                let _ = self.child.kill();
                bail!("{} has not ended within {MIGRATION:?}", self.command);
            }
            std::thread::sleep(LOOK_AGAIN);
        };
        let said = |thread: std::thread::JoinHandle<String>| thread.join().unwrap_or_default();
        let text = said(self.stdout) + &said(self.stderr);
        stage.note(format!("-- {} ({status}):\n{text}", self.command));
        Ok((status.success(), text))
    }

    /// Whether it runs.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }
}

/// SIGKILL.
pub fn kill(pid: i32) {
    send(pid, Signal::KILL);
}

/// Kills processes of which each would start the others again.
pub fn kill_at_once(pids: &[i32]) {
    for signal in [Signal::STOP, Signal::KILL] {
        pids.iter().for_each(|pid| send(*pid, signal));
    }
}

fn send(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        // Fails only if it has already ended.
        let _ = kill_process(pid, signal);
    }
}
