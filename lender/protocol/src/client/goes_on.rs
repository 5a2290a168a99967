//! Leases that go on, and the end of a lease.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use farside_daemon::DeviceId;

use super::{CallError, Client, Lease};
use crate::{Address, Channel, ChannelError, Dialer, Keeping, Reply, Request};

impl Client {
    /// The connection of a process before, over which nothing is asked: while it is open, the lender keeps the device.
    pub fn left(address: &Address, dialer: &Dialer, socket: OwnedFd) -> Self {
        Self::of(address, dialer, Channel::from_socket(socket))
    }

    /// As [`Client::borrow_device`], for a lease that goes on: see [`Request::BorrowAndKeep`]. `files` are those of the
    /// BARs, then that of the state.
    pub fn borrow_and_keep(
        &mut self,
        device: &DeviceId,
        keeping: Keeping,
        files: &[BorrowedFd<'_>],
    ) -> Result<Lease, CallError> {
        let request = Request::BorrowAndKeep {
            device: device.to_owned(),
            fence: self.fence,
            keep_ms: keeping.keep.as_millis().try_into().unwrap_or(u64::MAX),
            resumes: keeping.resumes,
        };
        let (reply, fds) = self.call(request, files)?;
        self.take_lease(reply, fds)
    }

    /// Whether the last request was sent, and has no answer.
    pub fn awaits_answer(&self) -> bool {
        self.answers_due > 0 && !self.failed
    }

    /// Waits further for the answer to [`Client::borrow_and_keep`], which was [late](CallError::Late).
    pub fn late_lease(&mut self) -> Result<Lease, CallError> {
        if !self.awaits_answer() {
            return Err(ChannelError::Closed.into());
        }
        let (started, deadline) = self.deadline();
        let answer = self.answer_by(deadline);
        let (reply, fds) = self.judge(answer, started)?;
        self.take_lease(reply, fds)
    }

    /// Whether the lender has sent [`Reply::ProcessEnded`]: it keeps the device while this connection is open.
    pub fn has_process_ended(&self) -> bool {
        self.process_ended
    }

    /// Shuts the connection down, and waits for at most `timeout` until the lender has closed
    /// it. A lender closes it after it has stopped the device's DMA and closed all
    /// windows, so both are done when this returns true. This also holds if the lender's
    /// process is dead.
    pub fn hang_up(&mut self, timeout: Duration) -> bool {
        // If the lender closed the connection first, `receive` reports it.
        let _ = self.channel.shut_down_sending();
        // A function that was left running is not stopped before.
        self.wait(timeout, false)
    }

    /// Waits for at most `timeout` until the lender has closed the connection, or has sent
    /// [`Reply::ProcessEnded`]: then a model does no DMA. Drops what it sends before.
    pub fn is_closed(&mut self, timeout: Duration) -> bool {
        self.wait(timeout, true)
    }

    fn wait(&mut self, timeout: Duration, for_process: bool) -> bool {
        self.failed = true;
        let deadline = Instant::now() + timeout;
        while !(for_process && self.process_ended) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.channel.receive::<Reply>(left) {
                Err(ChannelError::Closed) => return true,
                Ok((Reply::ProcessEnded, _)) => self.process_ended = true,
                // A connection without TLS that is cut looks like `Closed`.
                Err(ChannelError::TimedOut(_) | ChannelError::Io(_) | ChannelError::Tls(_)) => {
                    return false;
                }
                // Late replies.
                Ok(_)
                | Err(
                    ChannelError::Malformed(_)
                    | ChannelError::Foreign(_)
                    | ChannelError::TooLarge { .. }
                    | ChannelError::DescriptorsLost
                    | ChannelError::NoDescriptors(_),
                ) => {}
            }
        }
        true
    }
}
