//! A `SOCK_SEQPACKET` connection that carries one encoded message a packet.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType, bind, connect, listen, recvmsg, sendmsg, socket_with, socketpair,
    },
};
use serde::{Serialize, de::DeserializeOwned};

/// Most bytes of one encoded message. Bounds what a peer can make us hold.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// Most descriptors that ride with one message: as many as MSI has vectors,
/// which are enabled together.
pub const MAX_FDS: usize = 32;

/// Room for [`MAX_FDS`] descriptors and their header.
const ANCILLARY_SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// Why a message could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The deadline passed first.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The message is over a limit.
    #[error(
        "message of {len} bytes with {fds} descriptors is over the limit of {MAX_MESSAGE} bytes, {MAX_FDS} descriptors"
    )]
    TooLarge {
        /// Encoded bytes.
        len: usize,
        /// Descriptors.
        fds: usize,
    },
    /// The bytes do not decode.
    #[error("malformed message from the peer: {0}")]
    Malformed(#[from] postcard::Error),
    /// The socket failed.
    #[error("socket error: {0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for ChannelError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => Self::Closed,
            other => Self::Io(other.into()),
        }
    }
}

/// One end of a connection. The buffer is reused: neither direction allocates
/// for messages without descriptors.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    buffer: Box<[u8; MAX_MESSAGE]>,
}

impl Channel {
    /// Connects to the listener at `path`.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self::from_socket(socket))
    }

    /// Two connected ends.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        Ok((Self::from_socket(a), Self::from_socket(b)))
    }

    /// Wraps a connected, nonblocking `SOCK_SEQPACKET` socket.
    pub fn from_socket(socket: OwnedFd) -> Self {
        Self {
            socket,
            buffer: Box::new([0; MAX_MESSAGE]),
        }
    }

    /// The socket, for handing to another process.
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// Sends at once; `false` when the peer's queue is full.
    pub fn try_send<T: Serialize>(
        &mut self,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<bool, ChannelError> {
        let too_large = |len| ChannelError::TooLarge {
            len,
            fds: fds.len(),
        };
        if fds.len() > MAX_FDS {
            return Err(too_large(0));
        }
        let bytes = match postcard::to_slice(message, &mut self.buffer[..]) {
            Ok(bytes) => &*bytes,
            Err(postcard::Error::SerializeBufferFull) => return Err(too_large(MAX_MESSAGE + 1)),
            Err(error) => return Err(error.into()),
        };
        let mut space = [std::mem::MaybeUninit::uninit(); ANCILLARY_SPACE];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            let fits = ancillary.push(SendAncillaryMessage::ScmRights(fds));
            debug_assert!(fits, "space is for MAX_FDS");
        }
        loop {
            return match sendmsg(
                &self.socket,
                &[io::IoSlice::new(bytes)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            ) {
                Ok(_) => Ok(true),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => Ok(false),
                Err(errno) => Err(errno.into()),
            };
        }
    }

    /// Sends, waiting for room until `deadline`.
    pub fn send<T: Serialize>(
        &mut self,
        message: &T,
        fds: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<(), ChannelError> {
        let deadline = Instant::now() + timeout;
        while !self.try_send(message, fds)? {
            self.wait(PollFlags::OUT, deadline, timeout)?;
        }
        Ok(())
    }

    /// Takes the next message if one is there.
    pub fn try_receive<T: DeserializeOwned>(
        &mut self,
    ) -> Result<Option<(T, Vec<OwnedFd>)>, ChannelError> {
        let mut space = [std::mem::MaybeUninit::uninit(); ANCILLARY_SPACE];
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
        if received
            .flags
            .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
        {
            return Err(ChannelError::TooLarge {
                len: received.bytes,
                fds: fds.len(),
            });
        }
        // No message of ours encodes to nothing: zero bytes is end of stream.
        if received.bytes == 0 {
            return Err(ChannelError::Closed);
        }
        let message = postcard::from_bytes(&self.buffer[..received.bytes])?;
        Ok(Some((message, fds)))
    }

    /// Takes the next message, waiting for it for at most `timeout`.
    pub fn receive<T: DeserializeOwned>(
        &mut self,
        timeout: Duration,
    ) -> Result<(T, Vec<OwnedFd>), ChannelError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(message) = self.try_receive()? {
                return Ok(message);
            }
            self.wait(PollFlags::IN, deadline, timeout)?;
        }
    }

    fn wait(
        &self,
        flags: PollFlags,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<(), ChannelError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ChannelError::TimedOut(timeout));
        }
        let left = Timespec::try_from(left).unwrap_or(Timespec {
            tv_sec: i64::from(i32::MAX),
            tv_nsec: 0,
        });
        match poll(&mut [PollFd::new(&self.socket, flags)], Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A listening socket that is unlinked when dropped.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
}

impl Listener {
    /// Listens at `path`, readable and writable by the owner only. A socket
    /// left behind by a process that died is replaced; one that answers is an
    /// error (`AddrInUse`).
    pub fn bind(path: &Path) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path).map_err(|_| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "socket path {} is {} bytes long; the limit is 107: choose a shorter directory",
                    path.display(),
                    path.as_os_str().len()
                ),
            )
        })?;
        let new_socket = || {
            socket_with(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
                None,
            )
        };
        let mut socket = new_socket()?;
        if let Err(Errno::ADDRINUSE) = bind(&socket, &address) {
            match connect(&new_socket()?, &address) {
                Err(Errno::CONNREFUSED) => {
                    log::info!("replacing the stale socket {}", path.display());
                    std::fs::remove_file(path)?;
                    socket = new_socket()?;
                    bind(&socket, &address)?;
                }
                // Something else than a listening SOCK_SEQPACKET socket.
                Err(errno) if errno != Errno::AGAIN => {
                    return Err(io::Error::new(
                        io::ErrorKind::AddrInUse,
                        format!(
                            "{} exists and is no lender's socket ({errno}): remove it or choose another path",
                            path.display()
                        ),
                    ));
                }
                _ => {
                    return Err(io::Error::new(
                        io::ErrorKind::AddrInUse,
                        format!(
                            "another process listens at {}: stop it or choose another path",
                            path.display()
                        ),
                    ));
                }
            }
        } else if !path.exists() {
            return Err(io::Error::other(format!(
                "cannot listen at {}",
                path.display()
            )));
        }
        rustix::fs::chmod(path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
        listen(&socket, 128)?;
        Ok(Self {
            socket,
            path: path.to_owned(),
        })
    }

    /// Accepts one connection if one waits.
    pub fn accept(&self) -> io::Result<Option<Channel>> {
        use rustix::net::{SocketFlags, accept_with};
        loop {
            return match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => Ok(Some(Channel::from_socket(socket))),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => Ok(None),
                Err(errno) => Err(errno.into()),
            };
        }
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            log::warn!("cannot unlink {}: {error}", self.path.display());
        }
    }
}
