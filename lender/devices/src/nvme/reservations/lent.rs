//! Reservations at the lender's end of a connection: each operation on the medium is checked, whatever the borrower says.

use farside_medium::HostIdentity;

use super::{
    caller_of,
    file::{FileError, ReservationFile},
    sharer::{Executed, Request, Sharer},
    table::Group,
};
use crate::nvme::status::Status;

/// Most bytes of an encoded request.
pub const MAX_REQUEST: usize = 64;

/// A request, and its sequence number: see [`Sharer::execute`].
pub(super) fn encode(number: u64, request: Request) -> Result<Vec<u8>, Status> {
    postcard::to_allocvec(&(number, request)).map_err(|_| Status::INTERNAL_ERROR)
}

/// The part of a borrower's controller.
#[derive(Debug)]
pub struct Lent {
    sharer: Sharer,
    host: HostIdentity,
}

impl Lent {
    /// The controller's part of what `file` has.
    ///
    /// # Errors
    /// [`FileError::Invalid`].
    pub fn new(file: ReservationFile) -> Result<Self, FileError> {
        Ok(Self {
            sharer: Sharer::new(file)?,
            host: HostIdentity::default(),
        })
    }

    /// On whose behalf the operations are that come from now on.
    pub fn set_host(&mut self, host: HostIdentity) {
        self.host = host;
        self.sharer.begin_session(host.session);
    }

    /// See [`Sharer::take`].
    pub fn take(&mut self, in_flight: bool) -> bool {
        self.sharer.take(in_flight)
    }

    /// See [`Sharer::would_take`].
    pub fn would_take(&self, in_flight: bool) -> bool {
        self.sharer.would_take(in_flight)
    }

    /// See [`Sharer::rest`].
    pub fn rest(&mut self) {
        self.sharer.rest();
    }

    /// Whether an operation may be started.
    ///
    /// # Errors
    /// The bits of the status that the borrower's command gets.
    pub fn check(&self, group: Group) -> Result<(), u16> {
        let caller = caller_of(self.sharer.controller(), self.host);
        self.sharer.check(caller, group).map_err(Status::bits)
    }

    /// Executes an encoded request. `None`: once [`Lent::aborted`] says so.
    ///
    /// # Errors
    /// As [`Lent::check`].
    pub fn execute(&mut self, request: &[u8]) -> Result<Option<u32>, u16> {
        let caller = caller_of(self.sharer.controller(), self.host);
        let request = postcard::from_bytes(request).map_err(|_| Status::INVALID_FIELD);
        let executed = request.and_then(|(number, it)| self.sharer.execute(caller, number, it));
        match executed.map_err(Status::bits)? {
            Executed::Done(result) => Ok(Some(result)),
            Executed::Aborting => Ok(None),
        }
    }

    /// See [`Sharer::report`].
    ///
    /// # Errors
    /// As [`Lent::check`].
    pub fn report(&self, extended: bool) -> Result<Vec<u8>, u16> {
        self.sharer.report(extended).map_err(Status::bits)
    }

    /// See [`Sharer::aborted`].
    pub fn aborted(&mut self) -> Option<Result<u32, u16>> {
        let result = self.sharer.aborted()?;
        Some(result.map_err(Status::bits))
    }
}
