//! Register channels over separate connections.
//!
//! Descriptors cannot be sent between hosts, so the borrower opens a second connection and presents
//! the ticket from its lease. A ticket grants access to the device's registers: it has 128 random
//! bits, and is valid once and for a few seconds.

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

/// The outstanding tickets.
#[derive(Default)]
pub(crate) struct Tickets(Mutex<HashMap<Ticket, Out>>);

struct Out {
    sender: mpsc::SyncSender<Channel>,
    wake: Wakeup,
    until: Instant,
}

impl Tickets {
    /// Issues a ticket that is valid from `now` on.
    pub(crate) fn issue(self: &Arc<Self>, now: Instant) -> io::Result<Awaited> {
        let mut random = [0; 16];
        // After boot, the kernel returns 16 bytes at once and completely.
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

    /// Redeems a ticket. Returns `None` if it is not outstanding or has expired.
    pub(crate) fn redeem(&self, ticket: Ticket, now: Instant) -> Option<Redeemed> {
        let out = self.lock().remove(&ticket)?;
        (now < out.until).then_some(Redeemed(out))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Ticket, Out>> {
        // Every update is a single call, so a panic cannot leave the map inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A redeemed ticket.
pub(crate) struct Redeemed(Out);

impl Redeemed {
    /// Passes the connection to the device thread. Closes it if the thread has stopped waiting.
    pub(crate) fn hand_over(self, channel: Channel) {
        if self.0.sender.try_send(channel).is_ok() {
            self.0.wake.raise();
        }
    }
}

/// The connection that a ticket was issued for. Dropping it invalidates the ticket. Readable when
/// the connection has arrived.
pub(crate) struct Awaited {
    ticket: Ticket,
    until: Instant,
    receiver: mpsc::Receiver<Channel>,
    wake: Wakeup,
    tickets: Arc<Tickets>,
}

impl Awaited {
    /// The ticket to send to the borrower.
    pub(crate) fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// When the ticket expires.
    pub(crate) fn until(&self) -> Instant {
        self.until
    }

    /// The connection, if it has arrived.
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
        // An expired ticket stays invalid.
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
        // Closed, not leaked.
        redeemed.hand_over(theirs);
        let mut fds = [PollFd::new(&ours, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(1));
        assert!(tickets.lock().is_empty());
    }
}
