//! What the broker has of a borrower that a worker serves.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use farside_lender_protocol::Channel;

/// The borrower's end of a lease in the broker, until the lease has ended: closing it tells the borrower
/// that its memory is out of use.
pub(crate) enum Borrower {
    /// Its worker answers.
    Asking(Channel),
    /// It has its answer: frames follow.
    Lent(OwnedFd),
}

impl Borrower {
    /// The connection, if it can be answered.
    pub(super) fn channel(self) -> Option<Channel> {
        match self {
            Self::Asking(channel) => Some(channel),
            Self::Lent(_) => None,
        }
    }
}

impl AsFd for Borrower {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Asking(channel) => channel.as_fd(),
            Self::Lent(socket) => socket.as_fd(),
        }
    }
}
