//! Ctrl-C and SIGTERM: ends all child processes, then this one.
//!
//! Every child process is registered here. On a signal all of them receive SIGTERM, so that
//! any wait of the main thread fails, and it returns through its destructors, which remove
//! files. If it does not return in time, the process exits anyway; the kernel then kills
//! the children (see [`crate::child`]).

use std::{
    os::fd::OwnedFd,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

/// Timeout for the main thread's return.
const GRACE: Duration = Duration::from_secs(10);

static HAPPENED: AtomicBool = AtomicBool::new(false);
static CHILDREN: Mutex<Vec<(u64, OwnedFd)>> = Mutex::new(Vec::new());

/// Whether a signal was received.
pub(crate) fn happened() -> bool {
    HAPPENED.load(Ordering::SeqCst)
}

/// Fails if a signal was received.
pub(crate) fn check() -> Result<()> {
    if happened() {
        bail!("interrupted");
    }
    Ok(())
}

/// Whether signals end all children, registered or not.
static ALL: AtomicBool = AtomicBool::new(false);

/// As [`watch`], for work by libraries, which register no children: signals end every child
/// of this process.
pub(crate) fn watch_all() -> Result<()> {
    ALL.store(true, Ordering::SeqCst);
    watch()
}

/// From now on signals end the process in order.
pub(crate) fn watch() -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot wait for signals")?;
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            for _ in signals.forever() {
                if HAPPENED.swap(true, Ordering::SeqCst) {
                    // A second signal exits at once.
                    std::process::exit(crate::INTERRUPTED.into());
                }
                end_children();
                thread::spawn(|| {
                    thread::sleep(GRACE);
                    std::process::exit(crate::INTERRUPTED.into());
                });
            }
        })
        .context("cannot start a thread")?;
    Ok(())
}

fn end_children() {
    let children = CHILDREN.lock().unwrap_or_else(PoisonError::into_inner);
    for (_, child) in &*children {
        // Fails only if it has already ended.
        let _ = pidfd_send_signal(child, Signal::TERM);
    }
    if ALL.load(Ordering::SeqCst) {
        for child in children_of("self") {
            if let Ok(child) = pidfd_open(child, PidfdFlags::empty()) {
                let _ = pidfd_send_signal(&child, Signal::TERM);
            }
        }
    }
}

/// The children of all threads of a process, as the kernel lists them.
pub(crate) fn children_of(process: &str) -> Vec<Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task"));
    let tasks = tasks.into_iter().flatten();
    tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|list| {
            let pids = list.split_whitespace().map(str::parse);
            pids.collect::<Vec<_>>()
        })
        .filter_map(|pid| Pid::from_raw(pid.ok()?))
        .collect()
}

/// A process that receives SIGTERM on a signal, while this value lives.
#[derive(Debug)]
pub(crate) struct Registration(u64);

impl Registration {
    /// Registers a child that has not been waited for.
    pub(crate) fn new(pid: u32) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.context("a process id is positive")?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        CHILDREN
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((id, pidfd));
        let registration = Self(id);
        // The signal may have arrived before the child was registered.
        if happened() {
            end_children();
        }
        Ok(registration)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        CHILDREN
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|(id, _)| *id != self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn children_are_found_whichever_thread_started_them() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let found = thread::spawn(|| children_of("self")).join().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found.contains(&pid), "{found:?}");
        assert!(!children_of("self").contains(&pid));
    }
}
