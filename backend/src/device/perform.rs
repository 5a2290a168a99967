//! Executes tasks in order until one has to wait.

use std::time::{Duration, Instant};

use farside_lender_protocol::registers::Event as RegisterEvent;
use farside_pci::regs::STATUS_INTERRUPT;

use super::{
    Device,
    bars::Bars,
    pending::{RegisterRead, Task, Waiting},
    registers,
};
use crate::{
    borrow::{Event, Step, worker::Job},
    dma_table::DmaTable,
};

impl Device {
    /// Executes tasks until the queue is empty or one waits.
    pub(super) fn advance(&mut self) {
        while let Some(task) = self.next_task() {
            self.perform(task);
        }
    }

    fn perform(&mut self, task: Task) {
        match task {
            Task::Work(Job::SetIrqs(_) | Job::SetIntxDisable(_)) if self.registers.is_none() => {}
            Task::Work(job) => self.post(job),
            Task::Event(event) => self.take_steps(event),
            Task::ConfigWrite { offset, data } => self.write_config(offset, &data),
            Task::Commit(staged) => self.commit_config(*staged),
            Task::ResetConfig => {
                self.config.reset();
                self.vectors.reset();
                self.unlist_bars();
            }
            Task::Read(read) => self.read_register(read),
            Task::BarWrite {
                bar,
                offset,
                data,
                done,
            } => self.write_bar(bar, offset, data, done),
            Task::Forget => self.forget_client(),
        }
    }

    fn post(&mut self, job: Job) {
        let is_return = |step: &Step| matches!(step, Step::Return);
        let returning = matches!(&job, Job::Take(steps) if steps.iter().any(is_return));
        if returning {
            self.bars.release();
            // What is listed keeps a function's descriptor open.
            self.publish_bars();
        }
        if matches!(&job, Job::Take(steps) if steps.iter().any(|step| matches!(step, Step::Reset)))
        {
            self.log.clear();
        }
        self.worker.post(job);
        self.pending.waiting = Waiting::Worker { returning };
    }

    fn take_steps(&mut self, event: Event) {
        // BAR accesses do not retry a refused borrow.
        if self.absent && matches!(event, Event::BarAccess) {
            return;
        }
        let steps = event.steps(self.state, || self.setup());
        if !steps.is_empty() {
            self.post(Job::Take(steps));
        }
    }

    /// Without a lease a BAR reads as all ones, Interrupt Status as zero, and configuration space as the lender has read
    /// it once; writes to that are lost.
    fn read_register(&mut self, read: RegisterRead) {
        let Some(channel) = &mut self.registers else {
            return;
        };
        let asked = match read {
            RegisterRead::Bar { done, .. } if done == self.buffer.len() => return,
            RegisterRead::Bar { bar, offset, done } => {
                let left = self.buffer.len() - done;
                registers::request_read(channel, &mut self.log, bar, offset + done as u64, left)
            }
            RegisterRead::InterruptStatus { .. } => {
                registers::request_interrupt_status(channel, &mut self.log)
            }
            RegisterRead::Config { piece, .. } => {
                registers::request_config_read(channel, &mut self.log, piece)
            }
            RegisterRead::ConfigWrite { piece, value } => {
                registers::request_config_write(channel, &mut self.log, piece, value)
            }
        };
        match asked {
            Ok(true) => self.pending.waiting = Waiting::Register(read, Instant::now()),
            Ok(false) => self.pending.waiting = Waiting::Room(Task::Read(read)),
            Err(error) => {
                self.pending.then.push_front(Task::Read(read));
                self.registers_ended(&error);
            }
        }
    }

    fn write_bar(&mut self, bar: u8, offset: u64, data: Vec<u8>, done: usize) {
        let rest = offset + done as u64;
        let Some(channel) = &mut self.registers else {
            if self.outage.is_some() {
                self.keep_write(bar, rest, &data[done..]);
            }
            return;
        };
        match registers::post_write(channel, &mut self.log, bar, rest, &data[done..]) {
            Ok(sent) if done + sent == data.len() => {}
            Ok(sent) => {
                let done = done + sent;
                self.pending.waiting = Waiting::Room(Task::BarWrite {
                    bar,
                    offset,
                    data,
                    done,
                });
            }
            // Pieces that were sent are in the log, if the device goes on.
            Err((sent, error)) => {
                let rest = Task::bar_write(bar, offset, &data, done + sent);
                self.pending.then.push_front(rest);
                self.registers_ended(&error);
            }
        }
    }

    pub(super) fn on_register_event(&mut self, event: RegisterEvent) {
        match event {
            RegisterEvent::Interrupt(event) => self.vectors.deliver(event),
            RegisterEvent::Data { value } => self.on_register_data(value),
            RegisterEvent::Release { limit_ms } => {
                self.request_release(Duration::from_millis(limit_ms));
            }
        }
    }

    /// Reads are sent one piece at a time. An unexpected answer belongs to a client that has
    /// disconnected.
    fn on_register_data(&mut self, value: u64) {
        let Waiting::Register(read, _) = self.pending.waiting else {
            return;
        };
        self.pending.waiting = Waiting::No;
        match read {
            RegisterRead::Bar { bar, offset, done } => {
                let left = self.buffer.len() - done;
                let len = registers::piece(offset + done as u64, left);
                if let Some(piece) = self.buffer.get_mut(done..done + len) {
                    piece.copy_from_slice(&value.to_le_bytes()[..len]);
                }
                let done = done + len;
                let rest = Task::Read(RegisterRead::Bar { bar, offset, done });
                self.pending.then.push_front(rest);
            }
            RegisterRead::InterruptStatus { at } => {
                if value != 0
                    && let Some(byte) = self.buffer.get_mut(at)
                {
                    *byte |= STATUS_INTERRUPT as u8;
                }
            }
            RegisterRead::Config { piece, offset } => {
                // The low bytes are the answer.
                self.config
                    .merge(piece, value as u32, offset, &mut self.buffer);
            }
            RegisterRead::ConfigWrite { .. } => {}
        }
    }

    fn forget_client(&mut self) {
        self.memory = DmaTable::default();
        self.vectors.disable_all();
        self.vectors.reset();
        self.config.reset();
        self.unlist_bars();
        self.absent = false;
        self.unplugged = false;
        match Bars::new(&self.described) {
            Ok(bars) => self.bars = bars,
            Err(error) => log::error!(
                "{}: no fresh memory for its BARs ({error}): the next client gets that of the last",
                self.name()
            ),
        }
    }
}
