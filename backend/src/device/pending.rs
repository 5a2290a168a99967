//! The held request, and its remaining tasks.

use std::{collections::VecDeque, time::Instant};

use farside_config_space::Staged;
use farside_irq_relay::{Action, IrqData, SetIrqs};
use farside_pci::Piece;
use farside_vfio_user::{Region, Reply, ReplyTo};
use rustix::io::Errno;

use crate::borrow::{Event, worker::Job};

/// The remaining tasks, in order, and the held request. There may be tasks without a request: after
/// the client or the lender has gone.
#[derive(Default)]
pub(crate) struct Pending {
    /// `None` if no request is held.
    reply: Option<(ReplyTo, Finish)>,
    /// The last refusal.
    pub(crate) failure: Option<Errno>,
    pub(crate) then: VecDeque<Task>,
    pub(crate) waiting: Waiting,
}

/// The answer to a held request.
pub(crate) enum Finish {
    /// This reply, or the errno of the failure.
    Reply(Reply<'static>),
    /// This reply, even after a failure. A refused bus-master enable shows in the register, as it
    /// would in hardware; the write itself was done.
    Always(Reply<'static>),
    Error(Errno),
    RegionInfo {
        region: Region,
        argsz: u32,
    },
    /// The contents of the device's buffer; all ones if the device is gone.
    Read {
        region: Region,
        offset: u64,
    },
}

pub(crate) enum Task {
    /// Post this to the worker.
    Work(Job),
    /// Execute the borrow's steps for this event.
    Event(Event),
    /// Stage a write to configuration space.
    ConfigWrite { offset: u64, data: Vec<u8> },
    /// Commit a write to configuration space after its effects.
    Commit(Box<Staged>),
    /// Reset configuration space to its power-on state.
    ResetConfig,
    /// Read a register into the device's buffer, or write one, and wait for the answer.
    Read(RegisterRead),
    /// Write to a BAR.
    BarWrite {
        bar: u8,
        offset: u64,
        data: Vec<u8>,
        done: usize,
    },
    /// Drop the client's state.
    Forget,
}

impl Task {
    /// A BAR write with `done` bytes already sent.
    pub(crate) fn bar_write(bar: u8, offset: u64, data: &[u8], done: usize) -> Self {
        Self::BarWrite {
            bar,
            offset,
            data: data.to_vec(),
            done,
        }
    }
}

/// The event that the next task waits for.
#[derive(Default)]
pub(crate) enum Waiting {
    /// None: it can be executed.
    #[default]
    No,
    /// The worker's outcome.
    Worker {
        /// The job returns the device: the lender closes the register channel, which is not an
        /// error.
        returning: bool,
    },
    /// The answer to a register read.
    Register(RegisterRead, Instant),
    /// Room in the register channel, to continue with this.
    Room(Task),
}

/// An access at the lender that it answers: a read into the device's buffer, or a configuration write.
#[derive(Clone, Copy)]
pub(crate) enum RegisterRead {
    /// A BAR; `done` bytes of the buffer are filled.
    Bar { bar: u8, offset: u64, done: usize },
    /// Interrupt Status, into this byte of the buffer.
    InterruptStatus { at: usize },
    /// A part of a read of configuration space at `offset`.
    Config { piece: Piece, offset: u64 },
    /// A write to configuration space.
    ConfigWrite { piece: Piece, value: u32 },
}

impl Pending {
    /// Holds a request until all tasks are done.
    pub(crate) fn hold(
        &mut self,
        to: ReplyTo,
        finish: Finish,
        tasks: impl IntoIterator<Item = Task>,
    ) {
        self.failure = None;
        self.reply = Some((to, finish));
        self.then.extend(tasks);
    }

    /// Once all tasks are done: the requester, its answer and the last failure.
    pub(crate) fn conclude(&mut self) -> Option<(ReplyTo, Finish, Option<Errno>)> {
        if !self.is_idle() {
            return None;
        }
        let (to, finish) = self.reply.take()?;
        Some((to, finish, self.failure.take()))
    }

    /// The next task, unless one is waiting.
    pub(crate) fn take(&mut self) -> Option<Task> {
        match self.waiting {
            Waiting::No => self.then.pop_front(),
            _ => None,
        }
    }

    /// Whether a request is held or a task remains.
    pub(crate) fn is_busy(&self) -> bool {
        self.reply.is_some() || !self.is_idle()
    }

    fn is_idle(&self) -> bool {
        self.then.is_empty() && matches!(self.waiting, Waiting::No)
    }

    /// When the pending register read was sent.
    pub(crate) fn register_read_since(&self) -> Option<Instant> {
        match self.waiting {
            Waiting::Register(_, since) => Some(since),
            _ => None,
        }
    }

    /// Retries the task that waits for room.
    pub(crate) fn retry(&mut self) {
        match std::mem::take(&mut self.waiting) {
            Waiting::Room(task) => self.then.push_front(task),
            other => self.waiting = other,
        }
    }

    /// Cancels a wait for the register channel, which is closed or no longer needed.
    pub(crate) fn stop_waiting_for_registers(&mut self) {
        if !matches!(self.waiting, Waiting::Worker { .. }) {
            self.waiting = Waiting::No;
        }
    }

    /// Drops the held request and its tasks. The worker's job runs to its end.
    pub(crate) fn forget_client(&mut self) {
        self.reply = None;
        self.then.clear();
        self.stop_waiting_for_registers();
    }
}

/// Whether the request triggers vectors rather than configuring them.
pub(crate) fn is_loopback(request: &SetIrqs) -> bool {
    request.action() == Action::Trigger
        && request.range().count() != 0
        && !matches!(request.data(), IrqData::Targets(_))
}
