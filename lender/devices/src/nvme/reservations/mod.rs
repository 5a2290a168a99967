//! A namespace that several controllers share, and its reservations (NVM Express 1.4, 8.8).
//!
//! Each controller is a process's, and the [file](file) is what they share. Before it fetches I/O commands, a controller looks
//! at the table's version. If that has changed, what is in flight was checked with a former table: the controller lets it
//! end, and reads the table, before it fetches more. So another controller knows when the I/O of a host that it has preempted
//! has ended: once each controller is idle, or has checked under the new version.
//!
//! Notifications of other hosts' changes are in the table, too. A controller looks for them when its version is new: with its
//! I/O, and at intervals while it is idle.
//!
//! Of a controller at a borrower in another host, the [lender's half](lent) of the medium does that, with the operations that
//! commands become.

mod commands;
mod file;
mod lent;
mod notifications;
mod sharer;
mod table;

pub use file::{FileError, ReservationFile};
pub use lent::{Lent, MAX_REQUEST};
pub use notifications::{Batch, Notification};
pub use table::{Caller, Group, Host};

pub(super) use commands::{execute, persistence, set_persistence};

use std::time::Duration;

use farside_medium::HostIdentity;
use sharer::Sharer;

use super::{
    command::io,
    config::{Config, ConfigError},
    controller::Nvme,
    events::Event,
    features::RESERVATIONS_MASKED,
    slots::Work,
    status::Status,
};
use crate::{Bus, state::Entry};

/// Time between two looks of an idle controller for notifications, of which nothing else wakes it.
const LOOK: Duration = Duration::from_secs(1);

/// How a controller shares its namespace.
#[derive(Debug)]
pub enum Shared {
    /// With the file.
    Here {
        /// Its part of that.
        sharer: Box<Sharer>,
        /// The command that waits for the I/O of preempted hosts, and its queue.
        aborting: Option<(u16, (u16, Entry))>,
    },
    /// The lender of its medium has that.
    Lent {
        /// The controller's number in the NVM subsystem.
        controller: u16,
    },
}

impl Shared {
    /// The controller's number in the NVM subsystem.
    pub fn controller(&self) -> u16 {
        match self {
            Self::Here { sharer, .. } => sharer.controller(),
            Self::Lent { controller } => *controller,
        }
    }

    /// The numbers of all controllers, as far as this one knows them.
    pub fn controllers(&self) -> Vec<u16> {
        match self {
            Self::Here { sharer, .. } => sharer.controllers(),
            Self::Lent { controller } => vec![*controller],
        }
    }

    fn here(&self) -> Option<&Sharer> {
        match self {
            Self::Here { sharer, .. } => Some(sharer),
            Self::Lent { .. } => None,
        }
    }

    fn here_mut(&mut self) -> Option<&mut Sharer> {
        match self {
            Self::Here { sharer, .. } => Some(sharer),
            Self::Lent { .. } => None,
        }
    }
}

/// The caller, of a controller and what it says of its host.
fn caller_of(controller: u16, host: HostIdentity) -> Caller {
    Caller {
        controller,
        host: match host {
            HostIdentity { id: 0, session, .. } => Host::OfController {
                controller,
                session,
            },
            HostIdentity { id, extended, .. } => Host::Named(id, extended),
        },
    }
}

impl Nvme {
    /// Shares its namespace with the other controllers of `file`, of the same configuration.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Reservations`].
    pub fn sharing(mut self, config: &Config, file: ReservationFile) -> Result<Self, ConfigError> {
        let uuid = file.uuid();
        let sharer = Sharer::new(file);
        let shared = Shared::Here {
            sharer: Box::new(sharer.map_err(|source| config.reservations_failed(source))?),
            aborting: None,
        };
        self.share(config, shared, uuid);
        Ok(self)
    }

    /// Shares the namespace `uuid`, of the same configuration, as the controller of this number, with others that the lender of its
    /// medium knows.
    pub(crate) fn sharing_remotely(
        mut self,
        config: &Config,
        (controller, uuid): (u16, [u8; 16]),
    ) -> Self {
        self.share(config, Shared::Lent { controller }, uuid);
        self
    }

    fn share(&mut self, config: &Config, shared: Shared, uuid: [u8; 16]) {
        self.namespace.uuid = uuid;
        if config.serial.is_none() {
            // Controllers of one subsystem have one serial number.
            let bytes = uuid[..10].iter();
            self.names.serial = bytes.map(|byte| format!("{byte:02x}")).collect();
        }
        self.shared = Some(shared);
    }

    fn sharer(&self) -> Option<&Sharer> {
        self.shared.as_ref().and_then(Shared::here)
    }

    fn sharer_mut(&mut self) -> Option<&mut Sharer> {
        self.shared.as_mut().and_then(Shared::here_mut)
    }

    /// Whether reservations let the controller fetch I/O commands now.
    pub(super) fn reservations_admit(&mut self) -> bool {
        let in_flight = self.slots.busy() > 0;
        let is_new = self.recovery.is_none();
        let Some(sharer) = self.sharer_mut() else {
            return true;
        };
        let taken = sharer.take(in_flight);
        if taken
            && is_new
            && let Some(number) = sharer.unsettled()
        {
            // The controller has let end what it had in flight.
            sharer.settle(number);
        }
        taken
    }

    /// Whether the commands that a process before this one had in flight were aborted since: they are not executed again.
    pub(super) fn was_preempted(&self) -> bool {
        self.sharer().is_some_and(|sharer| {
            let caller = self.caller(sharer.controller());
            sharer.has_aborted(caller, sharer.settled())
        })
    }

    /// Whether they would, without taking any.
    pub(super) fn reservations_would_admit(&self) -> bool {
        let in_flight = self.slots.busy() > 0;
        self.sharer().is_none_or(|it| it.would_take(in_flight))
    }

    /// Whether the reservation lets an I/O command be executed.
    pub(super) fn check_reservation(&self, opcode: u8) -> Result<(), Status> {
        let Some(sharer) = self.sharer() else {
            return Ok(());
        };
        let group = match opcode {
            io::READ | io::COMPARE | io::VERIFY => Group::Read,
            io::WRITE | io::WRITE_ZEROES | io::DATASET_MANAGEMENT | io::FLUSH => Group::Write,
            _ => return Ok(()),
        };
        sharer.check(self.caller(sharer.controller()), group)
    }

    /// As [`Nvme::check_reservation`], for an admin command that changes the namespace.
    pub(super) fn check_reservation_to_format(&mut self) -> Result<(), Status> {
        match !self.is_fenced() && self.reservations_admit() {
            true => self.check_reservation(io::WRITE),
            false => Err(Status::COMMAND_INTERRUPTED),
        }
    }

    fn identity(&self) -> HostIdentity {
        let (id, extended) = self.features.host_identifier();
        HostIdentity {
            id,
            extended,
            session: self.queues.state.session(),
        }
    }

    fn caller(&self, controller: u16) -> Caller {
        caller_of(controller, self.identity())
    }

    /// Tells other controllers if nothing is in flight.
    pub(super) fn rest(&mut self) {
        if self.slots.busy() == 0
            && let Some(sharer) = self.sharer_mut()
        {
            sharer.rest();
        }
    }

    /// Completes a command that has waited for the I/O of preempted hosts. Returns whether it did.
    pub(super) fn finish_abort(&mut self, bus: &mut Bus<'_>) -> bool {
        self.rest();
        let draining = self.draining;
        let Some(Shared::Here { sharer, aborting }) = &mut self.shared else {
            return false;
        };
        let Some((sq_id, command)) = aborting.filter(|_| !draining) else {
            return false;
        };
        let Some(result) = sharer.aborted() else {
            return false;
        };
        *aborting = None;
        self.complete(bus, sq_id, command, result, None);
        true
    }

    /// Whether a command waits for other controllers, which wake nobody.
    pub(super) fn is_aborting(&self) -> bool {
        self.sharer().is_some_and(Sharer::is_aborting)
    }

    /// The controller is reset: nothing waits for others.
    pub(super) fn forget_abort(&mut self) {
        if let Some(Shared::Here { sharer, aborting }) = &mut self.shared {
            *aborting = None;
            sharer.forget_abort();
        }
    }

    /// A session has begun with a reset of the controller: what belonged to no named host goes.
    pub(super) fn begin_reservations(&mut self) {
        let session = self.queues.state.session();
        if let Some(sharer) = self.sharer_mut() {
            sharer.begin_session(session);
        }
        self.tell_host();
    }

    /// Whether another host has aborted commands, as the lender of the medium says, which have not all ended yet.
    pub(super) fn is_fenced(&self) -> bool {
        matches!(self.shared, Some(Shared::Lent { .. })) && self.block.wants_fence()
    }

    /// Has those commands end, and tells the lender when none is left that it would be sent again: over another connection, or by
    /// a process that follows this one.
    pub(super) fn fence(&mut self) {
        if !self.is_fenced() {
            return;
        }
        self.block.abort(Status::ABORTED_BY_PREEMPTING.bits());
        let is_left = |work: Work| !matches!(work, Work::Free | Work::Reserve | Work::Report);
        if self.recovery.is_none() && !self.slots.are_any(is_left) {
            self.block.fence();
        }
    }

    /// Tells the lender of a medium on whose behalf operations are, and which notifications that host has.
    pub(super) fn tell_host(&mut self) {
        if let Some(Shared::Lent { .. }) = self.shared {
            self.block.set_host(self.identity());
            self.block.set_notified(self.logs.reservations.upto);
        }
    }

    /// Takes notifications for the guest's host into the log. Returns whether there were any.
    pub(super) fn take_notifications(&mut self) -> bool {
        if self.shared.is_none() || !self.is_running() {
            return false;
        }
        let (host, upto) = (self.identity(), self.logs.reservations.upto);
        let batch = match &mut self.shared {
            None => return false,
            Some(Shared::Here { sharer, .. }) => {
                let host = caller_of(sharer.controller(), host).host;
                sharer.notifications(host, upto)
            }
            Some(Shared::Lent { .. }) => self.block.take_notifications().map(Batch::from),
        };
        let Some(batch) = batch else {
            return false;
        };
        self.changed = true;
        let mask = self.features.reservation_mask;
        if self.logs.reservations.add(&batch, mask) {
            self.events.raise(Event::ReservationLog);
        }
        if let Some(Shared::Lent { .. }) = self.shared {
            self.block.set_notified(Some(batch.upto));
        }
        true
    }

    /// When to look for notifications although nothing wakes the controller.
    pub(super) fn looks_for_notifications(&self) -> Option<Duration> {
        let mask = self.features.reservation_mask;
        let looks = self.sharer().is_some() && self.is_running() && mask != RESERVATIONS_MASKED;
        looks.then_some(LOOK)
    }
}
