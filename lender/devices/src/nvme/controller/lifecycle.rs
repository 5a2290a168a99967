//! From enable to disable: see [`super`].

use farside_fabric::Iova;

use super::Nvme;
use crate::{
    Bus,
    nvme::{
        features::Features,
        queues::{CompletionQueue, SubmissionQueue},
        registers::{Configuration, MAX_PAGE_SHIFT, Registers, Shutdown},
        reservation_log::ReservationLog,
        slots::Work,
    },
};

impl Nvme {
    pub(super) fn write_configuration(&mut self, value: u32, bus: &mut Bus<'_>) {
        let old = self.registers.cc;
        let new = Configuration(value & Configuration::WRITABLE);
        self.registers.cc = new;
        if new.shutdown() && !old.shutdown() {
            self.registers.csts.shutdown = Shutdown::Occurring;
        }
        match (old.enabled(), new.enabled()) {
            (false, true) if !self.draining => self.enable(),
            (true, false) => {
                self.draining = true;
                self.recovery = None;
                // Before counters of its queues are used anew.
                self.save();
            }
            _ => {}
        }
        self.advance(bus);
    }

    /// CC.EN was set (3.1.5). An invalid configuration is a fatal status.
    fn enable(&mut self) {
        let Registers { cc, asq, acq, .. } = self.registers;
        let sq_entries = self.registers.admin_sq_entries();
        let cq_entries = self.registers.admin_cq_entries();
        let page = cc.page_shift();
        let refused = if page > MAX_PAGE_SHIFT {
            Some("memory page size above CAP.MPSMAX")
        } else if cc.command_set() != 0 {
            Some("command set other than NVM")
        } else if cc.arbitration() != 0 {
            Some("arbitration other than round robin")
        } else if sq_entries < 2 || cq_entries < 2 {
            Some("admin queue of less than 2 entries")
        } else if (asq | acq) & (cc.page_size() - 1) != 0 {
            Some("admin queue not aligned to the memory page")
        } else {
            None
        };
        self.registers.csts.shutdown = Shutdown::None;
        if let Some(reason) = refused {
            self.log_guest_error(format_args!("cannot enable the controller: {reason}"));
            self.registers.csts.fatal = true;
            return;
        }
        self.begin_reservations();
        self.queues.clear();
        // AQA has 12-bit sizes: 4096 entries at most.
        self.queues.create_admin(
            SubmissionQueue::new(Iova::new(asq), sq_entries as u16, 0),
            CompletionQueue::new(Iova::new(acq), cq_entries as u16, Some(0)),
        );
        self.registers.csts.ready = true;
    }

    /// Advances a disable or shutdown.
    pub(super) fn advance(&mut self, bus: &mut Bus<'_>) {
        if self.registers.csts.shutdown == Shutdown::Occurring
            && !self.shutdown_flush
            && self.recovery.is_none()
            && self.slots.busy() == 0
            && !self.is_fenced()
            && self.block.may_take()
        {
            self.start_shutdown_flush();
        }
        if self.draining {
            match self.slots.busy() {
                0 => self.finish_disable(bus),
                _ => self.block.hurry(),
            }
        }
    }

    fn start_shutdown_flush(&mut self) {
        if self.namespace.read_only {
            self.registers.csts.shutdown = Shutdown::Complete;
            self.changed = true;
            return;
        }
        if let Some(tag) = self.slots.take() {
            self.slots[tag].work = Work::Shutdown;
            self.shutdown_flush = true;
            self.stats.flushes += 1;
            self.block.flush(tag);
            self.block.turn();
        }
    }

    /// No I/O is in flight: completes the controller reset (7.3.2).
    fn finish_disable(&mut self, bus: &mut Bus<'_>) {
        self.end_session();
        self.queues.update_line(bus.irq, 0);
    }

    pub(in crate::nvme) fn end_session(&mut self) {
        self.draining = false;
        self.forget_session();
        self.forget_abort();
        self.begin_reservations();
        self.registers.csts.ready = false;
        self.registers.csts.fatal = false;
        self.registers.csts.shutdown = Shutdown::None;
        if self.registers.cc.enabled() {
            // The guest did not wait for CSTS.RDY.
            self.enable();
        }
    }

    /// The common part of controller reset and function reset.
    pub(super) fn forget_session(&mut self) {
        self.queues.clear();
        self.events.clear();
        self.logs.namespace_changed = false;
        self.logs.reservations = ReservationLog::default();
        self.features = Features::new(self.vectors() - 1);
        self.registers.interrupt_mask = 0;
        self.queues.state.mask(0);
        self.queues.state.new_session();
        self.turn = 0;
        self.answered = None;
        self.flush_failed = false;
        self.recovery = None;
        self.changed = true;
    }
}
