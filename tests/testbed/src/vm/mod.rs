//! Virtual machines: configuration, start, control and end.

mod agent;
mod board;
mod builder;
mod foreign;
mod kernel_args;
mod qmp;

use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use tempfile::TempDir;

use crate::process::Process;

pub(crate) use board::Board;
pub(crate) use builder::option_value;
pub(crate) use kernel_args::{EMULATED, kernel_args};

pub use agent::{Guest, GuestPage, Output, Pending};
pub use builder::{Boot, Firmware, Machine, Staged, VmBuilder};
pub use foreign::AgentPort;
pub use qmp::{Event, Qmp};

/// Timeout from QEMU's start until it connects to its sockets.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Timeout from the close of a QEMU's socket until its end.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// How much of a log an error quotes.
const QUOTE: usize = 2000;

/// A running virtual machine, and its guest. On drop it is killed and its directory
/// removed.
#[derive(Debug)]
pub struct Vm {
    board: Board,
    guest: Guest,
    qmp: Qmp,
    /// Before `directory`, so that QEMU has ended before its files are removed.
    process: Process,
    directory: Arc<TempDir>,
}

impl Vm {
    fn start(
        name: String,
        directory: Arc<TempDir>,
        process: Process,
        sockets: &builder::Sockets,
    ) -> Result<Self> {
        let deadline = Instant::now() + START_TIMEOUT;
        let connect = |listener| -> Result<UnixStream> {
            process.accept(listener, deadline).with_context(|| {
                died(
                    &name,
                    "before it opened its sockets",
                    &process,
                    directory.path(),
                )
            })
        };
        let qmp = connect(&sockets.qmp)?;
        let agent = connect(&sockets.agent)?;
        Self::of(name, directory, process, qmp, agent)
    }

    /// A QEMU that has connected to its sockets.
    fn of(
        name: String,
        directory: Arc<TempDir>,
        process: Process,
        qmp: UnixStream,
        agent: UnixStream,
    ) -> Result<Self> {
        let board = Board::default();
        let qmp = Qmp::new(qmp, board.clone(), qemu_log(directory.path()))?;
        let guest = {
            let directory = directory.path().to_owned();
            Guest::start(
                name.clone(),
                agent,
                board.clone(),
                Box::new(move || printed(&directory)),
            )?
        };
        qmp.negotiate(START_TIMEOUT)
            .with_context(|| died(&name, "before it answered QMP", &process, directory.path()))?;
        Ok(Vm {
            board,
            guest,
            qmp,
            process,
            directory,
        })
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The directory of this VM's sockets, logs and other files.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The guest's serial console output so far.
    pub fn serial_log(&self) -> String {
        read_lossy(&serial_log(self.directory.path()))
    }

    /// QEMU's output so far.
    pub fn qemu_log(&self) -> String {
        read_lossy(&qemu_log(self.directory.path()))
    }

    /// QEMU's monitor.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// Waits until the agent in the guest has started. The error includes the end of the
    /// guest's log.
    pub fn wait_agent(&self, timeout: Duration) -> Result<()> {
        self.wait_boot(1, timeout)
    }

    /// Waits until the agent has started `boots` times ([`Guest::boots`]).
    pub fn wait_boot(&self, boots: u64, timeout: Duration) -> Result<()> {
        enum Seen {
            Booted,
            Stopped,
            Closed,
        }
        let seen = self.board.wait(timeout, |state| {
            if state.agent.hellos >= boots {
                Some(Seen::Booted)
            } else if state.agent.closed || state.qmp.closed {
                Some(Seen::Closed)
            } else if state.qmp.stopped {
                Some(Seen::Stopped)
            } else {
                None
            }
        });
        match seen {
            Some(Seen::Booted) => Ok(()),
            Some(Seen::Closed) => Err(self.quote("QEMU ended before the guest's agent started")),
            Some(Seen::Stopped) => {
                let why = self.qmp.status()?;
                Err(self.quote(&format!(
                    "the guest stopped ({why}) before its agent started"
                )))
            }
            None => Err(self.quote(&format!(
                "the guest's agent did not start within {timeout:?}\n{}",
                self.qmp.cpus()
            ))),
        }
    }

    /// Reboots the guest from within, and waits until the agent is back.
    pub fn reboot(&self, timeout: Duration) -> Result<()> {
        let boots = self.boots();
        self.guest.ask_reboot()?;
        self.wait_boot(boots + 1, timeout)
    }

    /// Powers the guest off from within, and waits until QEMU has ended, successfully.
    pub fn shutdown(self, timeout: Duration) -> Result<()> {
        self.guest.power_off()?;
        match self.wait_exit(timeout)?.success() {
            true => Ok(()),
            false => Err(self.quote("QEMU ended badly")),
        }
    }

    /// Waits until QEMU has ended.
    pub fn wait_exit(&self, timeout: Duration) -> Result<ExitStatus> {
        match self.process.wait(Instant::now() + timeout)? {
            Some(status) => Ok(status),
            None => Err(self.quote(&format!("QEMU has not ended within {timeout:?}"))),
        }
    }

    /// Kills QEMU, as at a power loss, and waits for its end. Returns how it ended: if it had
    /// ended before, that is not by SIGKILL.
    pub fn kill(self) -> Result<ExitStatus> {
        self.process.kill();
        match self.process.wait(Instant::now() + END_TIMEOUT)? {
            Some(status) => Ok(status),
            None => bail!("VM {}: QEMU survives SIGKILL", self.name()),
        }
    }

    /// An error with the VM's state and logs.
    fn quote(&self, what: &str) -> anyhow::Error {
        anyhow!(
            "VM {}: {what}{}",
            self.name(),
            logs(&self.process, self.directory.path())
        )
    }
}

impl Deref for Vm {
    type Target = Guest;

    fn deref(&self) -> &Guest {
        &self.guest
    }
}

fn died(name: &str, when: &str, process: &Process, directory: &Path) -> String {
    format!("VM {name}: QEMU failed {when}{}", logs(process, directory))
}

/// QEMU's exit status, if it has ended, and the ends of its logs.
fn logs(process: &Process, directory: &Path) -> String {
    let text = match process.wait(Instant::now()) {
        Ok(Some(status)) => format!("\n-- QEMU ended: {status}"),
        Ok(None) => String::new(),
        Err(error) => format!("\n-- how QEMU ended is unknown: {error:#}"),
    };
    text + &printed(directory)
}

/// The ends of a VM's logs.
fn printed(directory: &Path) -> String {
    let mut text = String::new();
    for (what, path) in [
        ("QEMU printed", qemu_log(directory)),
        ("the serial console ends with", serial_log(directory)),
    ] {
        let log = read_lossy(&path);
        let log = log.trim();
        if !log.is_empty() {
            text.push_str(&format!("\n-- {what}:\n{}", tail(log)));
        }
    }
    text
}

/// The end of a log.
pub(crate) fn tail(log: &str) -> &str {
    let mut start = log.len().saturating_sub(QUOTE);
    while !log.is_char_boundary(start) {
        start += 1;
    }
    &log[start..]
}

pub(crate) fn read_lossy(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

fn serial_log(directory: &Path) -> PathBuf {
    directory.join("serial.log")
}

fn qemu_log(directory: &Path) -> PathBuf {
    directory.join("qemu.log")
}
