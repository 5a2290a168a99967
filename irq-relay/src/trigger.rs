//! The targets of interrupts.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fs::{OFlags, fcntl_getfl, fstatfs},
    io::{Errno, read, write},
};

use crate::{IrqEvent, Relay, SetIrqsError, watch};

/// `ANON_INODE_FS_MAGIC` of `linux/magic.h`.
const ANON_INODE_FS: u64 = 0x0904_1934;

/// An eventfd that a client gave for a vector. Clones share the descriptor.
///
/// The client is not trusted, so:
/// - a descriptor of anything that has a name (file, device, socket, pipe) is
///   refused: writing to it would lend our rights to the client;
/// - a write that blocks, because the client has filled the counter of an eventfd
///   in blocking mode, is interrupted within a second and fails (see `watch`).
///   A descriptor that was in blocking mode when it came is only written to when
///   there is room.
///
/// vmm-sys-util's `EventFd` cannot be made from an [`OwnedFd`] without unsafe
/// code, which is why this type stands on rustix.
#[derive(Clone, Debug)]
pub struct IrqEventFd {
    fd: Arc<OwnedFd>,
    owner: Owner,
}

/// Who else has the descriptor, and can change its mode and its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Ourselves,
    /// A client, which gave it in non-blocking mode.
    Client,
    /// A client, which gave it in blocking mode.
    BlockingClient,
}

impl IrqEventFd {
    /// A new non-blocking eventfd, with counter 0.
    pub fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            fd: Arc::new(fd),
            owner: Owner::Ourselves,
        })
    }

    /// Adds 1 to the counter. A full counter is left as it is: the reader has
    /// been woken and not looked yet.
    ///
    /// # Errors
    /// [`Errno::TIMEDOUT`] if the write blocked.
    pub fn signal(&self) -> Result<(), Errno> {
        let added = match self.owner {
            Owner::Ourselves => write(&*self.fd, &1u64.to_ne_bytes()).map(drop),
            Owner::BlockingClient if !self.has_room()? => Ok(()),
            Owner::Client | Owner::BlockingClient => watch::add_one(&*self.fd),
        };
        match added {
            Err(Errno::AGAIN) => Ok(()),
            added => added,
        }
    }

    /// Takes the counter, leaving 0. `None` when it is 0 already and the
    /// descriptor is non-blocking.
    pub fn take(&self) -> Result<Option<u64>, Errno> {
        let mut counter = [0; 8];
        match read(&*self.fd, &mut counter) {
            Ok(_) => Ok(Some(u64::from_ne_bytes(counter))),
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn has_room(&self) -> Result<bool, Errno> {
        let mut fds = [PollFd::new(&*self.fd, PollFlags::OUT)];
        poll(&mut fds, Some(&Timespec::default())).map(|ready| ready != 0)
    }
}

impl TryFrom<OwnedFd> for IrqEventFd {
    type Error = SetIrqsError;

    fn try_from(fd: OwnedFd) -> Result<Self, SetIrqsError> {
        let descriptor = |error: Errno| SetIrqsError::Descriptor(error.into());
        // The kernel has no call that identifies an eventfd without /proc. Of the
        // other nameless kinds none does harm with the eight bytes we write.
        if fstatfs(&fd).map_err(descriptor)?.f_type as u64 != ANON_INODE_FS {
            return Err(SetIrqsError::NotAnEventFd);
        }
        let mode = fcntl_getfl(&fd).map_err(descriptor)?;
        Ok(Self {
            fd: Arc::new(fd),
            owner: match mode.contains(OFlags::NONBLOCK) {
                true => Owner::Client,
                false => Owner::BlockingClient,
            },
        })
    }
}

impl AsFd for IrqEventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The IRQ target of a vector.
#[derive(Clone, Debug)]
pub enum IrqTarget {
    /// To an eventfd, at once.
    EventFd(IrqEventFd),
    /// Into a relay, from where it goes to the borrower's host.
    Relay(Arc<Relay>),
}

impl IrqTarget {
    pub(crate) fn signal(&self, event: IrqEvent) -> Result<(), Errno> {
        match self {
            Self::EventFd(trigger) => trigger.signal(),
            Self::Relay(relay) => relay.post(event),
        }
    }

    /// The eventfd, when it is one.
    pub fn trigger(&self) -> Option<&IrqEventFd> {
        match self {
            Self::EventFd(trigger) => Some(trigger),
            Self::Relay(_) => None,
        }
    }
}

impl From<IrqEventFd> for IrqTarget {
    fn from(trigger: IrqEventFd) -> Self {
        Self::EventFd(trigger)
    }
}

impl From<Arc<Relay>> for IrqTarget {
    fn from(relay: Arc<Relay>) -> Self {
        Self::Relay(relay)
    }
}
