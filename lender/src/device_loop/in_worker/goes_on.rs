//! Whether a lease goes on without its worker.

use super::WorkerLease;
use crate::{device_loop::end::has_hung_up, worker::Borrower};

impl WorkerLease<'_> {
    /// Whether a lease whose worker is gone may go on: the borrower has the secret of its chain, and is there.
    pub(super) fn may_go_on(&self) -> bool {
        if !self.device.may_go_on(self.function.as_ref()) {
            return false;
        }
        match (&self.connection, self.chain) {
            (Some(Borrower::Lent(_)), _) => true,
            (Some(Borrower::Asking(connection)), Some(chain)) => {
                (self.begun || chain.goes_on) && !has_hung_up(connection)
            }
            // It may have gone, or wait for the device.
            (None, Some(_)) => self.leased,
            _ => false,
        }
    }
}
