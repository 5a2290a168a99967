//! The time between the end of a device's process and the next one, in which the guest sees a pause.
//!
//! Attempts to borrow anew follow each other quickly at first. Between them requests are processed that need no
//! device: writes to registers are kept, and interrupts and mappings recorded. Others are held, for [`HOLD_LIMIT`].

use std::time::{Duration, Instant};

use farside_backend_api::ConnectionState;
use farside_error_chain::Chain;
use farside_lender_protocol::{BarOwner, ChannelError};

use super::{
    Device,
    pending::{RegisterRead, Task, Waiting},
    registers,
};
use crate::borrow::{
    Event, Step,
    network::is_final,
    worker::{Job, WorkError},
};

/// Time for which a request is held. With an attempt that has begun, below a VMM's message timeout of 5 s.
pub(super) const HOLD_LIMIT: Duration = Duration::from_millis(2500);

/// Pause after the first failed attempt; each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(2);

/// Maximum pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The device has no process.
#[derive(Debug)]
pub(crate) struct Outage {
    since: Instant,
    /// The next attempt.
    next: Instant,
    pause: Duration,
    /// Until when the tasks of the current request are held.
    held_until: Option<Instant>,
}

/// Whether the register channel ended with the process of the device.
pub(super) fn is_end(error: &ChannelError) -> bool {
    matches!(error, ChannelError::Closed | ChannelError::Io(_))
}

impl Device {
    /// The register channel has ended.
    pub(super) fn registers_ended(&mut self, error: &ChannelError) {
        let is_returning = matches!(self.pending.waiting, Waiting::Worker { returning: true });
        match self.goes_on && is_end(error) && !is_returning {
            true => self.begin_outage(),
            false => self.lender_gone(&Chain(error)),
        }
    }

    /// The device's process has ended: waits for the next.
    pub(super) fn begin_outage(&mut self) {
        self.retired.extend(self.registers.take());
        if self.outage.is_some() {
            return;
        }
        let now = Instant::now();
        log::warn!(
            "{}: its process at the lender has ended: I/O waits for up to {:?}",
            self.name(),
            self.settings.lost_after
        );
        self.outage = Some(Outage {
            since: now,
            next: now,
            pause: FIRST_PAUSE,
            held_until: None,
        });
        let state = &self.settings.network;
        state.set(ConnectionState::Waiting, now, None);
        // Read again, from the start of the piece.
        match std::mem::take(&mut self.pending.waiting) {
            Waiting::Register(read, _) => self.pending.then.push_front(Task::Read(read)),
            Waiting::Room(task) => self.pending.then.push_front(task),
            other => self.pending.waiting = other,
        }
    }

    /// The outage is over: the device has another process, or is given up.
    pub(super) fn end_outage(&mut self) {
        self.outage = None;
        self.is_taken_over = false;
    }

    /// The next task, unless one is waiting.
    pub(super) fn next_task(&mut self) -> Option<Task> {
        let Some(outage) = &mut self.outage else {
            return self.pending.take();
        };
        if !matches!(self.pending.waiting, Waiting::No) {
            return None;
        }
        let now = Instant::now();
        let next = self.pending.then.front();
        let may_do_dma = self.is_taken_over || self.described.bars == BarOwner::Lender;
        if next.is_none() {
            // All tasks of a request are held for this time, and not each.
            outage.held_until = None;
        }
        let needs_device = next.map(|task| match task {
            Task::Event(Event::ClientGone | Event::LenderGone) | Task::Forget => false,
            task => may_do_dma || needs_device(task),
        });
        if needs_device == Some(false) {
            return self.pending.take();
        }
        if now >= outage.next {
            return Some(Task::Work(Job::Resume(self.setup())));
        }
        needs_device?;
        let until = *outage.held_until.get_or_insert(now + HOLD_LIMIT);
        if now < until {
            return None;
        }
        if may_do_dma && next.is_some_and(stops_dma) {
            self.give_up("the device may do DMA, and must not any more".into());
        }
        self.pending.take()
    }

    /// Keeps a write to registers for the next process.
    pub(super) fn keep_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        let mut writes = registers::writes(bar, offset, data);
        if !writes.all(|(access, _)| self.log.wait(access)) {
            self.give_up("the guest has written to more registers than are kept".into());
        }
    }

    /// When to process tasks again.
    pub(crate) fn next_attempt(&self) -> Option<Instant> {
        let outage = self.outage.as_ref()?;
        match self.pending.waiting {
            Waiting::No => Some(
                outage
                    .held_until
                    .map_or(outage.next, |it| it.min(outage.next)),
            ),
            _ => None,
        }
    }

    /// An attempt has failed: plans the next, or gives the device up.
    pub(super) fn attempt_failed(&mut self, error: &WorkError) {
        let Some(outage) = &mut self.outage else {
            return;
        };
        let text = Chain(error).to_string();
        let is_over = matches!(error, WorkError::Changed(_))
            || error.refusal().is_some_and(is_final)
            || outage.since.elapsed() >= self.settings.lost_after;
        if is_over {
            return self.give_up(text);
        }
        outage.next = Instant::now() + outage.pause;
        outage.pause = (outage.pause * 2).min(LONGEST_PAUSE);
        log::debug!("{}: {text}", self.name());
        self.settings.network.retried(text);
    }

    /// The device is lost, until the VM is reset. The guest is not asked to release it: a VMM whose device is removed before
    /// its guest has released it may abort (QEMU, at its next change of memory).
    pub(super) fn give_up(&mut self, error: String) {
        let since = self.outage.take().map_or_else(Instant::now, |it| it.since);
        log::error!(
            "{}: giving the device up, {:.1?} after its process has ended ({error}): its registers read as all ones, and a reset of the VM looks for it again",
            self.name(),
            since.elapsed()
        );
        self.goes_on = false;
        self.is_taken_over = false;
        self.log.clear();
        let state = &self.settings.network;
        state.set(ConnectionState::GivenUp, Instant::now(), Some(error));
        self.pending.then.push_front(Task::Event(Event::LenderGone));
    }

    /// The device goes on.
    pub(super) fn resumed(&mut self) {
        let Some(outage) = self.outage.take() else {
            return;
        };
        log::info!(
            "{}: goes on in another process after {:.1?}",
            self.name(),
            outage.since.elapsed()
        );
        self.settings.network.restarted(Instant::now());
        if std::mem::take(&mut self.is_taken_over) && self.config.may_dma() {
            let open = Task::Event(Event::EnableBusMaster);
            self.pending.then.push_front(open);
        }
    }
}

/// Whether a task must not be done while a device may do DMA.
fn stops_dma(task: &Task) -> bool {
    matches!(
        task,
        Task::Event(
            Event::MemoryRemoved(_)
                | Event::MemoryRefused(_)
                | Event::DisableBusMaster
                | Event::Reset
                | Event::FunctionReset
        )
    )
}

/// Whether a task waits for a device; the others are done without one.
fn needs_device(task: &Task) -> bool {
    match task {
        Task::Read(RegisterRead::Bar { .. }) => true,
        Task::Event(Event::EnableBusMaster | Event::MemoryAdded(_)) => true,
        Task::Work(Job::Take(steps)) => {
            let starts = |step: &Step| matches!(step, Step::Open(_) | Step::Map(_));
            steps.iter().any(starts)
        }
        _ => false,
    }
}
