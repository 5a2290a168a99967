//! Calls of a worker to its broker.

use std::{
    fmt,
    os::fd::BorrowedFd,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use farside_error_chain::Chain;
use farside_fabric::{FabricError, LutRange, Owner, PeerAddress, soft::AdapterTables};
use farside_lender_protocol::{Channel, ChannelError, ErrorKind, RemoteError};

use super::messages::{Call, CallReply, Numbered};
use crate::registry::Release;

/// Most calls without a reply, beyond which lines and problems are dropped: a worker may be without a broker
/// for long.
const MAX_UNANSWERED: u64 = 32;

/// Timeout for calls that may be served later.
pub(super) const SHORT: Duration = Duration::from_millis(200);

/// Timeout for a reply or an answer to arrive at the broker, whose thread for this device has
/// nothing else to do.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The calls to the broker. While there is none, they wait in the socket, which its keeper holds.
pub(super) struct Calls(Mutex<Broker>);

struct Broker {
    channel: Channel,
    /// The number of the last call.
    sent: u64,
    /// The number of the last reply.
    replied: u64,
    /// Windows whose calls were given up before the reply.
    late: Vec<LutRange>,
}

impl Calls {
    pub(super) fn new(channel: Channel) -> Self {
        Self(Mutex::new(Broker {
            channel,
            sent: 0,
            replied: 0,
            late: Vec::new(),
        }))
    }

    /// A call whose reply is needed.
    pub(super) fn call(&self, call: Call) -> Result<CallReply, RemoteError> {
        self.call_with(call, &[], CALL_TIMEOUT)
    }

    pub(super) fn call_with(
        &self,
        call: Call,
        fds: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Result<CallReply, RemoteError> {
        match self.lock().call(call, fds, patience) {
            Ok(CallReply::Refused(error)) => Err(error),
            Ok(reply) => Ok(reply),
            Err(error) => Err(RemoteError {
                kind: ErrorKind::Internal,
                message: format!("the lender's process is gone: {}", Chain(&error)),
            }),
        }
    }

    /// The lease has ended. Waits for the broker, if there is one, so that the borrower can retry at once.
    pub(super) fn released(&self, how: Release) {
        if let Err(error) = self.call_with(Call::Released(how), &[], SHORT) {
            log::debug!("the lease has ended without the lender: {error}");
        }
    }

    /// A call that nothing waits for: there may be no broker.
    pub(super) fn tell(&self, call: Call) {
        if let Err(error) = self.lock().tell(&call) {
            log::debug!("{call:?}: {}", Chain(&error));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Broker> {
        // A panic in between loses a reply, and no more.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Broker {
    fn call(
        &mut self,
        call: Call,
        fds: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Result<CallReply, ChannelError> {
        let until = Instant::now() + patience;
        self.take_all_late()?;
        self.sent += 1;
        let call = (self.sent, call);
        self.channel.send(&call, fds, patience)?;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.channel.receive(left)?.0 {
                (_, CallReply::Again) => self.channel.send(&call, fds, left)?,
                (number, reply) if number == self.sent => {
                    self.replied = number;
                    self.give_back()?;
                    return Ok(reply);
                }
                reply => self.take_late(reply),
            }
        }
    }

    fn tell(&mut self, call: &Call) -> Result<(), ChannelError> {
        self.take_all_late()?;
        let may_be_dropped = matches!(call, Call::Line(..) | Call::Problem(_));
        if may_be_dropped && self.sent - self.replied > MAX_UNANSWERED {
            return Err(ChannelError::TimedOut(Duration::ZERO));
        }
        self.sent += 1;
        self.channel.send(&(self.sent, call), &[], CALL_TIMEOUT)?;
        self.give_back()
    }

    /// What has come meanwhile; former brokers may have asked for calls that were served.
    fn take_all_late(&mut self) -> Result<(), ChannelError> {
        while let Some((reply, _)) = self.channel.try_receive()? {
            self.take_late(reply);
        }
        Ok(())
    }

    /// A reply that nothing waits for.
    fn take_late(&mut self, (number, reply): Numbered<CallReply>) {
        if let (true, CallReply::Window(window)) = (number > self.replied, &reply) {
            self.late.push(*window);
        }
        self.replied = self.replied.max(number);
    }

    /// Gives back the windows of calls that were given up.
    fn give_back(&mut self) -> Result<(), ChannelError> {
        while let Some(window) = self.late.pop() {
            self.sent += 1;
            let call = (self.sent, Call::GiveBackWindow(window));
            self.channel.send(&call, &[], CALL_TIMEOUT)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Calls")
    }
}

/// Ends the lease's chain, before the guest is told of the flush that has failed.
pub(super) fn end_chain(calls: &Calls) {
    if let Err(error) = calls.call(Call::EndChain) {
        log::error!("the lease may still go on after a flush has failed: {error}");
    }
}

fn other(error: RemoteError) -> FabricError {
    FabricError::Other(error.into())
}

impl AdapterTables for Calls {
    fn take_requester(&self, _device: &str, _owner: &Owner) -> Result<usize, FabricError> {
        self.call(Call::TakeRequester).map_err(other)?;
        Ok(0)
    }

    /// The broker gives it back when this process has ended.
    fn give_back_requester(&self, _entry: usize) {}

    fn take_window(
        &self,
        _requester: usize,
        peer_address: PeerAddress,
        bytes: u64,
    ) -> Result<LutRange, FabricError> {
        let call = Call::TakeWindow {
            peer_address,
            bytes,
        };
        match self.call(call).map_err(other)? {
            CallReply::Window(range) => Ok(range),
            reply => Err(FabricError::Other(
                format!("an unexpected reply of the lender's process: {reply:?}").into(),
            )),
        }
    }

    fn give_back_window(&self, _requester: usize, window: LutRange) {
        self.tell(Call::GiveBackWindow(window));
    }
}

#[cfg(test)]
mod tests;
