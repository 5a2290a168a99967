//! What the threads that read QEMU's sockets have learnt, and waiting for it.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use farside_guest_agent::Answer;
use serde_json::Value;

use super::Event;

/// Shared between a VM and its reader threads.
#[derive(Debug, Clone, Default)]
pub(super) struct Board(Arc<(Mutex<State>, Condvar)>);

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) agent: AgentState,
    pub(super) qmp: QmpState,
}

#[derive(Debug, Default)]
pub(super) struct AgentState {
    /// How often the agent has started.
    pub(super) hellos: u64,
    /// The guest kernel's release.
    pub(super) kernel: String,
    /// Requests without an answer so far.
    pub(super) open: HashSet<u64>,
    pub(super) replies: HashMap<u64, Result<Answer, String>>,
    pub(super) closed: bool,
}

#[derive(Debug, Default)]
pub(super) struct QmpState {
    pub(super) greeted: bool,
    pub(super) replies: HashMap<u64, Result<Value, String>>,
    pub(super) events: Vec<Event>,
    /// Whether the guest's processors stand still.
    pub(super) stopped: bool,
    pub(super) closed: bool,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn look<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        read(&self.lock())
    }

    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.lock());
        self.0.1.notify_all();
        result
    }

    /// Waits until `done` says something, or the time is up.
    pub(super) fn wait<T>(
        &self,
        timeout: Duration,
        mut done: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if let Some(result) = done(&mut state) {
                return Some(result);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            state = self
                .0
                .1
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// Reads lines from a socket in a thread of its own, until the socket closes.
pub(super) fn read_lines(
    name: &str,
    socket: &UnixStream,
    mut line: impl FnMut(&str) + Send + 'static,
    closed: impl FnOnce() + Send + 'static,
) -> Result<()> {
    let socket = socket.try_clone().context("duplicating a socket")?;
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            for bytes in BufReader::new(socket).split(b'\n') {
                let Ok(bytes) = bytes else { break };
                let text = String::from_utf8_lossy(&bytes);
                let text = text.trim();
                if !text.is_empty() {
                    line(text);
                }
            }
            closed();
        })
        .context("starting a reader thread")?;
    Ok(())
}
