//! A backend goes from one keeper to another that has not been cloned from it: over a restart of the service, or an upgrade.
//!
//! The spare listens at a socket in a directory that only this user can search; both ends compare the user. The next
//! process gets each descriptor with its number, and gives it the same one, since the records have numbers.

use std::{
    collections::BTreeSet,
    io::{self, IoSlice, IoSliceMut},
    mem::{ManuallyDrop, MaybeUninit},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    time::Duration,
};

use farside_daemon::{ListenError, OwnedListener, SocketKind, paths, peer_credentials};
use farside_hand_over::Unreadable;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, fcntl_dupfd_cloexec},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
        sendmsg, socket_with,
    },
};

use crate::{
    RECORDS,
    keep::SIGNALS,
    root,
    system::{Blocked, own, replace},
};

/// Timeout for each message.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Descriptors of a message: the kernel takes 253.
const BATCH: usize = 200;

const MAGIC: u64 = u64::from_le_bytes(*b"farside\0");

/// The last message, and those before it.
const LAST: u8 = 1;
const MORE: u8 = 0;

/// Orders, the answer to the last message, and to that.
const ALL: u8 = b'A';
const END: u8 = b'E';
const TAKEN: u8 = b'T';
const CLOSED: u8 = b'C';

/// Why a keeper cannot start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document the fields")]
pub enum HandoverError {
    /// It is not to be replaced.
    #[error("the backend of this VM runs already (its keeper listens at {}): stop it first", path.display())]
    Busy { path: PathBuf },
    /// Its records are not readable here.
    #[error(
        "the backend of this VM goes on, and is not taken over: {0}; install {remedy}, or stop the VM, and start this again",
        remedy = .0.remedy()
    )]
    Version(Unreadable),
    /// Another user's, or no keeper.
    #[error("{} is not the socket of a keeper of this user: remove it", path.display())]
    Foreign { path: PathBuf },
    /// The socket cannot be made.
    #[error("cannot listen for the next keeper of this VM")]
    Listen(#[from] ListenError),
    /// It has failed while the descriptors were passed: the former process goes on.
    #[error("cannot take over the backend of this VM, which goes on without this process")]
    Take(#[source] io::Error),
    /// A system call.
    #[error("cannot start the backend's keeper")]
    System(#[from] io::Error),
}

/// What a former keeper of a backend has left.
pub struct Former {
    path: PathBuf,
    signals: Blocked,
    left: Option<Received>,
}

struct Received {
    peer: OwnedFd,
    fds: Vec<(RawFd, OwnedFd)>,
    root: RawFd,
    listener: RawFd,
}

/// What a keeper begins with.
pub(crate) struct Left {
    pub(crate) signals: Blocked,
    pub(crate) root: ManuallyDrop<OwnedFd>,
    pub(crate) listener: ManuallyDrop<OwnedListener>,
    /// What the backend before has left.
    pub(crate) numbers: BTreeSet<RawFd>,
    pub(crate) is_taken: bool,
}

impl Former {
    /// Asks the keeper at `path` for all that it has, if there is one; its backend has ended then. Call it before this
    /// process opens descriptors. Signals wait from then on for [`keep`](crate::keep): one that ends this process meanwhile
    /// would not end the backend.
    ///
    /// # Errors
    ///
    /// A [`HandoverError`], after which the former backend goes on.
    pub fn take(path: &Path) -> Result<Self, HandoverError> {
        let signals = Blocked::new(&SIGNALS)?;
        let former = |left| Self {
            path: path.to_owned(),
            signals,
            left,
        };
        let Some(peer) = find(path)? else {
            return Ok(former(None));
        };
        let Some(hello) = hello(&peer, path)? else {
            return Ok(former(None));
        };
        if hello.is_busy {
            return Err(HandoverError::Busy {
                path: path.to_owned(),
            });
        }
        let version = u32::try_from(hello.version).unwrap_or(u32::MAX);
        RECORDS
            .check(version, None)
            .map_err(HandoverError::Version)?;
        let received = receive_all(peer).map_err(HandoverError::Take)?;
        Ok(former(Some(received)))
    }

    /// The highest number that a descriptor will get: those that this process owns have others from then on.
    pub fn highest(&self) -> Option<RawFd> {
        let fds = &self.left.as_ref()?.fds;
        fds.iter().map(|(number, _)| *number).max()
    }

    pub(crate) fn into_left(self) -> Result<Left, HandoverError> {
        let highest = self.highest();
        let signals = self.signals;
        let Some(received) = self.left else {
            if let Some(directory) = self.path.parent() {
                paths::create_directory(directory)?;
            }
            let listener = OwnedListener::bind(&self.path, SocketKind::SeqPacket, 4)?;
            return Ok(Left {
                signals,
                root: ManuallyDrop::new(root::create()?),
                listener: ManuallyDrop::new(listener),
                numbers: BTreeSet::new(),
                is_taken: false,
            });
        };
        let above = highest.unwrap_or_default() + 1;
        let (root, listener) = (received.root, received.listener);
        let placed = received.place(above).map_err(HandoverError::Take)?;
        let [Some(root), Some(listener)] = [root, listener].map(|fd| placed.get(&fd).copied())
        else {
            return Err(HandoverError::Take(io::ErrorKind::InvalidData.into()));
        };
        let [root, listener] = [root, listener].map(|fd| ManuallyDrop::new(own(fd)));
        if !root::is_root(&*root) {
            return Err(HandoverError::Take(io::ErrorKind::InvalidData.into()));
        }
        let mut numbers = placed;
        let listener = ManuallyDrop::into_inner(listener);
        for fd in [root.as_raw_fd(), listener.as_raw_fd()] {
            numbers.remove(&fd);
        }
        let listener = OwnedListener::take_over(listener, &self.path, 4)?;
        Ok(Left {
            signals,
            root,
            listener: ManuallyDrop::new(listener),
            numbers,
            is_taken: true,
        })
    }
}

impl Received {
    /// Gives each descriptor its number, and has the former keeper end.
    fn place(self, above: RawFd) -> io::Result<BTreeSet<RawFd>> {
        // First all of them out of the way: one may have the number of another.
        let peer = fcntl_dupfd_cloexec(&self.peer, above)?;
        drop(self.peer);
        let mut away = Vec::new();
        for (number, fd) in self.fds {
            away.push((number, fcntl_dupfd_cloexec(&fd, above)?));
        }
        let mut placed = BTreeSet::new();
        for (number, fd) in away {
            replace(&fd, number)?;
            placed.insert(number);
        }
        send(&peer, &[TAKEN], &[])?;
        // Locks are held until the last process has closed their files. One that does not answer has ended.
        let _ = receive(&peer, &mut [0]);
        Ok(placed)
    }
}

/// What another process wants of a keeper.
pub(crate) enum Wants {
    All,
    End,
}

/// Says who this is, and what a peer wants. `None` if it is to be dismissed.
pub(crate) fn greet(peer: &OwnedFd, is_busy: bool) -> Option<Wants> {
    if !is_own(peer) {
        return None;
    }
    let mut hello = [0; 17];
    hello[..8].copy_from_slice(&MAGIC.to_le_bytes());
    hello[8..16].copy_from_slice(&u64::from(RECORDS.version()).to_le_bytes());
    hello[16] = is_busy.into();
    send(peer, &hello, &[]).ok()?;
    let mut order = [0];
    let (len, _) = receive(peer, &mut order).ok()?;
    match order {
        [END] if len == 1 => Some(Wants::End),
        [ALL] if len == 1 && !is_busy => Some(Wants::All),
        _ => None,
    }
}

/// Sends these descriptors, and the `marked` ones: root and listener. Closes them when the peer has them.
pub(crate) fn give(peer: &OwnedFd, fds: &BTreeSet<RawFd>, marked: [RawFd; 2]) -> io::Result<()> {
    let all: Vec<RawFd> = fds.iter().copied().chain(marked).collect();
    for numbers in all.chunks(BATCH) {
        // Owned by nobody: the backend has ended.
        let owned: Vec<_> = numbers
            .iter()
            .map(|fd| ManuallyDrop::new(own(*fd)))
            .collect();
        let fds: Vec<_> = owned.iter().map(|fd| fd.as_fd()).collect();
        send(peer, &message(MORE, numbers), &fds)?;
    }
    send(peer, &message(LAST, &marked), &[])?;
    let mut answer = [0];
    match receive(peer, &mut answer)? {
        (1, _) if answer == [TAKEN] => {
            fds.iter().for_each(|fd| drop(own(*fd)));
            // It may have ended since: there is nothing left here.
            let _ = send(peer, &[CLOSED], &[]);
            Ok(())
        }
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn message(kind: u8, numbers: &[RawFd]) -> Vec<u8> {
    let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
    [kind].into_iter().chain(numbers).collect()
}

/// Whether there is a keeper at `path`, which may be about to end.
pub fn is_there(path: &Path) -> bool {
    find(path).is_ok_and(|peer| peer.is_some())
}

/// Has the keeper at `path` end its backend at once. Returns false if there is none.
///
/// # Errors
///
/// A [`HandoverError`].
pub fn end(path: &Path) -> Result<bool, HandoverError> {
    let Some(peer) = find(path)? else {
        return Ok(false);
    };
    if hello(&peer, path)?.is_none() {
        return Ok(false);
    }
    send(&peer, &[END], &[])?;
    // It closes the connection at its end.
    let _ = receive(&peer, &mut [0]);
    Ok(true)
}

struct Hello {
    version: u64,
    is_busy: bool,
}

/// What a keeper says first. `None` if it has just ended.
fn hello(peer: &OwnedFd, path: &Path) -> Result<Option<Hello>, HandoverError> {
    let foreign = || HandoverError::Foreign {
        path: path.to_owned(),
    };
    if !is_own(peer) {
        return Err(foreign());
    }
    let mut hello = [0; 17];
    let len = match receive(peer, &mut hello) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
        received => received?.0,
    };
    let word = |at: usize| hello[at..at + 8].try_into().map(u64::from_le_bytes);
    match (len, word(0), word(8)) {
        (0, ..) => Ok(None),
        (17, Ok(MAGIC), Ok(version)) => Ok(Some(Hello {
            version,
            is_busy: hello[16] != 0,
        })),
        _ => Err(foreign()),
    }
}

fn find(path: &Path) -> io::Result<Option<OwnedFd>> {
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(Some(socket)),
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn receive_all(peer: OwnedFd) -> io::Result<Received> {
    send(&peer, &[ALL], &[])?;
    let mut fds = Vec::new();
    loop {
        let mut bytes = [0; 1 + 4 * BATCH];
        let (len, received) = receive(&peer, &mut bytes)?;
        let (numbers, _) = bytes[1..len.max(1)].as_chunks();
        let numbers: Vec<RawFd> = numbers.iter().copied().map(RawFd::from_le_bytes).collect();
        match (bytes[0], &numbers[..]) {
            (LAST, &[root, listener]) if len > 0 => {
                return Ok(Received {
                    peer,
                    fds,
                    root,
                    listener,
                });
            }
            (MORE, numbers) if len > 0 && numbers.len() == received.len() => {
                if numbers.iter().any(|number| *number <= libc::STDERR_FILENO) {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                fds.extend(numbers.iter().copied().zip(received));
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

fn ready(peer: &OwnedFd, flags: PollFlags) -> io::Result<()> {
    let timeout = Timespec::try_from(TIMEOUT).unwrap_or_default();
    loop {
        match poll(&mut [PollFd::new(peer, flags)], Some(&timeout)) {
            Err(Errno::INTR) => {}
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            polled => return polled.map(drop).map_err(Into::into),
        }
    }
}

fn send(peer: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    loop {
        ready(peer, PollFlags::OUT)?;
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(peer, &[IoSlice::new(bytes)], &mut control, flags) {
            Err(Errno::INTR | Errno::AGAIN) => {}
            sent => return sent.map(drop).map_err(Into::into),
        }
    }
}

/// Receives a message, and its descriptors. 0 bytes are the end.
fn receive(peer: &OwnedFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    loop {
        ready(peer, PollFlags::IN)?;
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match recvmsg(peer, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Err(Errno::INTR | Errno::AGAIN) => {}
            received => {
                let len = received?.bytes;
                let mut fds = Vec::new();
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(received) = message {
                        fds.extend(received);
                    }
                }
                return Ok((len, fds));
            }
        }
    }
}

/// Whether the process at the other end has this one's user.
fn is_own(peer: &OwnedFd) -> bool {
    let credentials = peer_credentials(peer);
    credentials.is_ok_and(|peer| peer.uid == rustix::process::geteuid().as_raw())
}

/// Removes the socket, and the directory if it is the last one in it.
pub(crate) fn remove(listener: &OwnedListener) {
    // Fails if another process has replaced it.
    let _ = std::fs::remove_file(listener.path());
    let _ = listener.path().parent().map(std::fs::remove_dir);
}
