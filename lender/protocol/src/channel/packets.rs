//! Messages over a UNIX `SOCK_SEQPACKET` socket: one per packet, with descriptors.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Duration,
};

use farside_daemon::{PeerCredentials, peer_credentials};
use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType, recvmsg, send, sendmsg, socket_with, socketpair,
        sockopt::{Timeout, set_socket_timeout},
    },
    process::Pid,
};
use serde::Serialize;

use super::{ChannelError, MAX_FDS, MAX_MESSAGE, encode};
use crate::Identity;

/// Room for [`MAX_FDS`] descriptors and their header.
const ANCILLARY_SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// Two connected sockets.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?)
}

/// Connects a nonblocking socket to the listener at `path`.
pub(crate) fn connect(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // On UNIX sockets SO_SNDTIMEO also limits connect(2).
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
        connected => connected?,
    }
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

/// The bytes of a message, and its descriptors.
type Packet<'a> = (&'a [u8], Vec<OwnedFd>);

#[derive(Debug)]
pub(super) struct Packets {
    socket: OwnedFd,
    buffer: Box<[u8; MAX_MESSAGE]>,
}

impl Packets {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            buffer: Box::new([0; MAX_MESSAGE]),
        }
    }

    pub(super) fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// The process that created the peer's socket.
    pub(super) fn peer(&self) -> String {
        match peer_credentials(&self.socket) {
            Ok(PeerCredentials { pid: Some(pid), .. }) => format!("process {pid}"),
            Ok(PeerCredentials { pid: None, uid }) => format!("a process of uid {uid}"),
            Err(error) => format!("unknown process ({error})"),
        }
    }

    /// The user of that process.
    pub(super) fn identity(&self) -> io::Result<Identity> {
        let PeerCredentials { uid, pid } = peer_credentials(&self.socket)?;
        let pid = Pid::as_raw(pid);
        Ok(Identity::User { uid, pid })
    }

    /// Sends without blocking. Returns `false` if the peer's queue is full.
    pub(super) fn try_send<T: Serialize>(
        &mut self,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<bool, ChannelError> {
        if fds.len() > MAX_FDS {
            return Err(ChannelError::TooLarge {
                len: 0,
                fds: fds.len(),
            });
        }
        let bytes = &*encode(message, fds.len(), &mut self.buffer[..])?;
        let mut space = [MaybeUninit::uninit(); ANCILLARY_SPACE];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            let fits = ancillary.push(SendAncillaryMessage::ScmRights(fds));
            debug_assert!(fits, "the space fits MAX_FDS");
        }
        loop {
            let sent = match fds.is_empty() {
                // A confined process may send, but no descriptors.
                true => send(&self.socket, bytes, SendFlags::NOSIGNAL),
                false => sendmsg(
                    &self.socket,
                    &[io::IoSlice::new(bytes)],
                    &mut ancillary,
                    SendFlags::NOSIGNAL,
                ),
            };
            return match sent {
                Ok(_) => Ok(true),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => Ok(false),
                Err(errno) => Err(errno.into()),
            };
        }
    }

    /// The bytes of the next message, if it has arrived.
    pub(super) fn try_receive(&mut self) -> Result<Option<Packet<'_>>, ChannelError> {
        let mut space = [MaybeUninit::uninit(); ANCILLARY_SPACE];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match recvmsg(
                &self.socket,
                &mut [io::IoSliceMut::new(&mut self.buffer[..])],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Ok(received) => break received,
                Err(Errno::INTR) => continue,
                // Once, if the peer has closed it without having read everything: what it sent follows.
                Err(Errno::CONNRESET) => continue,
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        };
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(ChannelError::TooLarge {
                len: received.bytes,
                fds: fds.len(),
            });
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(ChannelError::DescriptorsLost);
        }
        // No message is empty: zero bytes mean EOF.
        if received.bytes == 0 {
            return Err(ChannelError::Closed);
        }
        Ok(Some((&self.buffer[..received.bytes], fds)))
    }
}

impl AsFd for Packets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
