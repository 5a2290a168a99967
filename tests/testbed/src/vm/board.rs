//! State received from QEMU's sockets by the reader threads, with waiting for changes.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use farside_guest_agent::Answer;

use super::Event;

/// Shared between a VM and its reader threads.
#[derive(Debug, Clone, Default)]
pub(crate) struct Board(Arc<(Mutex<State>, Condvar)>);

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) agent: AgentState,
    pub(crate) qmp: QmpState,
}

#[derive(Debug, Default)]
pub(crate) struct AgentState {
    /// How often the agent has started.
    pub(crate) hellos: u64,
    /// The guest kernel's release.
    pub(crate) kernel: String,
    /// Requests without a reply so far.
    pub(crate) open: HashSet<u64>,
    pub(crate) replies: HashMap<u64, Result<Answer, String>>,
    pub(crate) closed: bool,
    /// VMs whose QEMU is a command in this guest: they end with its request.
    pub(crate) nested: HashMap<u64, Board>,
}

#[derive(Debug, Default)]
pub(crate) struct QmpState {
    /// For [`QmpState::hang_up`].
    pub(crate) socket: Option<UnixStream>,
    pub(crate) events: Vec<Event>,
    /// Whether the guest's CPUs are stopped.
    pub(crate) stopped: bool,
    pub(crate) closed: bool,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn look<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        read(&self.lock())
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.lock());
        self.0.1.notify_all();
        result
    }

    /// Marks the end of input: QEMU has ended.
    pub(crate) fn close(&self) {
        let nested = self.change(|state| {
            state.agent.closed = true;
            state.qmp.closed = true;
            state.qmp.hang_up();
            state.agent.take_ended()
        });
        for board in nested {
            board.close();
        }
    }

    /// Waits until `done` returns a value, or the deadline.
    pub(crate) fn wait<T>(
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

impl QmpState {
    /// Closes the connection, and so ends a pending wait for a reply.
    pub(crate) fn hang_up(&mut self) {
        if let Some(socket) = self.socket.take() {
            // Fails only if the other end has closed it.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl AgentState {
    /// Takes the nested VMs that have ended: their request was answered, or never will be.
    /// The caller notifies them with [`Board::close`].
    pub(crate) fn take_ended(&mut self) -> Vec<Board> {
        let ended: Vec<u64> = self
            .nested
            .keys()
            .copied()
            .filter(|id| self.closed || !self.open.contains(id))
            .collect();
        let boards = ended.iter().filter_map(|id| self.nested.remove(id));
        boards.collect()
    }
}

/// Reads lines from a socket on a thread, until the socket closes.
pub(crate) fn read_lines(
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

/// Shuts a socket down although its reader thread holds it, so that the peer sees the end.
pub(crate) fn hang_up(socket: &Mutex<UnixStream>) {
    // Fails only if the other end has closed it.
    let _ = socket
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .shutdown(Shutdown::Both);
}
