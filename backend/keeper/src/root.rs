//! What keepers and backend share, and the descriptors that all of them have.

use std::{
    io,
    mem::ManuallyDrop,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::Arc,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::{read, write},
    process::{Pid, PidfdFlags, getpid, pidfd_open},
};

use crate::{
    DeviceFile, Words,
    system::{self, Area},
};

/// Words: restarts of the backend, whether it serves, with which code it has ended and 1, how often it was started (or was to
/// be), what has asked it to end, how often a keeper was replaced, whether one has left the backend to the next process, what it serves, and then descriptors of device files
/// and 1.
const ROOT: usize = 16 << 10;
pub(crate) const RESTARTS: usize = 0;
pub(crate) const READY: usize = 1;
pub(crate) const ENDED: usize = 2;
pub(crate) const STARTS: usize = 3;
pub(crate) const ASKED: usize = 4;
pub(crate) const REPLACED: usize = 5;
pub(crate) const LEFT: usize = 6;
pub(crate) const TEXT: usize = 8;
pub(crate) const TEXT_WORDS: usize = 64;
pub(crate) const FILES: usize = TEXT + TEXT_WORDS;

/// The words, for which each process has a mapping of its own.
pub(crate) fn map(file: impl AsFd) -> io::Result<Words> {
    Ok(Words::new(Area::map(file, 0..ROOT)?, ROOT / 8))
}

/// A file for new ones.
pub(crate) fn create() -> io::Result<OwnedFd> {
    DeviceFile::root(ROOT)
}

/// Whether this is such a file.
pub(crate) fn is_root(file: impl AsFd) -> bool {
    rustix::fs::fstat(file).is_ok_and(|it| it.st_size == ROOT as i64)
}

/// Descriptors of the keeper, which all processes of one table have. They are closed when the last of these has ended.
pub(crate) struct Shared {
    /// The backend serves.
    pub(crate) serves: ManuallyDrop<OwnedFd>,
    pub(crate) announced: ManuallyDrop<OwnedFd>,
    /// The spare keeper has begun.
    pub(crate) begun: ManuallyDrop<OwnedFd>,
    /// Readable, as is the pidfd of a process that has ended.
    pub(crate) nobody: ManuallyDrop<OwnedFd>,
    pub(crate) backend: Place,
    pub(crate) keeper: Place,
    pub(crate) spare: Place,
}

impl Shared {
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        let make = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let nobody = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self {
            backend: Place::new(&nobody)?,
            keeper: Place::new(&nobody)?,
            spare: Place::new(&nobody)?,
            nobody: ManuallyDrop::new(nobody),
            serves: ManuallyDrop::new(make()?),
            announced: ManuallyDrop::new(make()?),
            begun: ManuallyDrop::new(make()?),
        }))
    }
}

/// Rings one of the eventfds, whose counter stays small: it does not block.
pub(crate) fn ring(bell: &OwnedFd) {
    let _ = write(bell, &1u64.to_ne_bytes());
}

/// Whether it was rung since.
pub(crate) fn was_rung(bell: &OwnedFd) -> bool {
    read(bell, &mut [0; 8]).is_ok()
}

/// The number of a descriptor that is, by turns, of the processes that have a role: a pidfd.
pub(crate) struct Place(ManuallyDrop<OwnedFd>);

impl Place {
    /// Nobody has the role.
    fn new(nobody: &OwnedFd) -> io::Result<Self> {
        Ok(Self(ManuallyDrop::new(nobody.try_clone()?)))
    }

    /// This process has the role from now on.
    pub(crate) fn take(&self) -> io::Result<()> {
        self.give(getpid())
    }

    /// This child has the role from now on.
    pub(crate) fn give(&self, child: Pid) -> io::Result<()> {
        let pidfd = pidfd_open(child, PidfdFlags::empty())?;
        system::replace(&pidfd, self.0.as_raw_fd())
    }

    /// Whether the process that had the role has ended, or does within `timeout`.
    pub(crate) fn is_vacant(&self, timeout: Option<Timespec>) -> bool {
        let mut fds = [PollFd::new(&*self.0, PollFlags::IN)];
        poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready > 0)
    }

    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Nobody has the role from now on.
    pub(crate) fn vacate(&self, nobody: &OwnedFd) -> io::Result<()> {
        system::replace(nobody, self.0.as_raw_fd())
    }

    pub(crate) fn number(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Now.
pub(crate) const NOW: Option<Timespec> = Some(Timespec {
    tv_sec: 0,
    tv_nsec: 0,
});
