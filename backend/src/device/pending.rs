//! The request that is held, and what is left to do for it.

use std::{collections::VecDeque, time::Instant};

use farside_config_space::Staged;
use farside_irq_relay::{Action, IrqData, SetIrqs};
use farside_vfio_user::{Region, Reply, ReplyTo};
use rustix::io::Errno;

use crate::borrow::{Event, worker::Job};

/// What is left to do, in its order, and who waits for it. Also without a
/// request there may be something: when the client or the lender has gone.
#[derive(Default)]
pub(crate) struct Pending {
    /// None when nobody waits for an answer.
    reply: Option<(ReplyTo, Finish)>,
    /// The last refusal.
    pub(crate) failure: Option<Errno>,
    pub(crate) then: VecDeque<Task>,
    pub(crate) waiting: Waiting,
}

/// How a held request is answered.
pub(crate) enum Finish {
    /// By this, or the errno of what failed.
    Reply(Reply<'static>),
    /// By this, even if something failed. A refused bus-master enable shows in
    /// the register, as it would in hardware; the write itself was done.
    Always(Reply<'static>),
    Error(Errno),
    RegionInfo {
        region: Region,
        argsz: u32,
    },
    /// By what is in the device's buffer: all ones, if the device is gone.
    Read {
        region: Region,
        offset: u64,
    },
}

/// One thing to do.
pub(crate) enum Task {
    /// Hand this to the worker.
    Work(Job),
    /// Take the borrow's steps for this event.
    Event(Event),
    /// Write to configuration space: finds out what that takes.
    ConfigWrite { offset: u64, data: Vec<u8> },
    /// Let a write to configuration space, whose effects have been seen to,
    /// show in the registers.
    Commit(Box<Staged>),
    /// Configuration space as after power-on.
    ResetConfig,
    /// Read a register into the device's buffer.
    Read(RegisterRead),
    /// Write to a BAR.
    BarWrite {
        bar: u8,
        offset: u64,
        data: Vec<u8>,
        done: usize,
    },
    /// Forget the client.
    Forget,
}

impl Task {
    /// A BAR write of which `done` bytes are sent already.
    pub(crate) fn bar_write(bar: u8, offset: u64, data: &[u8], done: usize) -> Self {
        Self::BarWrite {
            bar,
            offset,
            data: data.to_vec(),
            done,
        }
    }
}

/// What has to come before the next task.
#[derive(Default)]
pub(crate) enum Waiting {
    /// Nothing: it can be taken.
    #[default]
    No,
    /// The worker's outcome.
    Worker {
        /// It gives the device back: the lender closes the register channel, and
        /// that is no loss.
        returning: bool,
    },
    /// The answer to a register read.
    Register(RegisterRead, Instant),
    /// Room in the register channel, to go on with this.
    Room(Task),
}

/// What is read at the lender into the device's buffer.
#[derive(Clone, Copy)]
pub(crate) enum RegisterRead {
    /// A BAR; `done` bytes of the buffer are filled.
    Bar { bar: u8, offset: u64, done: usize },
    /// Interrupt Status, into this byte of the buffer.
    InterruptStatus { at: usize },
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

    /// How to answer whom, with the last refusal, once all is done.
    pub(crate) fn conclude(&mut self) -> Option<(ReplyTo, Finish, Option<Errno>)> {
        if !self.is_idle() {
            return None;
        }
        let (to, finish) = self.reply.take()?;
        Some((to, finish, self.failure.take()))
    }

    /// The next task, if nothing is waited for.
    pub(crate) fn take(&mut self) -> Option<Task> {
        match self.waiting {
            Waiting::No => self.then.pop_front(),
            _ => None,
        }
    }

    /// Whether a request is held, or something is left to do.
    pub(crate) fn is_busy(&self) -> bool {
        self.reply.is_some() || !self.is_idle()
    }

    fn is_idle(&self) -> bool {
        self.then.is_empty() && matches!(self.waiting, Waiting::No)
    }

    /// Since when a register read is waited for.
    pub(crate) fn register_read_since(&self) -> Option<Instant> {
        match self.waiting {
            Waiting::Register(_, since) => Some(since),
            _ => None,
        }
    }

    /// There may be room now.
    pub(crate) fn retry(&mut self) {
        match std::mem::take(&mut self.waiting) {
            Waiting::Room(task) => self.then.push_front(task),
            other => self.waiting = other,
        }
    }

    /// Nothing comes from the register channel any more, or nobody wants it.
    pub(crate) fn stop_waiting_for_registers(&mut self) {
        if !matches!(self.waiting, Waiting::Worker { .. }) {
            self.waiting = Waiting::No;
        }
    }

    /// Drops all that the client waits for. The worker's job runs to its end.
    pub(crate) fn forget_client(&mut self) {
        self.reply = None;
        self.then.clear();
        self.stop_waiting_for_registers();
    }
}

/// Whether the request fires vectors rather than configuring them.
pub(crate) fn is_loopback(request: &SetIrqs) -> bool {
    request.action() == Action::Trigger
        && request.range().count() != 0
        && !matches!(request.data(), IrqData::Targets(_))
}
