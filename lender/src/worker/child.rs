//! The program that serves leases, and its process, as the broker has it.

use std::{
    ffi::OsString,
    io::{self, PipeReader},
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Child, Command, ExitStatus, Stdio},
    sync::Arc,
};

use farside_daemon::cgroup;
use farside_lender_protocol::Channel;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::kept::wait;
use crate::keeper::Keeper;

/// The variable that selects log lines.
const LOG_LEVELS: &str = "FARSIDE_LOG";

/// The program that serves a lease: it calls [`super::run`] with its standard input.
#[derive(Clone, Debug)]
pub struct Program {
    /// The executable.
    pub path: OsString,
    /// Its arguments, before the device and the VM, which are for `ps`.
    pub args: Vec<OsString>,
    /// The arguments by which it keeps leases when this process ends: it calls
    /// [`run_keeper`](crate::run_keeper) with its standard input. None: leases end with this process.
    pub keeper: Option<OsString>,
    /// Where each worker gets a control group of its own, if the service manager has delegated one.
    pub cgroup: Option<cgroup::Delegated>,
}

impl Program {
    /// The program with one argument.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        let level = std::env::var_os(LOG_LEVELS);
        command
            .arg0("farside")
            .stdout(Stdio::null())
            .env_clear()
            .envs(level.map(|level| (LOG_LEVELS, level)))
            // A terminal's Ctrl-C is for the broker, which ends the lease in order.
            .process_group(0);
        command
    }
}

/// What makes workers, and outlives the broker for them.
#[derive(Clone)]
pub(crate) struct Workers {
    pub(crate) program: Program,
    pub(crate) keeper: Arc<Keeper>,
}

/// A worker process. Dropping it kills it, and waits until it is gone.
pub(crate) struct Worker {
    /// None if a former broker has started it.
    child: Option<Child>,
    pid: u32,
    /// Readable when the process has ended, with all of its threads.
    pub(crate) pidfd: OwnedFd,
    pub(crate) orders: Channel,
    pub(crate) calls: Channel,
    /// Its standard error, not blocking.
    pub(crate) log: PipeReader,
    /// Removed when the process is gone.
    pub(super) group: Option<cgroup::Group>,
}

impl Worker {
    pub(super) fn new(
        mut child: Child,
        orders: Channel,
        calls: Channel,
        log: PipeReader,
    ) -> io::Result<Self> {
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self {
                pid: child.id(),
                child: Some(child),
                pidfd,
                orders: orders.appendable(),
                calls: calls.appendable(),
                log,
                group: None,
            }),
            Err(errno) => {
                // It has no lease yet.
                let _ = child.kill();
                child.wait()?;
                Err(errno.into())
            }
        }
    }

    pub(super) fn adopted(
        pid: u32,
        pidfd: OwnedFd,
        orders: Channel,
        calls: Channel,
        log: PipeReader,
        group: Option<cgroup::Group>,
    ) -> Self {
        Self {
            child: None,
            pid,
            pidfd,
            orders: orders.appendable(),
            calls: calls.appendable(),
            log,
            group,
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Tells it to end its lease in order.
    pub(crate) fn stop(&mut self) {
        if self.orders.shut_down_sending().is_err() {
            self.kill();
        }
    }

    pub(crate) fn kill(&self) {
        // Fails if it has ended.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Waits for a process that has ended. Only the parent learns how.
    pub(crate) fn status(&mut self) -> io::Result<ExitStatus> {
        match &mut self.child {
            Some(child) => child.wait(),
            None => {
                wait(&self.pidfd, None);
                Ok(ExitStatus::default())
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
        // Fails if it was waited for.
        let _ = self.status();
    }
}
