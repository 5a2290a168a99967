//! A connection that carries messages: within a host over a UNIX socket, which
//! also carries descriptors, between hosts over TCP, which does not.
//!
//! Whoever waits for several of them polls for [`Channel::interest`]. Of a
//! message that is not whole yet, the channel keeps what has come; of the
//! next one it takes nothing, so what poll says is always all there is.

mod packets;
mod stream;
mod tcp;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{Shutdown, shutdown},
};
use serde::{Serialize, de::DeserializeOwned};

use crate::Address;
use packets::Packets;
use stream::Stream;

/// Most bytes of one encoded message. Bounds what a peer can make us hold.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// Most descriptors that ride with one message: as many as MSI has vectors,
/// which are enabled together.
pub const MAX_FDS: usize = 32;

/// Why a message could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The deadline passed first.
    #[error("no answer within {0:.1?}")]
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
    /// A message was to go to another host, with descriptors. It was not sent.
    #[error(
        "{0} descriptors (memory files or eventfds) cannot be sent over TCP: between hosts, memory is reached through an NTB and interrupts are relayed"
    )]
    NoDescriptors(usize),
    /// The first bytes of a TCP peer begin no message.
    #[error(
        "it does not speak farside's protocol: its first bytes are \"{}\"", .0.escape_ascii()
    )]
    Foreign([u8; 4]),
    /// The bytes do not decode.
    #[error("malformed message from the peer")]
    Malformed(#[from] postcard::Error),
    /// The socket failed.
    #[error("socket error")]
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

/// One end of a connection. The buffers are reused: neither direction allocates
/// for messages without descriptors.
#[derive(Debug)]
pub struct Channel {
    transport: Transport,
    sent: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Transport {
    Packets(Packets),
    Stream(Box<Stream>),
}

impl Channel {
    /// Connects to the listener at `address`. Waits at most `timeout`, such as
    /// where more want to connect than it accepts, or where no host answers.
    /// Looking a name up is not bounded by it.
    pub fn connect(address: &Address, timeout: Duration) -> io::Result<Self> {
        // Not zero, which would mean for ever.
        let timeout = timeout.max(Duration::from_millis(1));
        match address {
            Address::Unix(path) => Packets::connect(path, timeout).map(Self::from_socket),
            Address::Tcp { host, port } => Self::from_tcp(tcp::connect(host, *port, timeout)?),
        }
    }

    /// One more connection to a TCP peer.
    pub(crate) fn connect_again(&self, timeout: Duration) -> io::Result<Self> {
        let timeout = timeout.max(Duration::from_millis(1));
        Self::from_tcp(tcp::connect_to(tcp::peer(self.as_fd())?, timeout)?)
    }

    /// Two connected ends, within this host.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = packets::pair()?;
        Ok((Self::from_socket(a), Self::from_socket(b)))
    }

    /// Wraps a connected, nonblocking UNIX socket of type `SOCK_SEQPACKET`.
    pub fn from_socket(socket: OwnedFd) -> Self {
        Self::new(Transport::Packets(Packets::new(socket)))
    }

    /// Wraps a connected TCP socket.
    pub fn from_tcp(socket: std::net::TcpStream) -> io::Result<Self> {
        tcp::prepare(&socket)?;
        let stream = Stream::new(socket.into());
        Ok(Self::new(Transport::Stream(Box::new(stream))))
    }

    fn new(transport: Transport) -> Self {
        Self {
            transport,
            sent: Arc::default(),
        }
    }

    /// The socket, for handing to another process. Over TCP that would lose
    /// what is buffered.
    pub fn into_socket(self) -> OwnedFd {
        match self.transport {
            Transport::Packets(packets) => packets.into_socket(),
            Transport::Stream(stream) => stream.into_socket(),
        }
    }

    /// Whether it leads to another host (or could): then no descriptors can be
    /// sent.
    pub fn is_tcp(&self) -> bool {
        matches!(self.transport, Transport::Stream(_))
    }

    /// The peer, for log lines: its process, or its address.
    pub fn peer(&self) -> String {
        match &self.transport {
            Transport::Packets(packets) => packets.peer(),
            Transport::Stream(stream) => match tcp::peer(stream.as_fd()) {
                Ok(address) => address.to_string(),
                Err(error) => format!("unknown host ({error})"),
            },
        }
    }

    /// How many messages have been sent, also for another thread to read.
    pub(crate) fn sent(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.sent)
    }

    /// The same connection; what was sent until now is not counted.
    pub(crate) fn counted_anew(self) -> Self {
        Self::new(self.transport)
    }

    /// Ends what goes to the peer, which sees the connection closed; what it
    /// still sends can be received.
    pub fn shut_down_sending(&mut self) -> io::Result<()> {
        // An error would show again at the shutdown.
        let _ = self.flush();
        Ok(shutdown(&*self, Shutdown::Write)?)
    }

    /// What to poll for.
    pub fn interest(&self) -> PollFlags {
        match self.wants_write() {
            true => PollFlags::IN | PollFlags::OUT,
            false => PollFlags::IN,
        }
    }

    /// Whether part of a message that [`Channel::try_send`] took still has to
    /// go, when there is room. Never so over a UNIX socket. Every call that
    /// sends or receives sees to it first, so a loop that polls for
    /// [`Channel::interest`] and then receives needs nothing else.
    pub fn wants_write(&self) -> bool {
        match &self.transport {
            Transport::Packets(_) => false,
            Transport::Stream(stream) => stream.wants_write(),
        }
    }

    /// Sends of [`Channel::wants_write`] what there is room for.
    pub fn flush(&mut self) -> Result<(), ChannelError> {
        match &mut self.transport {
            Transport::Packets(_) => Ok(()),
            Transport::Stream(stream) => stream.flush(),
        }
    }

    /// Sends at once; `false` when the peer's queue is full, and then nothing
    /// is sent.
    pub fn try_send<T: Serialize>(
        &mut self,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<bool, ChannelError> {
        let sent = match &mut self.transport {
            Transport::Packets(packets) => packets.try_send(message, fds)?,
            Transport::Stream(_) if !fds.is_empty() => {
                return Err(ChannelError::NoDescriptors(fds.len()));
            }
            Transport::Stream(stream) => stream.try_send(message)?,
        };
        if sent {
            // Read by who was told of this message by other means.
            self.sent.fetch_add(1, Ordering::Release);
        }
        Ok(sent)
    }

    /// Sends, waiting for room until `timeout` is over. After an error other
    /// than [`ChannelError::TooLarge`] and [`ChannelError::NoDescriptors`] the
    /// message may have been sent, or may yet be.
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
        loop {
            self.flush()?;
            if !self.wants_write() {
                return Ok(());
            }
            self.wait(PollFlags::OUT, deadline, timeout)?;
        }
    }

    /// Takes the next message if one is there. After
    /// [`ChannelError::DescriptorsLost`] the one after it can still be taken.
    pub fn try_receive<T: DeserializeOwned>(
        &mut self,
    ) -> Result<Option<(T, Vec<OwnedFd>)>, ChannelError> {
        // What follows the message is ignored: a later version of ours may say
        // more in its Hello, and is to be refused by its number.
        match &mut self.transport {
            Transport::Packets(packets) => match packets.try_receive()? {
                Some((bytes, fds)) => Ok(Some((postcard::from_bytes(bytes)?, fds))),
                None => Ok(None),
            },
            Transport::Stream(stream) => match stream.try_receive()? {
                Some(bytes) => Ok(Some((postcard::from_bytes(bytes)?, Vec::new()))),
                None => Ok(None),
            },
        }
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
            self.wait(self.interest(), deadline, timeout)?;
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
        match poll(&mut [PollFd::new(self, flags)], Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.transport {
            Transport::Packets(packets) => packets.as_fd(),
            Transport::Stream(stream) => stream.as_fd(),
        }
    }
}

/// The encoded message, in `buffer`.
fn encode<'a, T: Serialize>(
    message: &T,
    fds: usize,
    buffer: &'a mut [u8],
) -> Result<&'a mut [u8], ChannelError> {
    match postcard::to_slice(message, buffer) {
        Ok(bytes) => Ok(bytes),
        Err(postcard::Error::SerializeBufferFull) => Err(ChannelError::TooLarge {
            len: MAX_MESSAGE + 1,
            fds,
        }),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;
