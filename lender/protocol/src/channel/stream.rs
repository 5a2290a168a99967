//! Messages over a byte stream: each with its length before it.
//!
//! ```text
//!   | length of the message, u32 little-endian | message | length | ...
//! ```
//!
//! Exactly one message is read at a time: as long as bytes of another one are
//! about, the socket polls readable. A message that did not fit the socket's
//! buffer as a whole is taken all the same, and its tail sent when there is
//! room; the next one is not taken before that.

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

/// A message with its length.
type Frame = [u8; HEADER + MAX_MESSAGE];

#[derive(Debug)]
pub(super) struct Stream {
    socket: OwnedFd,
    input: Input,
    output: Box<Frame>,
    /// What of `output` has yet to go.
    unsent: std::ops::Range<usize>,
    ended: Option<Ended>,
}

/// Why nothing more can be received. Kept, because the system tells only once,
/// and then says that the peer has closed the connection: which is another
/// thing, and means that a lender has taken its device back.
#[derive(Clone, Copy, Debug)]
enum Ended {
    /// Where the peer's next message begins cannot be told.
    Framing,
    /// Such as a host that does not answer any more.
    System(Errno),
}

impl From<Ended> for ChannelError {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::System(errno) => errno.into(),
            Ended::Framing => Self::Io(io::Error::new(
                io::ErrorKind::InvalidData,
                "the peer sent a message of no allowed length before",
            )),
        }
    }
}

/// The message that is coming.
#[derive(Debug)]
struct Input {
    frame: Box<Frame>,
    /// How much of it has come.
    len: usize,
    /// No message was taken yet.
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

    /// Where the next bytes go: what is missing of the header, then of the
    /// message. Empty when it is whole.
    fn missing(&mut self) -> Result<&mut [u8], ChannelError> {
        let end = match self.len < HEADER {
            true => HEADER,
            false => HEADER + self.message_len()?,
        };
        Ok(&mut self.frame[self.len..end])
    }

    /// What the header says, checked.
    fn message_len(&self) -> Result<usize, ChannelError> {
        let header = self.frame.first_chunk::<HEADER>().expect("a frame has one");
        let len = u32::from_le_bytes(*header) as usize;
        match len {
            1..=MAX_MESSAGE => Ok(len),
            // No message of ours encodes to nothing.
            0 => Err(postcard::Error::DeserializeUnexpectedEnd.into()),
            // Such as "HTTP": every other protocol's text is a large number.
            _ if self.is_first => Err(ChannelError::Foreign(*header)),
            len => Err(ChannelError::TooLarge { len, fds: 0 }),
        }
    }

    /// The message, if it is whole; the next one begins.
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

    /// What an error of the socket means.
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

    /// The bytes of the next message, if it is there.
    pub(super) fn try_receive(&mut self) -> Result<Option<&[u8]>, ChannelError> {
        if let Some(ended) = self.ended {
            return Err(ended.into());
        }
        // A peer that is gone shows below, after what it sent before.
        let _ = self.flush();
        self.fill()?;
        self.input.take()
    }

    /// Reads until the message is whole, or there is no more now.
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
