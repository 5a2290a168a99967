//! Register channels over separate connections.
//!
//! Descriptors cannot be sent between hosts, so the borrower opens a second connection and presents
//! the token from its lease. A token grants access to the device's registers: it has 128 random
//! bits, and is valid once and for a few seconds.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    time::Instant,
};

use farside_daemon::Wakeup;
use farside_lender_protocol::{Channel, RegisterToken, TOKEN_LIFE};

/// The outstanding tokens.
#[derive(Default)]
pub(crate) struct RegisterTokens(Mutex<HashMap<RegisterToken, Out>>);

struct Out {
    sender: mpsc::SyncSender<Channel>,
    wake: Wakeup,
    until: Instant,
}

impl RegisterTokens {
    /// Issues a token that is valid from `now` on.
    pub(crate) fn issue(self: &Arc<Self>, now: Instant) -> io::Result<Awaited> {
        let mut random = [0; 16];
        getrandom::fill(&mut random)?;
        let token = RegisterToken(random);
        let wake = Wakeup::new()?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let until = now + TOKEN_LIFE;
        let out = Out {
            sender,
            wake: wake.clone(),
            until,
        };
        self.lock().insert(token, out);
        Ok(Awaited {
            token,
            until,
            receiver,
            wake,
            tokens: Arc::clone(self),
        })
    }

    /// Redeems a token. Returns `None` if it is not outstanding or has expired.
    pub(crate) fn redeem(&self, token: RegisterToken, now: Instant) -> Option<Redeemed> {
        let out = self.lock().remove(&token)?;
        (now < out.until).then_some(Redeemed(out))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RegisterToken, Out>> {
        // Every update is a single call, so a panic cannot leave the map inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A redeemed token.
pub(crate) struct Redeemed(Out);

impl Redeemed {
    /// Passes the connection to the device thread. Closes it if the thread has stopped waiting.
    pub(crate) fn hand_over(self, channel: Channel) {
        if self.0.sender.try_send(channel).is_ok() {
            self.0.wake.raise();
        }
    }
}

/// The connection that a token was issued for. Dropping it invalidates the token. Readable when
/// the connection has arrived.
pub(crate) struct Awaited {
    token: RegisterToken,
    until: Instant,
    receiver: mpsc::Receiver<Channel>,
    wake: Wakeup,
    tokens: Arc<RegisterTokens>,
}

impl Awaited {
    /// The token to send to the borrower.
    pub(crate) fn token(&self) -> RegisterToken {
        self.token
    }

    /// When the token expires.
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
        self.tokens.lock().remove(&self.token);
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
    fn a_token_brings_the_connection_once() {
        let tokens = Arc::new(RegisterTokens::default());
        let now = Instant::now();
        let awaited = tokens.issue(now).unwrap();
        let other = tokens.issue(now).unwrap();
        assert!(awaited.token() != other.token());
        assert!(!is_readable(&awaited) && awaited.take().is_none());
        let (mut ours, theirs) = Channel::pair().unwrap();
        let redeemed = tokens.redeem(awaited.token(), now).expect("it is good");
        assert!(tokens.redeem(awaited.token(), now).is_none());
        redeemed.hand_over(theirs);
        assert!(is_readable(&awaited) && !is_readable(&other));
        let mut came = awaited.take().expect("the connection");
        ours.send(&7u8, &[], SOON).unwrap();
        assert_eq!(came.receive::<u8>(SOON).unwrap().0, 7);
    }

    #[test]
    fn a_token_that_is_guessed_late_or_no_longer_awaited_is_invalid() {
        let tokens = Arc::new(RegisterTokens::default());
        let now = Instant::now();
        let awaited = tokens.issue(now).unwrap();
        let mut guess = awaited.token();
        guess.0[15] ^= 1;
        assert!(tokens.redeem(guess, now).is_none());
        assert!(tokens.redeem(awaited.token(), awaited.until()).is_none());
        // An expired token stays invalid.
        assert!(tokens.redeem(awaited.token(), now).is_none());

        let awaited = tokens.issue(now).unwrap();
        let token = awaited.token();
        let just = now + TOKEN_LIFE - Duration::from_nanos(1);
        drop(awaited);
        assert!(tokens.redeem(token, just).is_none());

        let awaited = tokens.issue(now).unwrap();
        let (ours, theirs) = Channel::pair().unwrap();
        let redeemed = tokens.redeem(awaited.token(), just).expect("it is good");
        drop(awaited);
        // Closed, not leaked.
        redeemed.hand_over(theirs);
        let mut fds = [PollFd::new(&ours, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(1));
        assert!(tokens.lock().is_empty());
    }
}
