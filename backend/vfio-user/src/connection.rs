//! Framing on a nonblocking UNIX stream socket, with descriptor passing.
//!
//! # Matching descriptors to messages
//!
//! Descriptors travel with the first byte of the `sendmsg` that carried them,
//! and Linux ends a `recvmsg` behind the segment that had descriptors. So the
//! descriptors of one `recvmsg` came with the *last* segment in it, and belong
//! to the last message that begins in the received bytes. To keep that exact,
//! one read never goes past the end of a message that may carry descriptors:
//! it requests the rest of a message whose size is known, or
//! [`FIRST_READ`] bytes, the size of the shortest message that may carry any.
//! Region reads and region writes of up to four bytes, nearly all of the traffic,
//! arrive whole in that first read: one system call each. A server may trade the
//! exactness for fewer system calls: [`Connection::read_ahead`].

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

use super::header::{HEADER_SIZE, Header, ReplyTo};
use super::outbox::Outbox;
use super::reply::{self, Reply};
use super::stream::Stream;
use super::{MAX_MESSAGE_SIZE, MAX_MSG_FDS, MAX_QUEUED_BYTES};

/// Bytes of a `DEVICE_SET_IRQS` without data: the shortest message that may
/// carry descriptors.
const FIRST_READ: usize = HEADER_SIZE + 20;

/// Initial size of the receive buffer in bytes, and its size after a long message is
/// done: enough for everything but bulk region accesses.
const BUFFER: usize = 8 << 10;

/// A client's connection. Never blocks.
///
/// Drop the connection after an error.
#[derive(Debug)]
pub struct Connection {
    socket: Stream,
    /// Received and not yet consumed: `input[front..filled]`, which starts with the
    /// start of a message.
    input: Vec<u8>,
    front: usize,
    filled: usize,
    /// Bytes at the front that the last returned message occupies.
    consumed: usize,
    /// Least size of a read while the message at the front is incomplete.
    least_read: usize,
    /// Bytes of a refused message's body that are still to be discarded.
    to_drain: usize,
    /// The last read emptied the socket's receive queue.
    emptied: bool,
    /// The client has shut down: read on until EOF.
    ending: bool,
    /// Descriptors of messages in `input`, by the message's start.
    fds: Vec<Passed>,
    output: Vec<u8>,
    outbox: Outbox,
}

/// Descriptors of the message that starts at `input[start]`.
#[derive(Debug)]
struct Passed {
    start: usize,
    fds: Vec<OwnedFd>,
    refused: bool,
}

/// A framed message. Only its framing has been checked.
#[derive(Debug)]
pub struct Message<'a> {
    /// The header as received.
    pub header: Header,
    /// The bytes after the header: `header.size - 16`, or none if the size is not
    /// between 16 and [`MAX_MESSAGE_SIZE`].
    pub payload: &'a [u8],
    /// The message's descriptors, at most [`MAX_MSG_FDS`]. Dropping the message
    /// closes them.
    pub fds: Vec<OwnedFd>,
    /// The message carried more than [`MAX_MSG_FDS`] descriptors, or this process ran
    /// out of them; all have been closed.
    pub fds_refused: bool,
}

/// The connection has ended.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum ConnectionError {
    /// Between messages or while sending.
    #[error("the client closed the connection")]
    Closed,
    /// In the middle of a message.
    #[error("the client closed the connection {received} bytes into a message")]
    ClosedInMessage { received: usize },
    /// The queue of replies is full.
    #[error(
        "the client does not read its replies: {waiting} bytes to queue, the limit is {MAX_QUEUED_BYTES}"
    )]
    ClientDoesNotRead { waiting: usize },
    /// The start of the client's next message is unknown, or the client speaks
    /// another version; see [`Fate::ReplyThenClose`](super::Fate).
    #[error("protocol violation by the client")]
    Protocol(#[source] super::Refusal),
    /// recvmsg(2) failed.
    #[error("cannot receive from the client")]
    Receive(#[source] Errno),
    /// sendmsg(2) failed.
    #[error("cannot send to the client")]
    Send(#[source] Errno),
    /// A queued reply's descriptor could not be duplicated.
    #[error("cannot duplicate a descriptor for a queued reply")]
    QueueFd(#[source] std::io::Error),
    /// fcntl(2) failed.
    #[error("cannot make the client's socket nonblocking")]
    Nonblocking(#[source] std::io::Error),
}

impl Connection {
    /// Takes over a connected stream and makes it nonblocking.
    ///
    /// # Errors
    ///
    /// [`ConnectionError::Nonblocking`].
    pub fn new(stream: UnixStream) -> Result<Self, ConnectionError> {
        stream
            .set_nonblocking(true)
            .map_err(ConnectionError::Nonblocking)?;
        Ok(Self {
            socket: Stream::new(stream.into()),
            input: vec![0; BUFFER],
            front: 0,
            filled: 0,
            consumed: 0,
            least_read: FIRST_READ,
            to_drain: 0,
            emptied: false,
            ending: false,
            fds: Vec::new(),
            output: Vec::with_capacity(BUFFER),
            outbox: Outbox::default(),
        })
    }

    /// Receives many small messages with one system call from here on.
    ///
    /// Only for clients that send each message with a system call of its own, as QEMU
    /// does. With others, descriptors may be attributed to a later message of the
    /// same read.
    pub fn read_ahead(&mut self) {
        self.least_read = BUFFER;
    }

    /// Call on `EPOLLRDHUP`. With `EPOLLET` a short read does not imply EOF, and no
    /// further event is delivered.
    pub fn on_peer_shutdown(&mut self) {
        self.ending = true;
    }

    /// The next message, or `None` if it is incomplete: wait until the socket is
    /// readable.
    ///
    /// # Errors
    ///
    /// Fails if the client has closed the connection or the socket fails.
    pub fn receive(&mut self) -> Result<Option<Message<'_>>, ConnectionError> {
        match self.arrived()? {
            Some(header) => Ok(Some(self.hand_out(header))),
            None => Ok(None),
        }
    }

    /// The header of the message that [`receive`](Self::receive) would return. Does
    /// not consume the message.
    ///
    /// # Errors
    ///
    /// As [`receive`](Self::receive).
    pub fn peek(&mut self) -> Result<Option<Header>, ConnectionError> {
        self.arrived()
    }

    /// Receives until the next message is complete or refused, and returns its header.
    fn arrived(&mut self) -> Result<Option<Header>, ConnectionError> {
        self.discard_consumed();
        loop {
            let have = self.filled - self.front;
            if self.to_drain > 0 && have == 0 {
                if !self.drain()? {
                    return Ok(None);
                }
                continue;
            }
            let want = match self.header() {
                Some(header) => match frame_size(&header) {
                    Some(size) if size <= have => return Ok(Some(header)),
                    Some(size) => size,
                    None => {
                        // Too long: refused now, its body discarded as it arrives.
                        // `have` bytes of it are in the input.
                        self.to_drain = header.size as usize - have;
                        return Ok(Some(header));
                    }
                },
                None => 0,
            };
            if !self.fill(want.max(self.least_read))? {
                return Ok(None);
            }
        }
    }

    /// Sends a reply, or queues it if the socket is full. Does nothing if the command
    /// had the no-reply flag.
    ///
    /// # Errors
    ///
    /// Fails if the client has closed the connection or does not read, or the socket
    /// fails.
    pub fn send(
        &mut self,
        to: ReplyTo,
        reply: Result<Reply<'_>, Errno>,
    ) -> Result<(), ConnectionError> {
        if !to.wanted() {
            return Ok(());
        }
        self.output.clear();
        let fd = reply::encode(to, reply, &mut self.output);
        self.outbox.send(self.socket.as_fd(), &self.output, fd)?;
        self.output.shrink_to(BUFFER);
        Ok(())
    }

    /// Sends concatenated encoded commands, or queues them behind earlier messages.
    pub(super) fn send_encoded(&mut self, commands: &[u8]) -> Result<(), ConnectionError> {
        self.outbox.send(self.socket.as_fd(), commands, None)
    }

    /// Whether replies wait for the socket to become writable. Not calling
    /// [`receive`](Self::receive) meanwhile throttles a client that pipelines more
    /// than it reads.
    pub fn wants_write(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Sends as many of the queued replies as the socket takes. Returns whether the
    /// queue is empty.
    ///
    /// # Errors
    ///
    /// Fails if the client has closed the connection or the socket fails.
    pub fn flush(&mut self) -> Result<bool, ConnectionError> {
        self.outbox.flush(self.socket.as_fd())
    }

    /// Data may have arrived since the last read, and the socket have been reported readable for it.
    pub(super) fn may_have_more(&mut self) {
        self.emptied = false;
    }

    /// Whether the last read, since [`may_have_more`](Self::may_have_more), emptied the socket and all
    /// its messages have been returned. Another [`receive`](Self::receive) would only get EAGAIN; data
    /// that arrived since makes the socket readable.
    pub(super) fn is_emptied(&self) -> bool {
        self.emptied && !self.ending && self.front + self.consumed == self.filled
    }

    fn header(&self) -> Option<Header> {
        let input = &self.input[self.front..self.filled];
        input.first_chunk().map(Header::decode)
    }

    /// Removes the last returned message from the input.
    fn discard_consumed(&mut self) {
        self.front += std::mem::take(&mut self.consumed);
        if self.front == self.filled {
            (self.front, self.filled) = (0, 0);
            // A long message is alone in the input: its last read stops at its end.
            if self.input.len() > BUFFER {
                self.input.truncate(BUFFER);
                self.input.shrink_to_fit();
            }
        }
    }

    /// Moves the input to the start of the buffer.
    fn make_room(&mut self) {
        if self.front != 0 {
            self.input.copy_within(self.front..self.filled, 0);
            self.filled -= self.front;
            for passed in &mut self.fds {
                passed.start -= self.front;
            }
            self.front = 0;
        }
    }

    /// Returns the message at the front, of this header, which is complete or too long.
    fn hand_out(&mut self, header: Header) -> Message<'_> {
        let (front, filled) = (self.front, self.filled);
        let (payload, end) = match frame_size(&header) {
            Some(size) => (front + HEADER_SIZE..front + size, front + size),
            // Too long: the rest of the input is the start of its body.
            None => (filled..filled, filled),
        };
        self.consumed = end - front;
        let payload = &self.input[payload];
        let (fds, fds_refused) = match self.fds.first() {
            Some(passed) if passed.start < end => {
                let passed = self.fds.remove(0);
                (passed.fds, passed.refused)
            }
            _ => (Vec::new(), false),
        };
        Message {
            header,
            payload,
            fds,
            fds_refused,
        }
    }

    /// Reads once, to at most `want` bytes of input. Returns whether any arrived.
    fn fill(&mut self, want: usize) -> Result<bool, ConnectionError> {
        self.make_room();
        if want > self.input.len() {
            self.input.resize(want, 0);
        }
        let from = self.filled;
        let Some(Received {
            bytes: received,
            fds,
            refused,
        }) = receive_some(self.socket.as_fd(), &mut self.input[from..want])?
        else {
            return Ok(false);
        };
        if received == 0 {
            return Err(match from {
                0 => ConnectionError::Closed,
                received => ConnectionError::ClosedInMessage { received },
            });
        }
        self.filled += received;
        // The kernel ends a read behind descriptors, even those that it dropped: a
        // short read then does not mean that the socket is empty.
        self.emptied = from + received < want && fds.is_empty() && !refused;
        if refused || !fds.is_empty() {
            let start = self.last_message_start();
            self.attribute(start, fds, refused);
        }
        Ok(true)
    }

    /// Start of the message that the last received byte belongs to.
    fn last_message_start(&self) -> usize {
        let mut start = self.front;
        while let Some(header) = self.input[start..self.filled]
            .first_chunk()
            .map(Header::decode)
        {
            match frame_size(&header) {
                Some(size) if start + size < self.filled => start += size,
                _ => break,
            }
        }
        start
    }

    fn attribute(&mut self, start: usize, fds: Vec<OwnedFd>, refused: bool) {
        let known = self.fds.iter().position(|passed| passed.start == start);
        let at = known.unwrap_or_else(|| {
            self.fds.push(Passed {
                start,
                fds: Vec::new(),
                refused: false,
            });
            self.fds.len() - 1
        });
        let passed = &mut self.fds[at];
        passed.fds.extend(fds);
        passed.refused |= refused || passed.fds.len() > MAX_MSG_FDS;
        if passed.refused {
            passed.fds.clear();
        }
    }

    /// Discards a part of a refused message's body, with any descriptors. Returns
    /// whether any bytes arrived.
    fn drain(&mut self) -> Result<bool, ConnectionError> {
        let most = self.to_drain.min(self.input.len());
        let Some(Received {
            bytes: received, ..
        }) = receive_some(self.socket.as_fd(), &mut self.input[..most])?
        else {
            return Ok(false);
        };
        if received == 0 {
            return Err(ConnectionError::ClosedInMessage { received: 0 });
        }
        self.to_drain -= received;
        Ok(true)
    }
}

impl AsFd for Connection {
    /// For the event loop: readable when there may be a message, writable when
    /// [`Connection::flush`] may make progress.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Bytes of a message in the stream, or `None` if it is above the limit. A size below
/// the header's counts as the header's: such a message has no known end, and the
/// session closes the connection.
fn frame_size(header: &Header) -> Option<usize> {
    (header.size <= MAX_MESSAGE_SIZE).then_some((header.size as usize).max(HEADER_SIZE))
}

/// The result of one `recvmsg`.
struct Received {
    /// Number of bytes; 0 at EOF.
    bytes: usize,
    fds: Vec<OwnedFd>,
    /// Descriptors were dropped.
    refused: bool,
}

/// One `recvmsg`; `None` on EAGAIN.
fn receive_some(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> Result<Option<Received>, ConnectionError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Ok(received) => break received,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => return Ok(None),
            // The client closed with replies unread.
            Err(Errno::CONNRESET) => return Err(ConnectionError::Closed),
            Err(errno) => return Err(ConnectionError::Receive(errno)),
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed);
        }
    }
    // The kernel drops descriptors for which there is no space, or which would exceed
    // this process's RLIMIT_NOFILE.
    let refused = received.flags.contains(ReturnFlags::CTRUNC);
    Ok(Some(Received {
        bytes: received.bytes,
        fds,
        refused,
    }))
}
