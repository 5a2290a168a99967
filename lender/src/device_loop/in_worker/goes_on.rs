//! Whether a lease goes on without its worker.

use farside_lender_protocol::Channel;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::WorkerLease;
use crate::worker::Borrower;

impl WorkerLease<'_> {
    /// Whether a lease whose worker is gone may go on: the borrower has the secret of its chain, and is there.
    pub(super) fn may_go_on(&self) -> bool {
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

/// Whether the peer of a connection has closed it.
fn has_hung_up(connection: &Channel) -> bool {
    let mut fds = [PollFd::new(connection, PollFlags::RDHUP)];
    let ready = poll(&mut fds, Some(&Timespec::default()));
    ready.is_ok_and(|_| !fds[0].revents().is_empty())
}
