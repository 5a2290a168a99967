//! Bytes and descriptors over a stream socket, with deadlines.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Instant,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType, recv, recvmsg, sendmsg, socket_with,
    },
};

use crate::MAX_REPLY_FDS;

/// Most descriptors of one message to a server: as many as the kernel takes.
pub(crate) const MAX_FDS: usize = 253;

/// Why bytes could not be exchanged.
pub(crate) enum SocketError {
    Closed,
    TimedOut,
    Other(io::Error),
}

impl From<Errno> for SocketError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => Self::Closed,
            other => Self::Other(other.into()),
        }
    }
}

/// Connects without waiting: a server that accepts nobody would hold the caller up.
pub(crate) fn connect(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Sends all of `bytes`, the first of them with `fds`.
pub(crate) fn send(
    socket: &OwnedFd,
    mut bytes: &[u8],
    mut fds: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<(), SocketError> {
    while !bytes.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::INVAL.into());
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags) {
            Ok(sent) => {
                bytes = &bytes[sent..];
                fds = &[];
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, deadline)?,
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Fills `buf`, and adds the descriptors that come with it to `fds`.
pub(crate) fn receive(
    socket: &OwnedFd,
    mut buf: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    deadline: Instant,
) -> Result<(), SocketError> {
    while !buf.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_REPLY_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match recvmsg(socket, &mut [IoSliceMut::new(buf)], &mut ancillary, flags) {
            Ok(received) if received.bytes == 0 => return Err(SocketError::Closed),
            Ok(received) => {
                for message in ancillary.drain() {
                    if let RecvAncillaryMessage::ScmRights(more) = message {
                        fds.extend(more);
                    }
                }
                buf = &mut buf[received.bytes..];
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(socket, PollFlags::IN, deadline)?,
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Waits for bytes, and copies those that are there to `buf`, which stay in the socket. Returns how many.
pub(crate) fn peek(
    socket: &OwnedFd,
    buf: &mut [u8],
    deadline: Instant,
) -> Result<usize, SocketError> {
    loop {
        match recv(socket, &mut *buf, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(SocketError::Closed),
            Ok((bytes, _)) => return Ok(bytes),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(socket, PollFlags::IN, deadline)?,
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Whether there is something to receive, be it the connection's end.
pub(crate) fn is_readable(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

fn wait(socket: &OwnedFd, events: PollFlags, deadline: Instant) -> Result<(), SocketError> {
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).unwrap_or_default();
    let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), events)];
    match poll(&mut fds, Some(&left)) {
        Ok(0) => Err(SocketError::TimedOut),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
