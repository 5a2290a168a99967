//! Register channels over separate connections.
//!
//! Descriptors cannot be sent between hosts, so the borrower opens a second connection and presents
//! the token from its lease. A token grants access to the device's registers: it has 128 random
//! bits, and is valid once, for a few seconds, and with TLS for the host that has the lease alone.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    time::Instant,
};

use farside_daemon::Wakeup;
use farside_lender_protocol::{Channel, Identity, RegisterToken, TOKEN_LIFE};

/// The outstanding tokens.
#[derive(Default)]
pub(crate) struct RegisterTokens(Mutex<HashMap<RegisterToken, Out>>);

struct Out {
    sender: mpsc::SyncSender<Channel>,
    wake: Wakeup,
    until: Instant,
    holder: Identity,
}

impl RegisterTokens {
    /// Issues a token to `holder` that is valid from `now` on.
    pub(crate) fn issue(self: &Arc<Self>, holder: Identity, now: Instant) -> io::Result<Awaited> {
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
            holder,
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

    /// Redeems a token. Returns `None` if it is not outstanding or has expired, or is another host's.
    pub(crate) fn redeem(
        &self,
        token: RegisterToken,
        peer: &Identity,
        now: Instant,
    ) -> Option<Redeemed> {
        let mut tokens = self.lock();
        // A host that has seen another one's token cannot use it up, either.
        tokens.get(&token).filter(|out| out.holder.may_be(peer))?;
        let out = tokens.remove(&token)?;
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

    fn host(name: &str) -> Identity {
        Identity::Host {
            name: name.into(),
            address: "10.0.0.3:4444".parse().unwrap(),
        }
    }

    #[test]
    fn a_token_is_of_the_host_that_has_the_lease() {
        let tokens = Arc::new(RegisterTokens::default());
        let now = Instant::now();
        let plain = Identity::Network {
            address: "10.0.0.3:4444".parse().unwrap(),
        };
        let user = Identity::User { uid: 0, pid: 1 };
        let good = |holder: &Identity, peer: &Identity| {
            let awaited = tokens.issue(holder.clone(), now).unwrap();
            let first = tokens.redeem(awaited.token(), peer, now).is_some();
            // Whoever else tries it does not use it up.
            assert_eq!(tokens.redeem(awaited.token(), holder, now).is_none(), first);
            first
        };
        assert!(good(&host("a"), &host("a")) && good(&plain, &plain));
        for peer in [&host("b"), &plain, &user] {
            assert!(!good(&host("a"), peer), "{peer}");
        }
        assert!(!good(&plain, &host("a")));
    }

    fn is_readable(awaited: &Awaited) -> bool {
        let mut fds = [PollFd::new(awaited, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    }

    #[test]
    fn a_token_brings_the_connection_once() {
        let tokens = Arc::new(RegisterTokens::default());
        let now = Instant::now();
        let awaited = tokens.issue(host("a"), now).unwrap();
        let other = tokens.issue(host("a"), now).unwrap();
        assert!(awaited.token() != other.token());
        assert!(!is_readable(&awaited) && awaited.take().is_none());
        let (mut ours, theirs) = Channel::pair().unwrap();
        let redeemed = tokens
            .redeem(awaited.token(), &host("a"), now)
            .expect("it is good");
        assert!(tokens.redeem(awaited.token(), &host("a"), now).is_none());
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
        let awaited = tokens.issue(host("a"), now).unwrap();
        let mut guess = awaited.token();
        guess.0[15] ^= 1;
        assert!(tokens.redeem(guess, &host("a"), now).is_none());
        assert!(
            tokens
                .redeem(awaited.token(), &host("a"), awaited.until())
                .is_none()
        );
        // An expired token stays invalid.
        assert!(tokens.redeem(awaited.token(), &host("a"), now).is_none());

        let awaited = tokens.issue(host("a"), now).unwrap();
        let token = awaited.token();
        let just = now + TOKEN_LIFE - Duration::from_nanos(1);
        drop(awaited);
        assert!(tokens.redeem(token, &host("a"), just).is_none());

        let awaited = tokens.issue(host("a"), now).unwrap();
        let (ours, theirs) = Channel::pair().unwrap();
        let redeemed = tokens
            .redeem(awaited.token(), &host("a"), just)
            .expect("it is good");
        drop(awaited);
        // Closed, not leaked.
        redeemed.hand_over(theirs);
        let mut fds = [PollFd::new(&ours, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(1));
        assert!(tokens.lock().is_empty());
    }
}
