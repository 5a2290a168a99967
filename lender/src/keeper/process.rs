//! The keeper's process.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use farside_daemon::{
    confine::{self, COMMON, ConfineError, SeccompAction, SystemCalls},
    raise_open_files,
};
use farside_hand_over::FARSIDE;
use farside_lender_protocol::{Channel, ChannelError};
use nix::unistd::getpid;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{SocketFlags, accept_with},
    thread::CapabilitySet,
};

use super::{
    END_TIMEOUT, FromKeeper, Hello, MAX_FDS, TIMEOUT, ToKeeper, VERSION, is_of_root, is_own,
};

/// Time for which leases whose workers have ended wait for a broker, so that this records how they have.
const LINGER: Duration = Duration::from_secs(60);

/// Time for a process that looks to say so while there is a broker, which waits.
const LOOK_TIMEOUT: Duration = Duration::from_millis(200);

/// System calls beside the common ones: the next broker connects.
const ALLOWED: &[i64] = &[libc::SYS_accept4, libc::SYS_geteuid];

/// Why a keeper ends before its leases have.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// The broker is gone, or violates the protocol.
    #[error("no socket from the lender's process: this program is started by `farside lend`")]
    NoSocket,
    /// Its channel has failed.
    #[error("no socket from the lender's process: this program is started by `farside lend`")]
    Channel(#[from] ChannelError),
    /// The process cannot be confined.
    #[error("cannot confine the keeper process")]
    Confine(#[from] ConfineError),
    /// A poll failed.
    #[error("cannot run the keeper process")]
    System(#[from] io::Error),
}

struct Kept {
    lease: Vec<u8>,
    /// The first is the worker's pidfd.
    fds: Vec<OwnedFd>,
    with_worker: usize,
    /// The worker has ended, and no broker has seen that.
    ended: bool,
}

impl Kept {
    /// Whether it is kept for as long as there is no broker: its worker lives, or a broker is needed for its
    /// end.
    fn stays(&self) -> bool {
        !self.ended || self.with_worker == 0
    }
}

/// Whether the process of the first of these descriptors has ended.
fn has_ended(fds: &[OwnedFd]) -> bool {
    let Some(pidfd) = fds.first() else {
        return true;
    };
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    let ready = poll(&mut fds, Some(&Timespec::default()));
    ready.is_ok_and(|ready| ready > 0)
}

struct Process {
    listener: OwnedFd,
    broker: Option<Channel>,
    leases: BTreeMap<u64, Kept>,
    /// When it ends, if no broker comes: only ended leases are left.
    until: Option<Instant>,
}

/// Keeps leases for the broker at the other end of `broker`, and for the next ones, until the last lease has
/// ended.
///
/// # Errors
/// A [`KeeperError`].
pub fn run(broker: OwnedFd) -> Result<(), KeeperError> {
    raise_open_files();
    let mut broker = Channel::from_socket(broker).appendable();
    let (ToKeeper::Listen, mut fds) = broker.receive(TIMEOUT)? else {
        return Err(KeeperError::NoSocket);
    };
    let listener = fds.pop().ok_or(KeeperError::NoSocket)?;
    confine::give_up_privileges(CapabilitySet::empty())?;
    confine::give_up_paths(&[])?;
    let pid = [getpid().as_raw().unsigned_abs().into()];
    SystemCalls::new(&[COMMON, ALLOWED].concat(), &confine::common(&pid))
        .allowed(SeccompAction::KillProcess)?
        .install()?;
    let process = Process {
        listener,
        broker: Some(broker),
        leases: BTreeMap::new(),
        until: None,
    };
    process.run()
}

impl Process {
    fn run(mut self) -> Result<(), KeeperError> {
        while self.broker.is_some() || !self.leases.is_empty() {
            let left = self
                .until
                .map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(());
            }
            self.wait(left)?;
            self.serve_broker();
            if self.broker.is_none() {
                self.close_ended();
            }
            // Last: the former broker's end has been noticed.
            if let Some(next) = self.accept() {
                return self.end(&next);
            }
            let stays = self.leases.values().any(Kept::stays);
            self.until = match self.broker.is_some() || stays {
                true => None,
                false => Some(self.until.unwrap_or(Instant::now() + LINGER)),
            };
        }
        Ok(())
    }

    fn wait(&self, left: Option<Duration>) -> io::Result<()> {
        let left = left.map(|left| Timespec::try_from(left).unwrap_or_default());
        let workers = self.leases.values().filter(|kept| !kept.ended);
        // While there is a broker, that looks after the workers.
        let workers = workers.filter(|_| self.broker.is_none());
        let mut fds: Vec<_> = [self.listener.as_fd()]
            .into_iter()
            .chain(self.broker.as_ref().map(AsFd::as_fd))
            .chain(workers.flat_map(|kept| kept.fds.first().map(AsFd::as_fd)))
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        match poll(&mut fds, left.as_ref()) {
            Err(errno) if errno != rustix::io::Errno::INTR => Err(errno.into()),
            _ => Ok(()),
        }
    }

    /// Does what the broker wants.
    fn serve_broker(&mut self) {
        while let Some(broker) = &mut self.broker {
            let (message, fds) = match broker.try_receive::<ToKeeper>() {
                Ok(Some(received)) => received,
                Ok(None) => return,
                Err(_) => {
                    self.broker = None;
                    return;
                }
            };
            match message {
                ToKeeper::End | ToKeeper::Take | ToKeeper::Listen | ToKeeper::Look => {}
                ToKeeper::Keep {
                    id,
                    lease,
                    with_worker,
                } => {
                    let kept = Kept {
                        lease,
                        fds,
                        with_worker,
                        ended: false,
                    };
                    self.leases.insert(id, kept);
                }
                ToKeeper::Update { id, lease } => {
                    if let Some(kept) = self.leases.get_mut(&id) {
                        kept.lease = lease;
                    }
                }
                ToKeeper::Forget { id } => drop(self.leases.remove(&id)),
            }
        }
    }

    /// Closes what is of use to workers that have ended: their borrowers see the end.
    fn close_ended(&mut self) {
        for kept in self.leases.values_mut().filter(|kept| !kept.ended) {
            kept.ended = has_ended(&kept.fds);
            if kept.ended {
                let left = kept.fds.len().saturating_sub(kept.with_worker);
                kept.fds.truncate(left.max(1));
            }
        }
    }

    /// Gives the leases to the next broker. Returns one that wants their end.
    fn accept(&mut self) -> Option<Channel> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = accept_with(&self.listener, flags).ok()?;
        let mut next = Channel::from_socket(socket).appendable();
        let busy = self.broker.is_some();
        let hello = Hello {
            version: VERSION,
            busy,
            farside: FARSIDE.to_owned(),
        };
        let is_own = is_own(&next);
        if !(is_own || is_of_root(&next)) || next.send(&hello, &[], TIMEOUT).is_err() {
            return None;
        }
        let timeout = if busy { LOOK_TIMEOUT } else { TIMEOUT };
        match next.receive(timeout).ok()? {
            (ToKeeper::Take, _) if is_own && !busy => {
                // A broker that has not got all of them ends, or is closed here.
                if self.give(&mut next, MAX_FDS).is_ok() {
                    self.broker = Some(next);
                }
                None
            }
            (ToKeeper::End, _) if is_own && !busy => Some(next),
            (ToKeeper::Look, _) => {
                // If this fails, it has gone.
                let _ = self.give(&mut next, 0);
                None
            }
            _ => None,
        }
    }

    /// Has the workers end, by closing their channels, and waits for that.
    fn end(mut self, _next: &Channel) -> Result<(), KeeperError> {
        for kept in self.leases.values_mut() {
            kept.fds.truncate(1);
        }
        let until = Instant::now() + END_TIMEOUT;
        self.leases.retain(|_, kept| !has_ended(&kept.fds));
        while !self.leases.is_empty() && Instant::now() < until {
            self.wait(Some(until.saturating_duration_since(Instant::now())))?;
            self.leases.retain(|_, kept| !has_ended(&kept.fds));
        }
        Ok(())
    }

    /// Sends the leases, with at most so many descriptors of each.
    fn give(&self, next: &mut Channel, fds: usize) -> Result<(), ChannelError> {
        for (&id, kept) in &self.leases {
            let lease = kept.lease.clone();
            let passed: Vec<_> = kept.fds.iter().map(AsFd::as_fd).take(fds).collect();
            next.send(&FromKeeper::Lease { id, lease }, &passed, TIMEOUT)?;
        }
        next.send(&FromKeeper::Done, &[], TIMEOUT)
    }
}
