//! What a held request still has to do.

use std::{collections::VecDeque, time::Instant};

use farside_config_space::Staged;
use farside_irq_relay::{Action, IrqData, SetIrqs};
use farside_vfio_user::{DmaUnmap, Negotiated, Region, ReplyTo};
use rustix::io::Errno;

use crate::borrow::Event;

/// A request whose answer waits.
pub(crate) struct Held {
    pub(crate) to: ReplyTo,
    pub(crate) finish: Finish,
}

/// How a held request is answered.
pub(crate) enum Finish {
    Version(Negotiated),
    Done,
    RegionInfo {
        region: Region,
        argsz: u32,
    },
    Error(Errno),
    Unmap(DmaUnmap),
    Read {
        region: Region,
        offset: u64,
    },
    Write {
        region: Region,
        offset: u64,
        count: u32,
    },
    WriteMulti {
        done: u64,
    },
}

/// One thing to do.
pub(crate) enum Task {
    /// Ask the lender whether the device can be borrowed.
    Check,
    /// Take the borrow's steps for this event.
    Event(Event),
    /// Tell the lender of interrupts, if there is a lease.
    SetIrqs(SetIrqs),
    /// Tell the lender of the INTx disable bit, if there is a lease.
    SetIntxDisable(bool),
    /// Write to configuration space: finds out what that takes.
    ConfigWrite { offset: u64, data: Vec<u8> },
    /// Let a write to configuration space, whose effects have been seen to,
    /// show in the registers.
    Commit(Box<Staged>),
    /// Configuration space as after power-on.
    ResetConfig,
    /// Read a BAR into the device's buffer.
    BarRead { bar: u8, offset: u64, done: usize },
    /// Put Interrupt Status into this byte of the device's buffer.
    InterruptStatus { at: usize },
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

/// What the front of the queue waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// Nothing: it can be taken.
    #[default]
    No,
    /// The worker's outcome.
    Worker,
    /// The answer to a register read.
    Register {
        /// Bytes.
        len: usize,
        /// When it was asked for.
        since: Instant,
    },
    /// The answer to a read of Interrupt Status.
    InterruptStatus {
        /// The byte of the device's buffer that it goes to.
        at: usize,
        /// When it was asked for.
        since: Instant,
    },
    /// Room in the register channel.
    Room,
}

/// A queue of tasks; the front one may be under way.
#[derive(Default)]
pub(crate) struct Tasks {
    queue: VecDeque<Task>,
    pub(crate) waiting: Waiting,
}

impl Tasks {
    pub(crate) fn push(&mut self, task: Task) {
        self.queue.push_back(task);
    }

    /// Puts a task before all others.
    pub(crate) fn push_front(&mut self, task: Task) {
        self.queue.push_front(task);
    }

    /// Puts tasks before all others, in their order.
    pub(crate) fn push_all_front(&mut self, tasks: Vec<Task>) {
        for task in tasks.into_iter().rev() {
            self.queue.push_front(task);
        }
    }

    /// The next task, if nothing is waited for.
    pub(crate) fn take(&mut self) -> Option<Task> {
        match self.waiting {
            Waiting::No => self.queue.pop_front(),
            _ => None,
        }
    }

    /// The next task, whether or not it can be taken.
    pub(crate) fn front(&self) -> Option<&Task> {
        self.queue.front()
    }

    /// Whether all is done.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.waiting == Waiting::No
    }

    /// Since when the front of the queue waits for a register read.
    pub(crate) fn register_read_since(&self) -> Option<Instant> {
        match self.waiting {
            Waiting::Register { since, .. } | Waiting::InterruptStatus { since, .. } => Some(since),
            _ => None,
        }
    }

    pub(crate) fn waits_for_room(&self) -> bool {
        self.waiting == Waiting::Room
    }

    /// What was waited for has come.
    pub(crate) fn finish_current(&mut self) {
        self.waiting = Waiting::No;
    }

    /// There may be room now.
    pub(crate) fn retry(&mut self) {
        if self.waiting == Waiting::Room {
            self.waiting = Waiting::No;
        }
    }

    /// Nothing comes from the register channel any more, or nobody wants it.
    pub(crate) fn stop_waiting_for_registers(&mut self) {
        if self.waiting != Waiting::Worker {
            self.waiting = Waiting::No;
        }
    }

    /// Drops all that has not begun, and what only the client waits for. The
    /// worker's job runs to its end.
    pub(crate) fn keep_current(&mut self) {
        self.queue.clear();
        self.stop_waiting_for_registers();
    }
}

/// Whether the request fires vectors rather than configuring them.
pub(crate) fn is_loopback(request: &SetIrqs) -> bool {
    request.action() == Action::Trigger
        && request.range().count() != 0
        && !matches!(request.data(), IrqData::Sinks(_))
}
