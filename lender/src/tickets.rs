//! Register channels that come by a connection of their own.
//!
//! Between hosts no descriptor can be sent, so the borrower of a device connects
//! once more and shows the ticket that came with its lease. Whoever has the
//! ticket has the device's registers: it is 128 random bits, taken once, and
//! only for a few seconds.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    time::Instant,
};

use farside_daemon::Wakeup;
use farside_lender_protocol::{Channel, TICKET_LIFE, Ticket};
use rustix::rand::{GetRandomFlags, getrandom};

/// The tickets that are out.
#[derive(Default)]
pub(crate) struct Tickets(Mutex<HashMap<Ticket, Out>>);

struct Out {
    sender: mpsc::SyncSender<Channel>,
    wake: Wakeup,
    until: Instant,
}

impl Tickets {
    /// Makes a ticket that is good from `now` on.
    pub(crate) fn issue(self: &Arc<Self>, now: Instant) -> io::Result<Awaited> {
        let mut random = [0; 16];
        // From a kernel that has started, 16 bytes come at once and whole.
        let got = getrandom(&mut random, GetRandomFlags::empty())?;
        if got != random.len() {
            return Err(io::Error::other("the kernel gave too few random bytes"));
        }
        let ticket = Ticket(random);
        let wake = Wakeup::new()?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let until = now + TICKET_LIFE;
        let out = Out {
            sender,
            wake: wake.clone(),
            until,
        };
        self.lock().insert(ticket, out);
        Ok(Awaited {
            ticket,
            until,
            receiver,
            wake,
            tickets: Arc::clone(self),
        })
    }

    /// Takes a ticket in. None when it is not out (any more), or came too
    /// late.
    pub(crate) fn redeem(&self, ticket: Ticket, now: Instant) -> Option<Redeemed> {
        let out = self.lock().remove(&ticket)?;
        (now < out.until).then_some(Redeemed(out))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Ticket, Out>> {
        // Every change is one call: a panic elsewhere leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A ticket that was good.
pub(crate) struct Redeemed(Out);

impl Redeemed {
    /// Hands the connection to the device's thread. One that has stopped
    /// waiting closes it.
    pub(crate) fn hand_over(self, channel: Channel) {
        if self.0.sender.try_send(channel).is_ok() {
            self.0.wake.raise();
        }
    }
}

/// The connection that a ticket stands for. Dropping it invalidates the
/// ticket. Readable when the connection has come.
pub(crate) struct Awaited {
    ticket: Ticket,
    until: Instant,
    receiver: mpsc::Receiver<Channel>,
    wake: Wakeup,
    tickets: Arc<Tickets>,
}

impl Awaited {
    /// What to send to the borrower.
    pub(crate) fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// When the ticket ends.
    pub(crate) fn until(&self) -> Instant {
        self.until
    }

    /// The connection, if it has come.
    pub(crate) fn take(&self) -> Option<Channel> {
        self.wake.lower();
        self.receiver.try_recv().ok()
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        self.tickets.lock().remove(&self.ticket);
    }
}

impl AsFd for Awaited {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    fn is_readable(awaited: &Awaited) -> bool {
        let mut fds = [PollFd::new(awaited, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    }

    #[test]
    fn a_ticket_brings_the_connection_once() {
        let tickets = Arc::new(Tickets::default());
        let now = Instant::now();
        let awaited = tickets.issue(now).unwrap();
        let other = tickets.issue(now).unwrap();
        assert!(awaited.ticket() != other.ticket());
        assert!(!is_readable(&awaited) && awaited.take().is_none());
        let (mut ours, theirs) = Channel::pair().unwrap();
        let redeemed = tickets.redeem(awaited.ticket(), now).expect("it is good");
        assert!(tickets.redeem(awaited.ticket(), now).is_none());
        redeemed.hand_over(theirs);
        assert!(is_readable(&awaited) && !is_readable(&other));
        let mut came = awaited.take().expect("the connection");
        ours.send(&7u8, &[], SOON).unwrap();
        assert_eq!(came.receive::<u8>(SOON).unwrap().0, 7);
    }

    #[test]
    fn a_ticket_that_is_guessed_late_or_no_longer_awaited_is_no_good() {
        let tickets = Arc::new(Tickets::default());
        let now = Instant::now();
        let awaited = tickets.issue(now).unwrap();
        let mut guess = awaited.ticket();
        guess.0[15] ^= 1;
        assert!(tickets.redeem(guess, now).is_none());
        assert!(tickets.redeem(awaited.ticket(), awaited.until()).is_none());
        // Late once is late for good.
        assert!(tickets.redeem(awaited.ticket(), now).is_none());

        let awaited = tickets.issue(now).unwrap();
        let ticket = awaited.ticket();
        let just = now + TICKET_LIFE - Duration::from_nanos(1);
        drop(awaited);
        assert!(tickets.redeem(ticket, just).is_none());

        let awaited = tickets.issue(now).unwrap();
        let (ours, theirs) = Channel::pair().unwrap();
        let redeemed = tickets.redeem(awaited.ticket(), just).expect("it is good");
        drop(awaited);
        // Closed, and not left lying about.
        redeemed.hand_over(theirs);
        let mut fds = [PollFd::new(&ours, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(1));
        assert!(tickets.lock().is_empty());
    }
}
