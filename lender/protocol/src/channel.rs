//! A message channel: within a host over a UNIX socket, with descriptor passing;
//! between hosts over TCP, without, and with TLS unless the address is plain.
//!
//! To wait for several channels, poll for [`Channel::interest`]. A channel buffers the
//! received part of an incomplete message but never reads into the next one, so poll(2)
//! reports every pending message.

mod packets;
mod stream;
mod tcp;
mod tls;

use std::{
    io,
    net::TcpStream,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
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

use crate::{Address, Dialer, Identity, Target};
use farside_medium::Secrets;
use farside_pki::{Credentials, Side};
use packets::Packets;
use stream::Stream;

pub(crate) use packets::connect as connect_unix;
pub(crate) use tcp::{connect as connect_tcp, connect_to as connect_tcp_to};
pub use tls::TlsError;

/// Most bytes of one encoded message. Bounds the receive buffer.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// Most descriptors of one message: as many as MSI has vectors, which are enabled
/// together.
pub const MAX_FDS: usize = 32;

/// Why a message could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The deadline has passed.
    #[error("no answer within {0:.1?}")]
    TimedOut(Duration),
    /// The message exceeds a limit.
    #[error(
        "message of {len} bytes with {fds} descriptors exceeds the limit of {MAX_MESSAGE} bytes, {MAX_FDS} descriptors"
    )]
    TooLarge {
        /// Encoded bytes.
        len: usize,
        /// Descriptors.
        fds: usize,
    },
    /// Descriptors of a received message were dropped.
    #[error(
        "descriptors of a message were lost: there were more than {MAX_FDS}, or this process has reached its limit of open files (raise `ulimit -n`, `LimitNOFILE=` in a systemd unit)"
    )]
    DescriptorsLost,
    /// Descriptors cannot be sent over TCP. The message was not sent.
    #[error(
        "{0} descriptors (memory files or eventfds) cannot be sent over TCP: between hosts, memory is reached through an NTB and interrupts are relayed"
    )]
    NoDescriptors(usize),
    /// The first bytes from a TCP peer do not start a message.
    #[error(
        "the peer does not use farside's protocol: its first bytes are \"{}\"{}",
        .0.escape_ascii(), tls_hint(*.0)
    )]
    Foreign([u8; 4]),
    /// TLS has failed.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The bytes cannot be decoded.
    #[error("malformed message from the peer")]
    Malformed(#[from] postcard::Error),
    /// The socket failed.
    #[error("socket error")]
    Io(#[from] io::Error),
}

/// The remedy if `first`, the first bytes of a peer without TLS, are a TLS record's.
pub(crate) fn tls_hint(first: [u8; 4]) -> &'static str {
    match first {
        // A handshake or an alert, with the major version of TLS.
        [21 | 22, 3, ..] => ", which is TLS: connect as tls:HOST:PORT to a lender that listens so",
        _ => "",
    }
}

impl From<Errno> for ChannelError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => Self::Closed,
            other => Self::Io(other.into()),
        }
    }
}

/// One end of a connection. Reuses its buffers: neither direction allocates for
/// messages without descriptors.
#[derive(Debug)]
pub struct Channel {
    framing: Framing,
    sent: Arc<AtomicU64>,
    /// Its messages may end before fields of later versions.
    is_appendable: bool,
}

#[derive(Debug)]
enum Framing {
    Packets(Packets),
    Stream(Box<Stream>),
}

impl Channel {
    /// Connects to the listener at `address`, with TLS by the certificates in the directory `pki`.
    /// Waits at most `timeout` for a full backlog or an unresponsive host. The timeout does
    /// not cover name resolution.
    pub fn connect(address: &Address, pki: &Path, timeout: Duration) -> io::Result<Self> {
        Self::connect_by(address, &address.into(), &Dialer::new(pki), timeout)
    }

    /// As [`Channel::connect`], to `target` of the lender at `address`.
    pub(crate) fn connect_by(
        address: &Address,
        target: &Target,
        dialer: &Dialer,
        timeout: Duration,
    ) -> io::Result<Self> {
        // Zero would mean no timeout.
        let timeout = timeout.max(Duration::from_millis(1));
        let deadline = Instant::now() + timeout;
        match address {
            Address::Unix(_) => dialer.dial(target, timeout).map(Self::from_socket),
            Address::Tcp { .. } => Self::from_tcp(dialer.dial(target, timeout)?.into()),
            Address::Tls { host, .. } => {
                // First, so that a fault of this host is told by name.
                let credentials = load(dialer)?;
                let socket = dialer.dial(target, timeout)?.into();
                Self::connect_tls(socket, host, &credentials, deadline, timeout)
            }
        }
    }

    /// Opens a second connection to the TCP peer at `address`.
    pub(crate) fn connect_again(
        &self,
        address: &Address,
        dialer: &Dialer,
        timeout: Duration,
    ) -> io::Result<Self> {
        let peer = Target::Peer(tcp::peer(self.as_fd())?);
        Self::connect_by(address, &peer, dialer, timeout)
    }

    /// Establishes a TLS session with the lender at `host`, whose certificate must have that name.
    fn connect_tls(
        socket: TcpStream,
        host: &str,
        credentials: &Credentials,
        deadline: Instant,
        timeout: Duration,
    ) -> io::Result<Self> {
        let (connection, presented) = credentials.connect(host).map_err(io::Error::other)?;
        tcp::prepare(&socket)?;
        let stream = Stream::with_tls(socket.into(), connection, presented);
        let mut channel = Self::new(Framing::Stream(Box::new(stream)));
        channel
            .shake(deadline, timeout)
            .map_err(|error| match error {
                ChannelError::Io(error) => error,
                late @ ChannelError::TimedOut(_) => io::Error::new(io::ErrorKind::TimedOut, late),
                other => io::Error::other(other),
            })?;
        Ok(channel)
    }

    fn shake(&mut self, deadline: Instant, timeout: Duration) -> Result<(), ChannelError> {
        loop {
            let Framing::Stream(stream) = &mut self.framing else {
                return Ok(());
            };
            if stream.shake()? {
                return Ok(());
            }
            self.wait(self.interest(), deadline, timeout)?;
        }
    }

    /// Two connected ends, within this host.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = packets::pair()?;
        Ok((Self::from_socket(a), Self::from_socket(b)))
    }

    /// Wraps a connected, nonblocking UNIX socket of type `SOCK_SEQPACKET`.
    pub fn from_socket(socket: OwnedFd) -> Self {
        Self::new(Framing::Packets(Packets::new(socket)))
    }

    /// Wraps a TCP socket that a lender has accepted, for TLS. Receiving includes the handshake, so
    /// this returns at once.
    pub fn accept_tls(socket: TcpStream, credentials: &Credentials) -> io::Result<Self> {
        let (connection, presented) = credentials.accept().map_err(io::Error::other)?;
        tcp::prepare(&socket)?;
        let stream = Stream::with_tls(socket.into(), connection, presented);
        Ok(Self::new(Framing::Stream(Box::new(stream))))
    }

    /// Wraps a connected TCP socket, without TLS.
    pub fn from_tcp(socket: TcpStream) -> io::Result<Self> {
        tcp::prepare(&socket)?;
        let stream = Stream::new(socket.into());
        Ok(Self::new(Framing::Stream(Box::new(stream))))
    }

    fn new(framing: Framing) -> Self {
        Self {
            framing,
            sent: Arc::default(),
            is_appendable: false,
        }
    }

    /// For messages between processes of one host that may be of two versions: fields that are absent in a received
    /// message are zero ([`farside_hand_over::decode`]).
    pub fn appendable(mut self) -> Self {
        self.is_appendable = true;
        self
    }

    /// The socket, for passing to another process. Over TCP this loses buffered data, and ends a TLS
    /// session.
    pub fn into_socket(self) -> OwnedFd {
        match self.framing {
            Framing::Packets(packets) => packets.into_socket(),
            Framing::Stream(stream) => stream.into_socket(),
        }
    }

    /// A TCP connection for data: what was received is used up, and everything is sent, which takes at
    /// most `timeout`.
    ///
    /// # Errors
    /// The connection has ended, is too slow, or is none over TCP.
    pub fn into_link(
        mut self,
        timeout: Duration,
    ) -> Result<(OwnedFd, Option<Secrets>), ChannelError> {
        let deadline = Instant::now() + timeout;
        while self.wants_write() {
            self.wait(PollFlags::OUT, deadline, timeout)?;
            self.flush()?;
        }
        match self.framing {
            Framing::Packets(_) => Err(Errno::NOTSUP.into()),
            Framing::Stream(stream) => stream.into_data(),
        }
    }

    /// Whether it is a TCP connection, which cannot carry descriptors.
    pub fn is_tcp(&self) -> bool {
        matches!(self.framing, Framing::Stream(_))
    }

    /// The peer's process or address, for log lines.
    pub fn peer(&self) -> String {
        match &self.framing {
            Framing::Packets(packets) => packets.peer(),
            Framing::Stream(stream) => {
                let address = match tcp::peer(stream.as_fd()) {
                    Ok(address) => address.to_string(),
                    Err(error) => format!("unknown host ({error})"),
                };
                match stream.session().and_then(|session| session.host()) {
                    Some(host) => format!("{host} ({address})"),
                    None => address,
                }
            }
        }
    }

    /// The peer's identity, which does not change while it is connected. Fails if a TCP peer has
    /// disconnected, or if its TLS handshake is not complete: then nothing was received from
    /// it, either.
    pub fn identity(&self) -> io::Result<Identity> {
        let stream = match &self.framing {
            Framing::Packets(packets) => return packets.identity(),
            Framing::Stream(stream) => stream,
        };
        let address = tcp::peer(stream.as_fd())?;
        let Some(session) = stream.session() else {
            return Ok(Identity::Network { address });
        };
        match session.host() {
            Some(name) => Ok(Identity::Host {
                name: name.to_owned(),
                address,
            }),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Counter of sent messages, shared with other threads.
    pub(crate) fn sent(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.sent)
    }

    /// Resets the counter of sent messages.
    pub(crate) fn counted_anew(self) -> Self {
        Self::new(self.framing)
    }

    /// Shuts down sending: the peer sees EOF. Messages from the peer can still be
    /// received.
    pub fn shut_down_sending(&mut self) -> io::Result<()> {
        // shutdown(2) below fails as well if this does.
        let _ = self.flush();
        if let Framing::Stream(stream) = &mut self.framing {
            stream.close();
        }
        Ok(shutdown(&*self, Shutdown::Write)?)
    }

    /// The events to poll for.
    pub fn interest(&self) -> PollFlags {
        match self.wants_write() {
            true => PollFlags::IN | PollFlags::OUT,
            false => PollFlags::IN,
        }
    }

    /// Whether part of a message that [`Channel::try_send`] accepted is unsent. Always
    /// false for a UNIX socket. Every send and receive flushes first, so a loop that polls
    /// for [`Channel::interest`] and then receives need not call [`Channel::flush`].
    pub fn wants_write(&self) -> bool {
        match &self.framing {
            Framing::Packets(_) => false,
            Framing::Stream(stream) => stream.wants_write(),
        }
    }

    /// Sends as much of the unsent part as the socket takes.
    pub fn flush(&mut self) -> Result<(), ChannelError> {
        match &mut self.framing {
            Framing::Packets(_) => Ok(()),
            Framing::Stream(stream) => stream.flush(),
        }
    }

    /// Sends without blocking. Returns `false`, without sending anything, if the peer's
    /// queue is full.
    pub fn try_send<T: Serialize>(
        &mut self,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<bool, ChannelError> {
        let sent = match &mut self.framing {
            Framing::Packets(packets) => packets.try_send(message, fds)?,
            Framing::Stream(_) if !fds.is_empty() => {
                return Err(ChannelError::NoDescriptors(fds.len()));
            }
            Framing::Stream(stream) => stream.try_send(message)?,
        };
        if sent {
            // Pairs with the Acquire load in `Client::call`.
            self.sent.fetch_add(1, Ordering::Release);
        }
        Ok(sent)
    }

    /// Sends, and waits for room for at most `timeout`. After an error other
    /// than [`ChannelError::TooLarge`] and [`ChannelError::NoDescriptors`] the
    /// message may have been sent, or may be sent later.
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

    /// Receives the next message if it has arrived. After
    /// [`ChannelError::DescriptorsLost`] later messages can still be received.
    pub fn try_receive<T: DeserializeOwned>(
        &mut self,
    ) -> Result<Option<(T, Vec<OwnedFd>)>, ChannelError> {
        // Ignores trailing bytes: a later version's Hello may be longer, and must be
        // refused by its version number.
        match &mut self.framing {
            Framing::Packets(packets) => match packets.try_receive()? {
                Some((bytes, fds)) if self.is_appendable => {
                    Ok(Some((farside_hand_over::decode(bytes)?, fds)))
                }
                Some((bytes, fds)) => Ok(Some((postcard::from_bytes(bytes)?, fds))),
                None => Ok(None),
            },
            Framing::Stream(stream) => match stream.try_receive()? {
                Some(bytes) => Ok(Some((postcard::from_bytes(bytes)?, Vec::new()))),
                None => Ok(None),
            },
        }
    }

    /// Receives the next message, and waits for it for at most `timeout`.
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
        match &self.framing {
            Framing::Packets(packets) => packets.as_fd(),
            Framing::Stream(stream) => stream.as_fd(),
        }
    }
}

fn load(dialer: &Dialer) -> io::Result<Credentials> {
    let open = |path: &Path| dialer.open(path);
    Credentials::load_by(dialer.pki(), Side::Client, &open).map_err(io::Error::other)
}

/// Encodes a message into `buffer`.
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
