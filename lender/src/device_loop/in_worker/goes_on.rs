//! Whether a lease goes on without its worker.

use farside_lender_protocol::Revocation;

use super::{Waiting, WorkerLease};
use crate::{
    device_loop::end::has_hung_up,
    registry::{GrantedChain, Release},
    worker::Borrower,
};

impl WorkerLease<'_> {
    /// Whether a lease whose worker is gone may go on: the borrower has the secret of its chain, and is there.
    pub(super) fn may_go_on(&self) -> bool {
        if !self.device.may_go_on(self.running.as_ref()) {
            return false;
        }
        match (&self.connection, self.chain) {
            (Some(Borrower::Lent(_)), _) => true,
            (Some(Borrower::Asking(connection)), Some(chain)) => {
                (self.begun || chain.goes_on) && !has_hung_up(connection)
            }
            // It may have gone, or wait for the device. No device is left running for it.
            (None, Some(_)) => self.leased && self.running.is_none(),
            _ => false,
        }
    }

    /// Whether the lease is about to end.
    pub(super) fn is_ending(&self) -> bool {
        let mut late = self.late.iter();
        let is_wanted = late.any(|it| matches!(it, Waiting::HandOver(..) | Waiting::Revoke));
        self.stopped || self.over.is_some() || is_wanted
    }
}

/// The end of a lease that has not begun: the device stays kept for a VM that may go on, which has the
/// secret of its chain from a lease before, or unless it was `not_told` from this one.
pub(super) fn not_begun(chain: Option<GrantedChain>, not_told: bool) -> Release {
    match chain {
        Some(chain) if chain.goes_on || !not_told => Release::Cut,
        _ => Release::Over(Revocation::Released),
    }
}
