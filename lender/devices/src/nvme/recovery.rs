//! Going on with what a process before this one has left: see [`crate::state`].
//!
//! Registers and queues are restored at once; the commands in flight when the device can reach guest memory again,
//! before anything is fetched. A command whose completion the guest may have is done. The others are executed
//! (again), in the order in which they were fetched: the guest has started nothing after their completion. But for
//! Format, which may not be done to what was written since: it completes with a status that asks for a retry.

use farside_fabric::memory::HostSlice;

use super::{
    command::{Command, admin, io},
    controller::Nvme,
    events::Event,
    features::Features,
    registers::{Configuration, Shutdown},
    reservation_log::ReservationLog,
    saved::{Answered, Saved},
    status::Status,
};
use crate::{
    Bus,
    state::{InFlight, Restored, StateError, has_grown},
};

impl Nvme {
    /// Keeps the state in `memory`; see [`Device::set_state`](crate::Device::set_state).
    pub(super) fn keep_in(&mut self, memory: HostSlice, resume: bool) -> Result<bool, StateError> {
        let Some(restored) = self.queues.state.keep_in(memory, resume)? else {
            self.save();
            return Ok(false);
        };
        let done = self.restore(restored);
        if done.is_err() {
            self.queues.state.detach();
        }
        done.map(|()| true)
    }

    /// Saves what has changed, but for the doorbells and the commands in flight.
    pub(super) fn save_changes(&mut self) {
        if self.queues.take_changed() | std::mem::take(&mut self.changed) {
            self.save();
        }
    }

    pub(super) fn save(&mut self) {
        self.save_answer(self.answered);
    }

    /// Saves the result of an admin command with all that it has changed.
    pub(super) fn save_answer(&mut self, answered: Option<Answered>) {
        self.changed = false;
        self.answered = answered;
        if !self.queues.state.is_kept() {
            return;
        }
        let registers = &self.registers;
        let [errors, health, notices, reservations] = self.events.masked();
        let mut saved = Saved {
            cc: registers.cc.0,
            ready: registers.csts.ready,
            fatal: registers.csts.fatal,
            shutdown: registers.csts.shutdown as u8,
            aqa: registers.aqa,
            asq: registers.asq,
            acq: registers.acq,
            draining: self.draining,
            features: self.features.saved(),
            masked_events: [errors, health],
            masked_notices: notices,
            masked_reservations: reservations,
            pending_reservations: self.events.is_pending(Event::ReservationLog),
            reservation_log: self.logs.reservations.saved(),
            size: self.namespace.size(),
            namespace_changed: self.logs.namespace_changed,
            msix_table: self.msix_table.to_vec(),
            answered,
            flush_failed: self.flush_failed,
            cmb_control: self.cmb.as_ref().map_or(0, |cmb| cmb.control),
            host_identifier: self.features.host_identifier().0,
            extended_identifier: self.features.host_identifier().1,
            reservation_mask: self.features.reservation_mask,
            ..Saved::default()
        };
        self.queues.save(&mut saved);
        self.queues.state.save(saved);
    }

    fn restore(&mut self, restored: Restored<Saved>) -> Result<(), StateError> {
        let Restored {
            saved,
            mask,
            words,
            in_flight,
            ..
        } = restored;
        let has_grown = has_grown(saved.size, self.namespace.size())?;
        let registers = &mut self.registers;
        registers.cc = Configuration(saved.cc & Configuration::WRITABLE);
        registers.csts.ready = saved.ready;
        registers.csts.fatal = saved.fatal;
        registers.csts.shutdown = match saved.shutdown {
            0 => Shutdown::None,
            1 => Shutdown::Occurring,
            2 => Shutdown::Complete,
            _ => return Err(StateError::Invalid("the shutdown status")),
        };
        registers.aqa = saved.aqa & 0x0fff_0fff;
        registers.asq = saved.asq & !0xfff;
        registers.acq = saved.acq & !0xfff;
        registers.interrupt_mask = mask;
        if let Some(cmb) = &mut self.cmb {
            cmb.set_control(saved.cmb_control);
        }
        if saved.msix_table.len() != self.msix_table.len() {
            return Err(StateError::Invalid("the size of the MSI-X table"));
        }
        self.msix_table.copy_from_slice(&saved.msix_table);
        if saved.draining {
            // Nothing is in flight any more.
            self.end_session();
            self.save();
            return Ok(());
        }
        self.features = Features::restored(self.vectors() - 1, &saved.features);
        // Nothing was set before.
        let _ = self
            .features
            .set_host_identifier(saved.host_identifier, saved.extended_identifier);
        self.features.reservation_mask = saved.reservation_mask;
        if !saved.ready {
            return Ok(());
        }
        self.logs.reservations = ReservationLog::restored(&saved.reservation_log);
        self.tell_host();
        if saved.sqs.is_empty() || saved.cqs.is_empty() {
            return Err(StateError::Invalid(
                "a controller is ready without admin queues",
            ));
        }
        let [errors, health] = saved.masked_events;
        self.events.set_masked([
            errors,
            health,
            saved.masked_notices,
            saved.masked_reservations,
        ]);
        if saved.pending_reservations {
            self.events.raise(Event::ReservationLog);
        }
        self.logs.namespace_changed = saved.namespace_changed;
        if has_grown {
            self.note_change();
        } else if saved.namespace_changed {
            self.raise_change();
        }
        self.answered = saved.answered;
        self.flush_failed = saved.flush_failed;
        let limits = (self.page_size(), self.vectors());
        self.queues.restore(&saved, &words, limits)?;
        let is_open = |it: &InFlight| is_open_request(it, saved.answered);
        self.recovery = Some(self.queues.take_in_flight(in_flight, is_open)?);
        Ok(())
    }

    /// Whether commands that were in flight can be taken up now.
    pub(super) fn can_recover(&self, bus: &Bus<'_>) -> bool {
        let csts = self.registers.csts;
        self.recovery.is_some()
            && csts.ready
            && !csts.fatal
            && !self.quiesced
            && bus.dma.is_bus_master()
    }

    /// Takes up the commands that were in flight, if the device can reach guest memory. Returns whether it did.
    pub(super) fn recover(&mut self, bus: &mut Bus<'_>) -> bool {
        if !self.can_recover(bus) || !self.reservations_admit() {
            return false;
        }
        let mut commands = self.recovery.take().unwrap_or_default();
        let mut fault = None;
        // All before any completion is posted.
        commands.retain(
            |command| match self.queues.was_completed(bus.dma, command) {
                Ok(done) => !done,
                Err(error) => {
                    fault = Some(error);
                    true
                }
            },
        );
        if let Some(fault) = fault {
            self.fatal(fault);
            return true;
        }
        if !commands.is_empty() {
            let (serial, count) = (&self.names.serial, commands.len());
            log::info!("NVMe {serial}: {count} commands that were in flight are taken up");
        }
        let preempted = self.was_preempted();
        self.recovering = true;
        let answered = self.answered;
        for command in commands {
            self.take_up(&command, answered, preempted, bus);
        }
        self.recovering = false;
        self.queues.interrupt_all();
        true
    }

    fn take_up(
        &mut self,
        it: &InFlight,
        answered: Option<Answered>,
        preempted: bool,
        bus: &mut Bus<'_>,
    ) {
        let command = Command::from_bytes(&it.command);
        let (id, entry) = (command.id(), it.entry);
        if is_open_request(it, answered) {
            if !self.events.open(id, entry) {
                self.queues.state.release(entry);
            }
            return;
        }
        let answer = answered.filter(|answer| it.queue == 0 && answer.sequence == entry.sequence);
        if let Some(Answered { result, status, .. }) = answer {
            return self.post(bus, it.queue, (id, entry), result, Status::restored(status));
        }
        let refused = match (it.queue, command.opcode()) {
            (0, admin::FORMAT_NVM) => Some(Status::COMMAND_INTERRUPTED),
            (1.., opcode) if preempted && !io::is_of_reservations(opcode) => {
                let conflict = self.check_reservation(opcode).err();
                Some(conflict.unwrap_or(Status::ABORTED_BY_PREEMPTING))
            }
            (1.., io::FLUSH) if self.flush_failed => Some(Status::WRITE_FAULT),
            _ => None,
        };
        match refused {
            Some(status) => self.complete(bus, it.queue, (id, entry), Err(status), None),
            None => self.execute(it.queue, &command, entry, bus),
        }
    }
}

/// Whether a command is an event request without a result.
fn is_open_request(it: &InFlight, answered: Option<Answered>) -> bool {
    let opcode = Command::from_bytes(&it.command).opcode();
    let has_result = answered.is_some_and(|answer| answer.sequence == it.entry.sequence);
    it.queue == 0 && opcode == admin::ASYNC_EVENT_REQUEST && it.completion.is_none() && !has_result
}
