//! A namespace that several controllers share, and its reservations (NVM Express 1.4, 8.8).
//!
//! Each controller is a process's, and the [file](file) is what they share. Before it fetches I/O commands, a controller looks
//! at the table's version. If that has changed, what is in flight was checked with a former table: the controller lets it
//! end, and reads the table, before it fetches more. So another controller knows when the I/O of a host that it has preempted
//! has ended: once each controller is idle, or has checked under the new version.

mod commands;
mod file;
mod table;

use std::time::{Duration, Instant};

pub use file::{FileError, ReservationFile};
pub use table::{Caller, Group, Host};

pub(super) use commands::{execute, persistence, set_persistence};

use super::{command::io, controller::Nvme, status::Status};
use crate::{Bus, state::Entry};
use table::Table;

/// Timeout for the I/O of preempted hosts to end, a third of what Linux gives a command.
const ABORTED: Duration = Duration::from_secs(10);

/// The controller's part of a shared namespace.
#[derive(Debug)]
pub struct Shared {
    file: ReservationFile,
    /// None if what is in the file is no table.
    table: Option<Table>,
    /// The version of `table`.
    seen: u64,
    /// It may have commands in flight, as far as others know.
    busy: bool,
    /// The device was reset, which the table does not show yet.
    was_reset: bool,
    /// A command that waits for the I/O of preempted hosts.
    aborting: Option<Aborting>,
}

#[derive(Clone, Copy, Debug)]
struct Aborting {
    sq_id: u16,
    command: (u16, Entry),
    version: u64,
    until: Instant,
}

impl Shared {
    /// The controller's part of what `file` has.
    ///
    /// # Errors
    /// [`FileError::Invalid`].
    pub fn new(file: ReservationFile) -> Result<Self, FileError> {
        let (table, seen) = file.read()?;
        // Until it is seen to have none: a process before this one had some.
        file.set_busy(true);
        file.set_checked(seen);
        Ok(Self {
            file,
            table: Some(table),
            seen,
            busy: true,
            was_reset: false,
            aborting: None,
        })
    }

    /// The controller's number in the NVM subsystem.
    pub fn controller(&self) -> u16 {
        self.file.controller()
    }

    /// The numbers of all controllers.
    pub fn controllers(&self) -> Vec<u16> {
        self.file.controllers()
    }

    /// Whether commands can be taken and checked with the table as it is here. `in_flight`: whether others are.
    fn take(&mut self, in_flight: bool) -> bool {
        if !self.busy {
            self.busy = true;
            self.file.set_busy(true);
        }
        let version = self.file.version();
        if version == self.seen {
            return true;
        }
        if in_flight {
            return false;
        }
        match self.file.read() {
            Ok((table, version)) => {
                (self.table, self.seen) = (Some(table), version);
                self.file.set_checked(version);
                true
            }
            // It changes all the time.
            Err(FileError::Locked) => false,
            Err(error) => {
                log::error!("I/O on a shared namespace fails: {error}");
                (self.table, self.seen) = (None, version);
                true
            }
        }
    }

    /// Nothing is in flight.
    fn rest(&mut self) {
        if self.busy {
            self.busy = false;
            self.file.set_busy(false);
        }
    }

    /// Changes the table where no command can be told of a failure.
    fn tidy(&self, tidy: impl FnOnce(&mut Table, u16)) {
        let controller = self.controller();
        let tidied = self.file.change(|table| {
            tidy(table, controller);
            Ok::<(), Status>(())
        });
        if let Err(error) = tidied {
            log::warn!("reservations of controller {controller} are not up to date: {error}");
        }
    }
}

impl Nvme {
    /// Whether reservations let the controller fetch I/O commands now.
    pub(super) fn reservations_admit(&mut self) -> bool {
        let in_flight = self.slots.busy() > 0;
        let shared = self.shared.as_mut();
        shared.is_none_or(|shared| shared.take(in_flight))
    }

    /// Whether they would, without taking any.
    pub(super) fn reservations_would_admit(&self) -> bool {
        let in_flight = self.slots.busy() > 0;
        let is_known = |shared: &Shared| shared.file.version() == shared.seen;
        !in_flight || self.shared.as_ref().is_none_or(is_known)
    }

    /// Whether the reservation lets an I/O command be executed.
    pub(super) fn check_reservation(&self, opcode: u8) -> Result<(), Status> {
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        let group = match opcode {
            io::READ | io::COMPARE | io::VERIFY => Group::Read,
            io::WRITE | io::WRITE_ZEROES | io::DATASET_MANAGEMENT | io::FLUSH => Group::Write,
            _ => return Ok(()),
        };
        let table = shared.table.as_ref().ok_or(Status::INTERNAL_ERROR)?;
        match table.allows(self.caller(shared).host, group) {
            true => Ok(()),
            false => Err(Status::RESERVATION_CONFLICT),
        }
    }

    /// As [`Nvme::check_reservation`], for an admin command that changes the namespace.
    pub(super) fn check_reservation_to_format(&mut self) -> Result<(), Status> {
        match self.reservations_admit() {
            true => self.check_reservation(io::WRITE),
            false => Err(Status::COMMAND_INTERRUPTED),
        }
    }

    fn caller(&self, shared: &Shared) -> Caller {
        let controller = shared.controller();
        Caller {
            controller,
            host: match self.features.host_identifier() {
                (0, _) => Host::OfController(controller),
                (id, extended) => Host::Named(id, extended),
            },
        }
    }

    /// Tells other controllers if nothing is in flight.
    pub(super) fn rest(&mut self) {
        if self.slots.busy() == 0
            && let Some(shared) = &mut self.shared
        {
            shared.rest();
        }
    }

    /// Completes a command that has waited for the I/O of preempted hosts. Returns whether it did.
    pub(super) fn finish_abort(&mut self, bus: &mut Bus<'_>) -> bool {
        self.rest();
        let Some(shared) = self.shared.as_mut().filter(|_| !self.draining) else {
            return false;
        };
        let Some(waiting) = shared.aborting else {
            return false;
        };
        let is_late = Instant::now() >= waiting.until;
        if !is_late && !shared.file.others_have_checked(waiting.version) {
            return false;
        }
        shared.aborting = None;
        // The hosts are preempted; their I/O may not have ended.
        let result = if is_late {
            Err(Status::INTERNAL_ERROR)
        } else {
            Ok(0)
        };
        self.complete(bus, waiting.sq_id, waiting.command, result, None);
        true
    }

    /// Whether a command waits for other controllers, which wake nobody.
    pub(super) fn is_aborting(&self) -> bool {
        let shared = self.shared.as_ref();
        shared.is_some_and(|shared| shared.aborting.is_some())
    }

    /// The controller is reset.
    pub(super) fn forget_reservations(&mut self) {
        if let Some(shared) = &mut self.shared {
            shared.aborting = None;
            shared.was_reset = false;
            shared.tidy(Table::forget_controller);
        }
    }

    /// The device is reset: as its lease begins, before it is known whether it goes on from a former process's state, as it
    /// ends, or by its guest. Only a guest that enables the controller anew shows that it does not go on.
    pub(super) fn note_reset(&mut self) {
        if let Some(shared) = &mut self.shared {
            shared.aborting = None;
            shared.was_reset = true;
        }
    }

    /// The controller goes on from the state of a process before this one.
    pub(super) fn reservations_go_on(&mut self) {
        if let Some(shared) = &mut self.shared {
            shared.was_reset = false;
        }
    }

    /// The guest enables the controller.
    pub(super) fn reservations_begin(&mut self) {
        if self.shared.as_ref().is_some_and(|shared| shared.was_reset) {
            self.forget_reservations();
        }
    }

    /// All that a process before this one had in flight has been taken up.
    pub(super) fn reservations_recovered(&self) {
        if let Some(shared) = &self.shared {
            shared.tidy(Table::forget_executed);
        }
    }
}
