//! A controller's part of a shared namespace, at the medium: in the controller's process, or at the lender's end of a
//! connection over which the controller's operations come.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{
    file::{FileError, ReservationFile},
    notifications::Batch,
    table::{Acquire, Caller, Group, Host, Kind, Registration, Release, Table},
};
use crate::nvme::status::Status;

/// Timeout for the I/O of preempted hosts to end, a third of what Linux gives a command.
const ABORTED: Duration = Duration::from_secs(10);

/// What a host asks for, but for a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Reservation Register.
    Register {
        action: Registration,
        /// Persist through power loss, if that changes.
        persists: Option<bool>,
    },
    /// Reservation Acquire.
    Acquire {
        current: u64,
        action: Acquire,
        kind: Kind,
    },
    /// Reservation Release.
    Release { current: u64, action: Release },
    /// Whether reservations persist through power loss (feature 83h, 5.21.1.27).
    Persists,
    /// Sets that, by a registrant.
    SetPersists(bool),
}

/// What became of a [`Request`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executed {
    /// Done, with dword 0 of the completion.
    Done(u32),
    /// Done, once [`Sharer::aborted`] says so.
    Aborting,
}

/// A controller's part of what the file has.
#[derive(Debug)]
pub struct Sharer {
    file: ReservationFile,
    /// None if what is in the file is no table.
    table: Option<Table>,
    /// The version of `table`.
    seen: u64,
    /// It may have commands in flight, as far as others know.
    busy: bool,
    /// The session that has begun, which the table does not show yet.
    begun: Option<u32>,
    /// Nothing is in flight that was before the last abort.
    is_settled: bool,
    /// A command waits for the I/O of hosts that were preempted with this version, until then.
    aborting: Option<(u64, Instant)>,
    /// The version of the table from which all notifications were taken.
    notified: Option<u64>,
}

impl Sharer {
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
            begun: None,
            is_settled: false,
            aborting: None,
            notified: None,
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
    pub fn take(&mut self, in_flight: bool) -> bool {
        if let Some(session) = self.begun {
            self.begin_session(session);
        }
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
                self.is_settled = false;
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

    /// Whether [`Sharer::take`] would return true, without taking any.
    pub fn would_take(&self, in_flight: bool) -> bool {
        !in_flight || self.file.version() == self.seen
    }

    /// Nothing is in flight.
    pub fn rest(&mut self) {
        if self.busy {
            self.busy = false;
            self.file.set_busy(false);
        }
    }

    /// Whether the caller's command may be executed.
    ///
    /// # Errors
    /// The status that it gets instead.
    pub fn check(&self, caller: Caller, group: Group) -> Result<(), Status> {
        let table = self.table.as_ref().ok_or(Status::INTERNAL_ERROR)?;
        match table.allows(caller.host, group) {
            true => Ok(()),
            false => Err(Status::RESERVATION_CONFLICT),
        }
    }

    /// The number of the last abort, unless it is known that nothing is in flight that was before that.
    pub fn unsettled(&self) -> Option<u64> {
        self.aborts().filter(|_| !self.is_settled)
    }

    /// The number of the last abort; none if there is no table.
    pub fn aborts(&self) -> Option<u64> {
        self.table.as_ref().map(Table::aborts)
    }

    /// The number that [`Sharer::settle`] had last, also in a process before this one.
    pub fn settled(&self) -> u64 {
        self.file.settled()
    }

    /// Whether commands of the caller's host were aborted after the abort with this number.
    pub fn has_aborted(&self, caller: Caller, after: u64) -> bool {
        let table = self.table.as_ref();
        table.is_some_and(|it| it.has_aborted(caller.host, after))
    }

    /// Nothing is in flight that was before the abort with this number.
    pub fn settle(&mut self, number: u64) {
        self.file.set_settled(number);
        self.is_settled = self.table.as_ref().is_none_or(|it| it.aborts() == number);
    }

    /// The notifications of `host` after the one with this number; `None` if the table has not changed since all were returned,
    /// which costs one load.
    pub fn notifications(&mut self, host: Host, after: Option<u64>) -> Option<Batch> {
        let version = self.file.version();
        if after.is_some() && self.notified == Some(version) {
            return None;
        }
        let (table, version) = match self.file.read() {
            Ok(read) => read,
            Err(FileError::Locked) => return None,
            // I/O reports it.
            Err(_) => {
                self.notified = Some(version);
                return None;
            }
        };
        let batch = table.notifications(host, after);
        if !batch.is_full() {
            self.notified = Some(version);
        }
        (after != Some(batch.upto)).then_some(batch)
    }

    /// Executes the request with this sequence number, unless that was done, by a process that was killed or over a connection that
    /// was cut before the answer. No other request has this number; 0 is that of a
    /// controller that nobody goes on with.
    ///
    /// # Errors
    /// The command's status.
    pub fn execute(
        &mut self,
        caller: Caller,
        number: u64,
        request: Request,
    ) -> Result<Executed, Status> {
        if request == Request::Persists {
            return Ok(Executed::Done(self.read()?.persists().into()));
        }
        // The table has the number of one command that has changed it, and that one may come again.
        if self.aborting.is_some() {
            return Err(Status::COMMAND_INTERRUPTED);
        }
        let changed = self.file.change(|table| {
            if number != 0 && table.was_executed(caller.controller, number) {
                return Ok(());
            }
            change(table, caller, request)?;
            if number != 0 {
                table.set_executed(caller.controller, number);
            }
            Ok(())
        });
        let version = changed.map_err(|error| status_of(&error))??;
        match request {
            Request::Acquire {
                action: Acquire::Preempt { aborts: true, .. },
                ..
            } => {
                self.aborting = Some((version, Instant::now() + ABORTED));
                Ok(Executed::Aborting)
            }
            _ => Ok(Executed::Done(0)),
        }
    }

    /// The data structure of Reservation Report.
    ///
    /// # Errors
    /// The command's status.
    pub fn report(&self, extended: bool) -> Result<Vec<u8>, Status> {
        self.read()?.report(extended)
    }

    fn read(&self) -> Result<Table, Status> {
        let table = self.file.read();
        Ok(table.map_err(|error| status_of(&error))?.0)
    }

    /// Whether a command waits for other controllers, which wake nobody.
    pub fn is_aborting(&self) -> bool {
        self.aborting.is_some()
    }

    /// The result of the command that has waited, once.
    pub fn aborted(&mut self) -> Option<Result<u32, Status>> {
        let (version, until) = self.aborting?;
        let is_late = Instant::now() >= until;
        if !is_late && !self.file.others_have_checked(version) {
            return None;
        }
        self.aborting = None;
        // The hosts are preempted; their I/O may not have ended.
        Some(match is_late {
            true => Err(Status::INTERNAL_ERROR),
            false => Ok(0),
        })
    }

    /// No command waits any more: the controller is reset.
    pub fn forget_abort(&mut self) {
        self.aborting = None;
    }

    /// The controller was reset, with which this session has begun.
    pub fn begin_session(&mut self, session: u32) {
        let controller = self.controller();
        let begin = |table: &mut Table| {
            table.begin_session(controller, session);
            Ok::<(), Status>(())
        };
        // Without the lock, which others may want, if nothing changes.
        let tidied = self.file.read().and_then(|(mut table, _)| {
            let before = table.clone();
            table.begin_session(controller, session);
            match table == before {
                true => Ok(()),
                false => self.file.change(begin).map(drop),
            }
        });
        // Else once more, before the next command.
        self.begun = tidied.is_err().then_some(session);
        if let Err(error) = tidied {
            log::warn!("reservations of controller {controller} are not up to date: {error}");
        }
    }
}

fn change(table: &mut Table, caller: Caller, request: Request) -> Result<(), Status> {
    match request {
        Request::Register { action, persists } => {
            table.register(caller, action)?;
            if let Some(persists) = persists {
                table.set_persists(persists);
            }
            Ok(())
        }
        Request::Acquire {
            current,
            action,
            kind,
        } => table.acquire(caller, current, (action, kind)),
        Request::Release { current, action } => table.release(caller.host, current, action),
        Request::SetPersists(persists) => {
            table.check_registered(caller.host)?;
            table.set_persists(persists);
            Ok(())
        }
        Request::Persists => Ok(()),
    }
}

fn status_of(error: &FileError) -> Status {
    match error {
        FileError::Locked => Status::COMMAND_INTERRUPTED,
        error => {
            log::warn!("reservations: {error}");
            Status::INTERNAL_ERROR
        }
    }
}
