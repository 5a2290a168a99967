//! Length-prefixed messages over a byte stream.
//!
//! ```text
//!   | length of the message, u32 little-endian | message | length | ...
//! ```
//!
//! Reads never go past the end of a message: while bytes of another one are pending,
//! the socket polls readable. A message that does not fit the socket's buffer is
//! accepted for sending nevertheless, and its rest is sent when there is room; the next
//! message is accepted only afterwards.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send},
};
use serde::Serialize;

use super::{ChannelError, MAX_MESSAGE, encode};

/// Bytes of the length before each message.
const HEADER: usize = 4;

/// A length-prefixed message.
type Frame = [u8; HEADER + MAX_MESSAGE];

#[derive(Debug)]
pub(super) struct Stream {
    socket: OwnedFd,
    input: Input,
    output: Box<Frame>,
    /// The unsent part of `output`.
    unsent: std::ops::Range<usize>,
    ended: Option<Ended>,
}

/// Why nothing more can be received. Stored, because the kernel reports a socket error
/// only once, and EOF afterwards, which for a lease means that the lender has ended it.
#[derive(Clone, Copy, Debug)]
enum Ended {
    /// An invalid length: the start of the next message is unknown.
    Framing,
    /// A socket error, for example an unresponsive host.
    System(Errno),
}

impl From<Ended> for ChannelError {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::System(errno) => errno.into(),
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
        let header = self
            .frame
            .first_chunk::<HEADER>()
            .expect("a frame has a header");
        let len = u32::from_le_bytes(*header) as usize;
        match len {
            1..=MAX_MESSAGE => Ok(len),
            // No message is empty.
            0 => Err(postcard::Error::DeserializeUnexpectedEnd.into()),
            // For example "HTTP": the text of another protocol is a large number.
            _ if self.is_first => Err(ChannelError::Foreign(*header)),
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
            socket,
            input: Input::new(),
            output: Box::new([0; HEADER + MAX_MESSAGE]),
            unsent: 0..0,
            ended: None,
        }
    }

    pub(super) fn into_socket(self) -> OwnedFd {
        self.socket
    }

    pub(super) fn wants_write(&self) -> bool {
        !self.unsent.is_empty()
    }

    pub(super) fn flush(&mut self) -> Result<(), ChannelError> {
        while self.wants_write() {
            let bytes = &self.output[self.unsent.clone()];
            match send(&self.socket, bytes, SendFlags::NOSIGNAL) {
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

    pub(super) fn try_send<T: Serialize>(&mut self, message: &T) -> Result<bool, ChannelError> {
        self.flush()?;
        if self.wants_write() {
            return Ok(false);
        }
        let (header, body) = self.output.split_at_mut(HEADER);
        let len = encode(message, 0, body)?.len();
        header.copy_from_slice(&(len as u32).to_le_bytes());
        self.unsent = 0..HEADER + len;
        self.flush()?;
        Ok(true)
    }

    /// The bytes of the next message, if it has arrived.
    pub(super) fn try_receive(&mut self) -> Result<Option<&[u8]>, ChannelError> {
        if let Some(ended) = self.ended {
            return Err(ended.into());
        }
        // `fill` reports an error after the data that the peer has sent before.
        let _ = self.flush();
        self.fill()?;
        self.input.take()
    }

    /// Reads until the message is complete or the socket is empty.
    fn fill(&mut self) -> Result<(), ChannelError> {
        loop {
            let missing = match self.input.missing() {
                Ok(missing) => missing,
                Err(error) => {
                    self.ended.get_or_insert(Ended::Framing);
                    return Err(error);
                }
            };
            if missing.is_empty() {
                return Ok(());
            }
            match recv(&self.socket, missing, RecvFlags::empty()) {
                Ok((_, 0)) => return Err(ChannelError::Closed),
                Ok((_, read)) => self.input.len += read,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(self.end(errno)),
            }
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
