//! Sets up the register channel of a lease.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

use farside_lender_protocol::{Channel, Generation, Registers};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{DeviceLoop, end::End};
use crate::{
    source::LeasedDevice,
    tokens::{Awaited, RegisterTokens},
};

/// The lender's end of a register channel that is being set up.
pub(super) enum Offer {
    /// Both ends; one is sent with the lease.
    Pair(Channel, OwnedFd),
    /// A token, sent with the lease.
    RegisterToken(Awaited),
}

impl Offer {
    /// Chooses the form that the borrower's transport supports.
    pub(super) fn new(connection: &Channel, tokens: &Arc<RegisterTokens>) -> io::Result<Self> {
        if connection.is_tcp() {
            let holder = connection.identity()?;
            return tokens
                .issue(holder, Instant::now())
                .map(Self::RegisterToken);
        }
        let (ours, theirs) = Channel::pair()?;
        Ok(Self::Pair(ours, theirs.into_socket()))
    }

    /// The reply for the borrower, and the descriptor to send with it.
    pub(super) fn for_borrower(&self) -> (Registers, Option<&OwnedFd>) {
        match self {
            Self::Pair(_, theirs) => (Registers::Descriptor, Some(theirs)),
            Self::RegisterToken(awaited) => (Registers::RegisterToken(awaited.token()), None),
        }
    }

    /// Waits for the borrower to connect and returns the lender's end. Meanwhile `owner` answers
    /// messages.
    pub(super) fn accepted(
        self,
        owner: &mut DeviceLoop,
        device: &mut dyn LeasedDevice,
        connection: &Channel,
        generation: Generation,
    ) -> Result<Channel, End> {
        let awaited = match self {
            Self::Pair(ours, _) => return Ok(ours),
            Self::RegisterToken(awaited) => awaited,
        };
        loop {
            if let Some(channel) = awaited.take() {
                return Ok(channel);
            }
            let left = awaited.until().saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(End::NoRegisters);
            }
            let mut fds = [
                PollFd::new(&awaited, PollFlags::IN),
                // Not `IN`: an early request stays in the socket.
                PollFd::new(connection, PollFlags::RDHUP),
                PollFd::new(&owner.requests_wake, PollFlags::IN),
                PollFd::from_borrowed_fd(owner.stop.as_fd(), PollFlags::IN),
            ];
            let left = Timespec::try_from(left).unwrap_or_default();
            if let Err(errno) = poll(&mut fds, Some(&left))
                && errno != rustix::io::Errno::INTR
            {
                return Err(End::PeerGone(io::Error::from(errno).into()));
            }
            let is_ready = |n: usize| !fds[n].revents().is_empty();
            let (gone, requests, stop) = (is_ready(1), is_ready(2), is_ready(3));
            if gone {
                return Err(End::PeerGone(farside_lender_protocol::ChannelError::Closed));
            }
            if stop {
                return Err(End::Stopped);
            }
            if requests && !owner.answer_requests(device, generation) {
                return Err(End::HandedOver);
            }
        }
    }
}
