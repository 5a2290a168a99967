//! Length-prefixed messages over a byte stream.
//!
//! ```text
//!   | length of the message, u32 little-endian | message | length | ...
//! ```
//!
//! Reads never go past the end of a message: while bytes of another one are pending,
//! the socket polls readable. A message that does not fit the socket's buffer is
//! accepted for sending nevertheless, and its rest is sent when there is room; the next
//! message is accepted only afterwards. With TLS the same holds for records: see [`super::tls`].

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use farside_medium::Secrets;
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send},
};
use serde::Serialize;

use super::{
    ChannelError, MAX_MESSAGE, encode,
    tls::{Found, ReadError, Session, TlsError},
};

/// Bytes of the length before each message.
const HEADER: usize = 4;

/// Most TLS records that one call receives: a peer that sends records without data does not hold up
/// the caller.
const MAX_RECORDS: u32 = 64;

/// A length-prefixed message.
type Frame = [u8; HEADER + MAX_MESSAGE];

#[derive(Debug)]
pub(super) struct Stream {
    tls: Option<Box<Session>>,
    socket: Arc<OwnedFd>,
    input: Input,
    output: Box<Frame>,
    /// The unsent part of `output`, without TLS.
    unsent: std::ops::Range<usize>,
    ended: Option<Ended>,
}

/// Why nothing more can be received. Stored, because the kernel reports a socket error
/// only once, and EOF afterwards, which for a lease means that the lender has ended it.
#[derive(Clone, Debug)]
enum Ended {
    /// An invalid length: the start of the next message is unknown.
    Framing,
    /// A socket error, for example an unresponsive host.
    System(Errno),
    /// The TLS session has failed.
    Tls(TlsError),
}

impl From<Ended> for ChannelError {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::System(errno) => errno.into(),
            Ended::Tls(error) => error.into(),
            Ended::Framing => Self::Io(io::Error::new(
                io::ErrorKind::InvalidData,
                "an earlier message of the peer had an invalid length",
            )),
        }
    }
}

/// The message that is being received.
#[derive(Debug)]
struct Input {
    frame: Box<Frame>,
    /// Bytes received.
    len: usize,
    /// No message has been returned yet.
    is_first: bool,
}

impl Input {
    fn new() -> Self {
        Self {
            frame: Box::new([0; HEADER + MAX_MESSAGE]),
            len: 0,
            is_first: true,
        }
    }

    /// The buffer for the next bytes: the missing part of the header, then of the message.
    /// Empty if the message is complete.
    fn missing(&mut self) -> Result<&mut [u8], ChannelError> {
        let end = match self.len < HEADER {
            true => HEADER,
            false => HEADER + self.message_len()?,
        };
        Ok(&mut self.frame[self.len..end])
    }

    /// The length in the header, checked.
    fn message_len(&self) -> Result<usize, ChannelError> {
        let [a, b, c, d, ..] = *self.frame;
        let header = [a, b, c, d];
        let len = u32::from_le_bytes(header) as usize;
        match len {
            1..=MAX_MESSAGE => Ok(len),
            // No message is empty.
            0 => Err(postcard::Error::DeserializeUnexpectedEnd.into()),
            // For example "HTTP": the text of another protocol is a large number.
            _ if self.is_first => Err(ChannelError::Foreign(header)),
            len => Err(ChannelError::TooLarge { len, fds: 0 }),
        }
    }

    /// The message, if it is complete. Prepares for the next one.
    fn take(&mut self) -> Result<Option<&[u8]>, ChannelError> {
        if self.len < HEADER {
            return Ok(None);
        }
        let end = HEADER + self.message_len()?;
        if self.len < end {
            return Ok(None);
        }
        self.len = 0;
        self.is_first = false;
        Ok(Some(&self.frame[HEADER..end]))
    }
}

impl Stream {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            tls: None,
            socket: Arc::new(socket),
            input: Input::new(),
            output: Box::new([0; HEADER + MAX_MESSAGE]),
            unsent: 0..0,
            ended: None,
        }
    }

    /// A stream with a TLS session, whose handshake comes first.
    pub(super) fn with_tls(
        socket: OwnedFd,
        connection: impl Into<rustls::Connection>,
        presented: farside_pki::Presented,
    ) -> Self {
        let mut stream = Self::new(socket);
        let session = Session::new(connection, presented, Arc::clone(&stream.socket));
        stream.tls = Some(Box::new(session));
        stream
    }

    /// The TLS session, if it has one.
    pub(super) fn session(&self) -> Option<&Session> {
        self.tls.as_deref()
    }

    /// Continues the handshake. Returns whether it is complete.
    pub(super) fn shake(&mut self) -> Result<bool, ChannelError> {
        let shaken = self.tls.as_mut().map_or(Ok(true), |tls| tls.shake());
        shaken.map_err(|error| self.end_read(error))
    }

    /// The socket. Ends a TLS session.
    pub(super) fn into_socket(self) -> OwnedFd {
        let socket = Arc::clone(&self.socket);
        drop(self);
        Arc::into_inner(socket).expect("only a session shares the socket")
    }

    /// The socket, and the secrets of its TLS session. The caller has sent everything.
    pub(super) fn into_data(mut self) -> Result<(OwnedFd, Option<Secrets>), ChannelError> {
        let secrets = self.tls.take().map(|tls| tls.into_secrets()).transpose()?;
        Ok((self.into_socket(), secrets))
    }

    pub(super) fn wants_write(&self) -> bool {
        match &self.tls {
            Some(tls) => tls.wants_write(),
            None => !self.unsent.is_empty(),
        }
    }

    /// Ends the TLS session, if there is one, in this direction.
    pub(super) fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close();
        }
    }

    pub(super) fn flush(&mut self) -> Result<(), ChannelError> {
        if let Some(tls) = &mut self.tls {
            let Err(errno) = tls.flush() else {
                return Ok(());
            };
            // A peer that refuses this host says so, and closes the connection.
            let alert = if self.input.is_first {
                tls.alert()
            } else {
                None
            };
            return Err(match (alert, self.end(errno)) {
                (Some(alert), _) => alert.into(),
                (None, ChannelError::Closed) => TlsError::Cut.into(),
                (None, error) => error,
            });
        }
        while self.wants_write() {
            let bytes = &self.output[self.unsent.clone()];
            match send(&*self.socket, bytes, SendFlags::NOSIGNAL) {
                Ok(sent) => self.unsent.start += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(errno) => {
                    self.unsent = 0..0;
                    return Err(self.end(errno));
                }
            }
        }
        Ok(())
    }

    /// Converts a socket error, and stores it if it ends the connection.
    fn end(&mut self, errno: Errno) -> ChannelError {
        let error = errno.into();
        if !matches!(error, ChannelError::Closed) {
            self.ended.get_or_insert(Ended::System(errno));
        }
        error
    }

    /// Converts an error of the TLS session, and stores it.
    fn end_read(&mut self, error: ReadError) -> ChannelError {
        let ended = match error {
            ReadError::Silent => return ChannelError::Closed,
            ReadError::System(errno) => Ended::System(errno),
            ReadError::Tls(error) => Ended::Tls(error),
        };
        self.ended.get_or_insert(ended).clone().into()
    }

    pub(super) fn try_send<T: Serialize>(&mut self, message: &T) -> Result<bool, ChannelError> {
        self.flush()?;
        if self.wants_write() {
            return Ok(false);
        }
        let (header, body) = self.output.split_at_mut(HEADER);
        let len = encode(message, 0, body)?.len();
        header.copy_from_slice(&(len as u32).to_le_bytes());
        match &mut self.tls {
            Some(tls) => tls.put(&self.output[..HEADER + len])?,
            None => self.unsent = 0..HEADER + len,
        }
        self.flush()?;
        Ok(true)
    }

    /// The bytes of the next message, if it has arrived.
    pub(super) fn try_receive(&mut self) -> Result<Option<&[u8]>, ChannelError> {
        if let Some(ended) = self.ended.clone() {
            return Err(ended.into());
        }
        // `fill` reports an error after the data that the peer has sent before.
        let _ = self.flush();
        self.fill()?;
        self.input.take()
    }

    /// Reads until the message is complete or the socket is empty.
    fn fill(&mut self) -> Result<(), ChannelError> {
        let mut records = MAX_RECORDS;
        loop {
            let missing = match self.input.missing() {
                Ok(missing) => missing,
                Err(error) => {
                    self.ended.get_or_insert(Ended::Framing);
                    return Err(error);
                }
            };
            if missing.is_empty() {
                return self.check_end();
            }
            let read = match &mut self.tls {
                Some(tls) => tls.read(missing, &mut records),
                None => match recv(&*self.socket, missing, RecvFlags::empty()) {
                    Ok((_, 0)) => Ok(Found::Closed),
                    Ok((_, read)) => Ok(Found::Data(read)),
                    Err(Errno::INTR) => continue,
                    Err(Errno::AGAIN) => Ok(Found::Nothing),
                    Err(errno) => return Err(self.end(errno)),
                },
            };
            match read {
                Ok(Found::Data(read)) => self.input.len += read,
                Ok(Found::Nothing) => return Ok(()),
                Ok(Found::Closed) => return Err(ChannelError::Closed),
                Err(error) => return Err(self.end_read(error)),
            }
        }
    }

    /// Checks that the TLS record with the end of a message has nothing after it, which poll(2)
    /// would not report.
    fn check_end(&mut self) -> Result<(), ChannelError> {
        if !self.tls.as_mut().is_some_and(|tls| tls.has_data()) {
            return Ok(());
        }
        let error = TlsError::Record("with bytes of two messages");
        Err(self.end_read(ReadError::Tls(error)))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.end();
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
