//! Tasks, one after another, until one has to wait.

use std::time::Instant;

use farside_error_chain::Chain;
use farside_lender_protocol::{MAX_FDS, registers::Event as RegisterEvent};
use farside_pci::regs::STATUS_INTERRUPT;

use super::{
    Device,
    bars::Bars,
    registers,
    task::{Task, Waiting},
};
use crate::{
    borrow::{Event, Setup, Step, worker::Job},
    dma_table::DmaTable,
};

impl Device {
    /// Takes tasks until the queue is empty or one waits.
    pub(super) fn advance(&mut self) {
        while let Some(task) = self.tasks.take() {
            self.perform(task);
        }
    }

    fn perform(&mut self, task: Task) {
        match task {
            Task::Check => self.post(Job::Check),
            Task::Event(event) => self.take_steps(event),
            Task::SetIrqs(request) => {
                if self.registers.is_some() {
                    self.post(Job::SetIrqs(request));
                }
            }
            Task::SetIntxDisable(disabled) => {
                if self.registers.is_some() {
                    self.post(Job::SetIntxDisable(disabled));
                }
            }
            Task::ConfigWrite { offset, data } => self.write_config(offset, &data),
            Task::Commit(staged) => self.commit_config(*staged),
            Task::ResetConfig => {
                self.config.reset();
                self.vectors.reset();
            }
            Task::BarRead { bar, offset, done } => self.read_bar(bar, offset, done),
            Task::InterruptStatus { at } => self.read_interrupt_status(at),
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
        self.worker.post(job);
        self.tasks.waiting = Waiting::Worker;
    }

    fn take_steps(&mut self, event: Event) {
        // A borrow that was refused is not asked for at every access.
        if self.absent && matches!(event, Event::BarAccess) {
            return;
        }
        let steps = event.steps(self.state, || Setup {
            bar_files: self.bars.files(),
            irqs: self.vectors.configuration(MAX_FDS as u16),
            intx_disable: self.config.intx_disabled(),
            memory: self.memory.clone(),
        });
        if steps.is_empty() {
            return;
        }
        self.returning = steps.iter().any(|step| matches!(step, Step::Return));
        if self.returning {
            self.bars.let_go();
        }
        self.post(Job::Take(steps));
    }

    fn read_bar(&mut self, bar: u8, offset: u64, done: usize) {
        let left = self.buffer.len() - done;
        let Some(channel) = &mut self.registers else {
            return;
        };
        if left == 0 {
            return;
        }
        match registers::request_read(channel, bar, offset + done as u64, left) {
            Ok(Some(len)) => {
                let since = Instant::now();
                self.tasks.waiting = Waiting::Register { len, since };
                let done = done + len;
                self.tasks.push_front(Task::BarRead { bar, offset, done });
            }
            Ok(None) => {
                self.tasks.waiting = Waiting::Room;
                self.tasks.push_front(Task::BarRead { bar, offset, done });
            }
            Err(error) => self.lender_gone(&Chain(&error)),
        }
    }

    /// Without a lease there is no interrupt.
    fn read_interrupt_status(&mut self, at: usize) {
        let Some(channel) = &mut self.registers else {
            return;
        };
        match registers::request_interrupt_status(channel) {
            Ok(true) => {
                let since = Instant::now();
                self.tasks.waiting = Waiting::InterruptStatus { at, since };
            }
            Ok(false) => {
                self.tasks.waiting = Waiting::Room;
                self.tasks.push_front(Task::InterruptStatus { at });
            }
            Err(error) => self.lender_gone(&Chain(&error)),
        }
    }

    fn write_bar(&mut self, bar: u8, offset: u64, data: Vec<u8>, done: usize) {
        let Some(channel) = &mut self.registers else {
            return;
        };
        match registers::post_write(channel, bar, offset + done as u64, &data[done..]) {
            Ok(sent) if done + sent == data.len() => {}
            Ok(sent) => {
                self.tasks.waiting = Waiting::Room;
                let done = done + sent;
                self.tasks.push_front(Task::BarWrite {
                    bar,
                    offset,
                    data,
                    done,
                });
            }
            Err(error) => self.lender_gone(&Chain(&error)),
        }
    }

    pub(super) fn on_register_event(&mut self, event: RegisterEvent) {
        match event {
            RegisterEvent::Interrupt(fire) => self.vectors.deliver(fire),
            // The lender is asked for one piece at a time; an answer that
            // nobody waits for is to a client that has gone.
            RegisterEvent::Data { value } => match self.tasks.waiting {
                Waiting::Register { len, .. } => {
                    if let Some(Task::BarRead { done, .. }) = self.tasks.front()
                        && let Some(piece) = self.buffer.get_mut(done - len..*done)
                    {
                        piece.copy_from_slice(&value.to_le_bytes()[..len]);
                        self.tasks.finish_current();
                    }
                }
                Waiting::InterruptStatus { at, .. } => {
                    if value != 0
                        && let Some(byte) = self.buffer.get_mut(at)
                    {
                        *byte |= STATUS_INTERRUPT as u8;
                    }
                    self.tasks.finish_current();
                }
                Waiting::No | Waiting::Worker | Waiting::Room => {}
            },
        }
    }

    fn forget_client(&mut self) {
        self.memory = DmaTable::default();
        self.vectors.disable_all();
        self.vectors.reset();
        self.config.reset();
        self.absent = false;
        self.unplugged = false;
        match Bars::new(&self.described) {
            Ok(bars) => self.bars = bars,
            Err(error) => log::error!(
                "device {} (VM {}): no fresh memory for its BARs ({error}): the next client gets that of the last",
                self.settings.device,
                self.settings.vm
            ),
        }
    }
}
