//! A `SOCK_SEQPACKET` connection that carries one encoded message a packet.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, fchmod},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix,
        SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg, shutdown,
        socket_with, socketpair,
        sockopt::{Timeout, set_socket_timeout},
    },
};
use serde::{Serialize, de::DeserializeOwned};

use crate::Address;

/// Most bytes of one encoded message. Bounds what a peer can make us hold.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// Most descriptors that ride with one message: as many as MSI has vectors,
/// which are enabled together.
pub const MAX_FDS: usize = 32;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

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
    /// A message came, and not all of its descriptors.
    #[error(
        "descriptors of a message were lost: there were over {MAX_FDS}, or this process may open no more (raise `ulimit -n`, `LimitNOFILE=` in a systemd unit)"
    )]
    DescriptorsLost,
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
    /// Connects to the listener at `address`. Waits at most `timeout`, such as
    /// where more want to connect than it accepts.
    pub fn connect(address: &Address, timeout: Duration) -> io::Result<Self> {
        let path = match address {
            Address::Unix(path) => path.as_path(),
            Address::Tcp { .. } => return Err(io::ErrorKind::Unsupported.into()),
        };
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        // For a UNIX socket, the time that `connect` may wait. Not zero, which
        // would mean for ever.
        let timeout = timeout.max(Duration::from_millis(1));
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        match connect(&socket, &SocketAddrUnix::new(path)?) {
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            connected => connected?,
        }
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

    /// Ends what goes to the peer, which sees the connection closed; what it
    /// still sends can be received.
    pub fn shut_down_sending(&self) -> io::Result<()> {
        Ok(shutdown(&self.socket, Shutdown::Write)?)
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

    /// Takes the next message if one is there. After
    /// [`ChannelError::DescriptorsLost`] the one after it can still be taken.
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
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(ChannelError::TooLarge {
                len: received.bytes,
                fds: fds.len(),
            });
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(ChannelError::DescriptorsLost);
        }
        // No message of ours encodes to nothing: zero bytes is end of stream.
        if received.bytes == 0 {
            return Err(ChannelError::Closed);
        }
        // What follows the message is ignored: a later version of ours may say
        // more in its Hello, and is to be refused by its number.
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
    /// Device and inode of `path`: what is there later is removed only if it
    /// is still this one.
    identity: Option<(u64, u64)>,
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
        let failed = |errno: Errno| {
            let error = io::Error::from(errno);
            io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        };
        let socket = new_socket().map_err(failed)?;
        // Before the bind: Linux makes the path with the socket's mode, so at
        // no time can another user connect.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        match bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                bind(&socket, &address).map_err(failed)?;
            }
            bound => bound.map_err(failed)?,
        }
        let listener = Self {
            socket,
            path: path.to_owned(),
            identity: identity(path),
        };
        // From here on a failure removes the path.
        listen(&listener.socket, BACKLOG).map_err(failed)?;
        Ok(listener)
    }

    /// Accepts one connection if one waits.
    pub fn accept(&self) -> io::Result<Option<Channel>> {
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
        // Another process may have put its own socket there since.
        if self.identity.is_some()
            && self.identity == identity(&self.path)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            log::warn!("cannot unlink {}: {error}", self.path.display());
        }
    }
}

fn new_socket() -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// Removes what is at `path` if it is a socket on which nobody listens.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> io::Result<()> {
    let in_use = |what: String| Err(io::Error::new(io::ErrorKind::AddrInUse, what));
    match connect(&new_socket()?, address) {
        Err(Errno::CONNREFUSED) if is_socket(path) => {
            log::info!("replacing the stale socket {}", path.display());
            std::fs::remove_file(path)
        }
        // It went away by itself.
        Err(Errno::NOENT) => Ok(()),
        // AGAIN: so many want to connect that there is a listener.
        Ok(()) | Err(Errno::AGAIN) => in_use(format!(
            "another process listens at {}: stop it or choose another path",
            path.display()
        )),
        Err(errno) => in_use(format!(
            "{} exists and is no lender's socket ({errno}): remove it or choose another path",
            path.display()
        )),
    }
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests;
