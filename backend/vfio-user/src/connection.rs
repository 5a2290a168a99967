//! Framing on a nonblocking UNIX stream socket, with descriptor passing.
//!
//! # Which message a descriptor belongs to
//!
//! Descriptors travel with the first byte of the `sendmsg` that carried them,
//! and Linux ends a `recvmsg` behind the segment that had descriptors. So the
//! descriptors of one `recvmsg` came with the *last* segment in it, and belong
//! to the last message that begins in what was received. To keep that exact,
//! one read never goes past the end of a message that may carry descriptors:
//! it asks for the rest of a message whose size is known, or for
//! [`FIRST_READ`] bytes, the size of the shortest message that may carry any.
//! A region read and a region write of up to four bytes, which is nearly all of
//! the traffic, arrive whole in that first read: one system call each. A server
//! for which that is not enough may give the exactness up:
//! [`Connection::read_ahead`].

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
use super::{MAX_MESSAGE_SIZE, MAX_MSG_FDS};

/// Bytes of a `DEVICE_SET_IRQS` without data: the shortest message that may
/// carry descriptors.
const FIRST_READ: usize = HEADER_SIZE + 20;

/// What the receive buffer starts with, bytes, and the most it keeps when a
/// long message is done: enough for everything but bulk region accesses.
const BUFFER: usize = 8 << 10;

/// A client's connection. Never blocks.
///
/// After an error the connection is of no more use: drop it.
#[derive(Debug)]
pub struct Connection {
    socket: Stream,
    /// Received and not yet consumed: `input[front..filled]`. It starts at the
    /// start of a message.
    input: Vec<u8>,
    front: usize,
    filled: usize,
    /// Bytes at the front that were handed out as the last message.
    consumed: usize,
    /// Bytes to ask for when the message at the front is not there yet.
    least_read: usize,
    /// Bytes of a refused message's body that are still to be thrown away.
    to_drain: usize,
    /// The last read got all that there was.
    emptied: bool,
    /// The client has hung up: the end is to be read, too.
    ending: bool,
    /// Descriptors of messages in `input`, by where the message starts.
    fds: Vec<Passed>,
    output: Vec<u8>,
    outbox: Outbox,
}

/// Descriptors that came with the message that starts at `start` of the input.
#[derive(Debug)]
struct Passed {
    start: usize,
    fds: Vec<OwnedFd>,
    refused: bool,
}

/// A framed message. Only the framing has been looked at.
#[derive(Debug)]
pub struct Message<'a> {
    /// The header as received.
    pub header: Header,
    /// What follows the header: `header.size - 16` bytes, or nothing when the
    /// size is not between 16 and [`MAX_MESSAGE_SIZE`].
    pub payload: &'a [u8],
    /// Descriptors that came with it, at most [`MAX_MSG_FDS`]. Those that are
    /// not taken out are closed.
    pub fds: Vec<OwnedFd>,
    /// More than [`MAX_MSG_FDS`] descriptors came; all have been closed.
    pub fds_refused: bool,
}

/// The connection has ended.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// In an orderly way, between messages or while sending.
    #[error("the client closed the connection")]
    Closed,
    /// In the middle of a message.
    #[error("the client closed the connection {received} bytes into a message")]
    ClosedInMessage {
        /// Bytes of the message that had arrived.
        received: usize,
    },
    /// Replies pile up.
    #[error("the client does not read its replies: {waiting} bytes wait")]
    ClientDoesNotRead {
        /// Bytes that would be waiting.
        waiting: usize,
    },
    /// The client sent what leaves no way to find its next message, or speaks
    /// another version; see [`Fate::ReplyThenClose`](super::Fate).
    #[error("the client broke the protocol")]
    Protocol(#[source] super::Refusal),
    /// The socket failed.
    #[error("cannot receive from the client")]
    Receive(#[source] Errno),
    /// The socket failed.
    #[error("cannot send to the client")]
    Send(#[source] Errno),
    /// A reply's descriptor could not be kept until the client reads.
    #[error("cannot duplicate a descriptor for a queued reply")]
    QueueFd(#[source] std::io::Error),
    /// The socket could not be set up.
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
    /// That is right for clients that send each message with a call of its own,
    /// as QEMU does. With others, descriptors may be taken for those of a later
    /// message that came in the same call.
    pub fn read_ahead(&mut self) {
        self.least_read = BUFFER;
    }

    /// The event loop says that the client has hung up. One that is told of
    /// edges only (`EPOLLET`) has to say so, and so has to watch for `EPOLLRDHUP`:
    /// a read that brings the client's last words does not show that nothing
    /// follows, and no other edge comes.
    pub fn expect_end(&mut self) {
        self.ending = true;
    }

    /// The next message, or `None` when it has not arrived whole: wait until
    /// the socket is readable.
    ///
    /// # Errors
    ///
    /// When the client has gone or the socket fails.
    pub fn receive(&mut self) -> Result<Option<Message<'_>>, ConnectionError> {
        match self.arrived()? {
            true => Ok(Some(self.hand_out())),
            false => Ok(None),
        }
    }

    /// The header of what [`receive`](Self::receive) would return, without
    /// taking it.
    ///
    /// # Errors
    ///
    /// As [`receive`](Self::receive).
    pub fn peek(&mut self) -> Result<Option<Header>, ConnectionError> {
        match self.arrived()? {
            true => Ok(self.header()),
            false => Ok(None),
        }
    }

    /// Receives until the next message has arrived whole. Returns whether it
    /// has.
    fn arrived(&mut self) -> Result<bool, ConnectionError> {
        self.discard_consumed();
        loop {
            let have = self.filled - self.front;
            if self.to_drain > 0 && have == 0 {
                if !self.drain()? {
                    return Ok(false);
                }
                continue;
            }
            let want = match self.header() {
                Some(header) => match frame_size(&header) {
                    Some(size) if size <= have => break,
                    Some(size) => size,
                    None => {
                        // Too long: answered now, its body thrown away as it
                        // comes. What has come of it is in the input.
                        self.to_drain = header.size as usize - have;
                        break;
                    }
                },
                None => 0,
            };
            if !self.fill(want.max(self.least_read))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sends a reply, or queues it when the socket is full. Does nothing when
    /// the client wants no reply.
    ///
    /// # Errors
    ///
    /// When the client has gone, does not read, or the socket fails.
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

    /// Sends commands, or queues them behind what waits. They are encoded, one
    /// after another.
    pub(super) fn send_encoded(&mut self, commands: &[u8]) -> Result<(), ConnectionError> {
        self.outbox.send(self.socket.as_fd(), commands, None)
    }

    /// Whether replies wait for the socket to become writable. It is wise not
    /// to [`receive`](Self::receive) meanwhile: a client that pipelines more
    /// than it reads is then merely stopped.
    pub fn wants_write(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Sends what the socket takes of the replies that wait. Returns whether
    /// none is left.
    ///
    /// # Errors
    ///
    /// When the client has gone or the socket fails.
    pub fn flush(&mut self) -> Result<bool, ConnectionError> {
        self.outbox.flush(self.socket.as_fd())
    }

    /// Whether all has been handed out that there was at the last read. Another
    /// [`receive`](Self::receive) would cost a system call to say so; whatever
    /// has come since makes the socket readable.
    pub(super) fn is_emptied(&self) -> bool {
        self.emptied && !self.ending && self.front + self.consumed == self.filled
    }

    fn header(&self) -> Option<Header> {
        let input = &self.input[self.front..self.filled];
        input.first_chunk().map(Header::decode)
    }

    /// Takes the last message out of the input.
    fn discard_consumed(&mut self) {
        self.front += std::mem::take(&mut self.consumed);
        if self.front == self.filled {
            (self.front, self.filled) = (0, 0);
            // A long message comes alone: its last read stops at its end.
            if self.input.len() > BUFFER {
                self.input.truncate(BUFFER);
                self.input.shrink_to_fit();
            }
        }
    }

    /// Moves what there is to the start of the buffer.
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

    /// Hands out the message at the front, which has arrived.
    fn hand_out(&mut self) -> Message<'_> {
        let header = self
            .header()
            .expect("a message is handed out when its header is there");
        let (front, filled) = (self.front, self.filled);
        let (payload, end) = match frame_size(&header) {
            Some(size) => (front + HEADER_SIZE..front + size, front + size),
            // Too long: all of the input is the start of its body.
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

    /// Reads until there are at most `want` bytes. Returns whether any came.
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
        // With descriptors, be they refused, it may be the kernel that ended the read.
        self.emptied = from + received < want && fds.is_empty() && !refused;
        if refused || !fds.is_empty() {
            let start = self.last_message_start();
            self.attribute(start, fds, refused);
        }
        Ok(true)
    }

    /// Where the message that has the last received byte starts.
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
        let passed = match known {
            Some(at) => &mut self.fds[at],
            None => {
                self.fds.push(Passed {
                    start,
                    fds: Vec::new(),
                    refused: false,
                });
                self.fds.last_mut().expect("one was just pushed")
            }
        };
        passed.fds.extend(fds);
        passed.refused |= refused || passed.fds.len() > MAX_MSG_FDS;
        if passed.refused {
            passed.fds.clear();
        }
    }

    /// Throws away some of a refused message's body, with any descriptors.
    /// Returns whether any came.
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

/// Bytes of a message in the stream; `None` for one that is too long to be
/// kept. A size below the header's is taken for the header's: where such a
/// message ends is anybody's guess, and the connection is closed over it.
fn frame_size(header: &Header) -> Option<usize> {
    (header.size <= MAX_MESSAGE_SIZE).then_some((header.size as usize).max(HEADER_SIZE))
}

/// What one `recvmsg` brought.
struct Received {
    /// How many bytes; 0 at the end of the stream.
    bytes: usize,
    fds: Vec<OwnedFd>,
    /// Not all descriptors could be taken.
    refused: bool,
}

/// One `recvmsg`; `None` when there is nothing to receive.
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
    // Where the space does not suffice the kernel drops the rest, as it does
    // when this process is out of descriptors: either way some are missing.
    let refused = received.flags.contains(ReturnFlags::CTRUNC);
    Ok(Some(Received {
        bytes: received.bytes,
        fds,
        refused,
    }))
}
