//! Framing on a nonblocking UNIX stream socket, with descriptor passing. The stream is in a
//! [`Journal`], so that another process can go on with it.
//!
//! # Matching descriptors to messages
//!
//! Descriptors travel with the first byte of the `sendmsg` that carried them,
//! and Linux ends a `recvmmsg` behind the segment that had descriptors. So the
//! descriptors of one `recvmmsg` came with the *last* segment in it, and belong
//! to the last message that begins in the received bytes. To keep that exact,
//! one read never goes past the end of a message that may carry descriptors:
//! it requests the rest of a message whose size is known, or
//! [`FIRST_READ`] bytes, the size of the shortest message that may carry any.
//! Region reads and region writes of up to four bytes, nearly all of the traffic,
//! arrive whole in that first read: one system call each. A server may trade the
//! exactness for fewer system calls: [`Connection::read_ahead`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use farside_keeper::{DeviceFile, Journal, JournalError, Kept, Received};
use rustix::io::Errno;

use super::reply::{self, Reply};
use super::stream::Stream;
use super::{MAX_MESSAGE_SIZE, MAX_MSG_FDS, MAX_QUEUED_BYTES};
use farside_vfio_user_wire::{HEADER_SIZE, Header, ReplyTo};

/// Bytes of a `DEVICE_SET_IRQS` without data: the shortest message that may
/// carry descriptors.
const FIRST_READ: usize = HEADER_SIZE + 20;

/// Bytes of a read ahead, and of the buffer for replies: enough for everything but bulk region accesses.
const BUFFER: usize = 8 << 10;

/// A client's connection. Never blocks.
///
/// Drop the connection after an error.
#[derive(Debug)]
pub struct Connection {
    socket: Stream,
    /// The stream, from the start of a message.
    journal: Journal,
    /// Bytes at the front that the last returned message occupies.
    consumed: usize,
    /// Bytes of its body that are still to be discarded.
    to_drain: u32,
    /// Least size of a read while the message at the front is incomplete.
    least_read: usize,
    /// The last read emptied the socket's receive queue.
    emptied: bool,
    /// The client has shut down: read on until EOF.
    ending: bool,
    /// Descriptors of messages in the input, by the message's start.
    fds: Vec<Passed>,
    /// Those of the last returned message, which has duplicates: a process that is killed before it is done with the
    /// message leaves them.
    in_hand: Vec<OwnedFd>,
    output: Vec<u8>,
    /// The descriptor of a reply that is queued.
    queued_fd: Option<OwnedFd>,
}

/// Descriptors of the message that starts at this byte of the input.
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
    /// recvmmsg(2) failed.
    #[error("cannot receive from the client")]
    Receive(#[source] Errno),
    /// sendmmsg(2) failed.
    #[error("cannot send to the client")]
    Send(#[source] Errno),
    /// A queued reply's descriptor could not be duplicated.
    #[error("cannot duplicate a descriptor for a queued reply")]
    QueueFd(#[source] std::io::Error),
    /// The memory for its messages cannot be made.
    #[error("cannot make the journal of the client's messages")]
    Journal(#[source] std::io::Error),
    /// fcntl(2) failed.
    #[error("cannot make the client's socket nonblocking")]
    Nonblocking(#[source] std::io::Error),
}

impl Connection {
    /// Takes over a connected stream and makes it nonblocking. Nothing of it outlives this process.
    ///
    /// # Errors
    ///
    /// [`ConnectionError::Nonblocking`], [`ConnectionError::Journal`].
    pub fn new(stream: UnixStream) -> Result<Self, ConnectionError> {
        let file = DeviceFile::new().and_then(|file| file.journal());
        Self::with(stream, file.map_err(ConnectionError::Journal)?)
    }

    /// As [`new`](Self::new), of a client whose messages are in `journal`.
    ///
    /// # Errors
    ///
    /// [`ConnectionError::Nonblocking`].
    pub fn with(stream: UnixStream, mut journal: Journal) -> Result<Self, ConnectionError> {
        stream
            .set_nonblocking(true)
            .map_err(ConnectionError::Nonblocking)?;
        journal.begin(stream.as_raw_fd());
        Ok(Self::of(stream.into(), journal))
    }

    /// Takes the client over that the process before had, if it had one, with its messages and their descriptors. Claims
    /// what is left of those: the device's are to be claimed before.
    pub fn take_over(journal: Journal, kept: &Kept) -> Option<Self> {
        let socket = kept.claim(journal.client()?)?;
        let mut connection = Self::of(socket, journal);
        let [front, last] = connection.journal.inherited();
        let claimed = |fds: Vec<_>| fds.into_iter().filter_map(|fd| kept.claim(fd)).collect();
        let (fds, refused) = front;
        if refused || !fds.is_empty() {
            connection.attribute(0, claimed(fds), refused);
        }
        let (fds, refused) = last;
        if refused || !fds.is_empty() {
            let start = connection.last_message_start();
            connection.attribute(start, claimed(fds), refused);
        }
        if connection.journal.to_drain() > 0 {
            // Of a body that is discarded.
            connection.fds.clear();
        }
        if let Some(fd) = connection.journal.waiting() {
            // Unclaimed, the number would be of a descriptor of this process.
            connection.queued_fd = Some(kept.claim(fd)?);
        }
        Some(connection)
    }

    fn of(socket: OwnedFd, journal: Journal) -> Self {
        Self {
            socket: Stream::new(socket),
            journal,
            consumed: 0,
            to_drain: 0,
            least_read: FIRST_READ,
            emptied: false,
            ending: false,
            fds: Vec::new(),
            in_hand: Vec::new(),
            output: Vec::with_capacity(BUFFER),
            queued_fd: None,
        }
    }

    /// The client has gone: its journal can have another one.
    pub fn end(&mut self) {
        self.journal.end();
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

    /// As [`receive`](Self::receive), with how often processes have begun with this message, this time included.
    pub(super) fn receive_to_process(
        &mut self,
    ) -> Result<Option<(Message<'_>, usize)>, ConnectionError> {
        let Some(header) = self.arrived()? else {
            return Ok(None);
        };
        let tries = self.journal.begin_try();
        Ok(Some((self.hand_out(header), tries)))
    }

    /// This process has got through the message.
    pub(super) fn end_try(&mut self) {
        self.journal.end_try();
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
            let have = self.journal.input().len();
            if self.journal.to_drain() > 0 {
                if !self.drain()? {
                    return Ok(None);
                }
                continue;
            }
            let want = match self.header() {
                Some(header) => match frame_size(&header) {
                    Some(size) if size <= have => return Ok(Some(header)),
                    Some(size) => size,
                    // Too long: refused now, its body discarded as it arrives.
                    None => return Ok(Some(header)),
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
            self.discard_consumed();
            return Ok(());
        }
        self.output.clear();
        let fd = reply::encode(to, reply, &mut self.output);
        self.queue(fd.map(|fd| fd.as_raw_fd()))?;
        self.output.shrink_to(BUFFER);
        self.flush()?;
        if let (Some(_), Some(fd)) = (self.journal.waiting(), fd) {
            let fd = fd.try_clone_to_owned().map_err(ConnectionError::QueueFd)?;
            self.journal.replace_waiting(fd.as_raw_fd());
            self.queued_fd = Some(fd);
        }
        Ok(())
    }

    /// Sends concatenated encoded commands, or queues them behind earlier messages.
    pub(super) fn send_encoded(&mut self, commands: &[u8]) -> Result<(), ConnectionError> {
        self.output.clear();
        self.output.extend_from_slice(commands);
        let (consumed, to_drain) = (self.consumed, self.to_drain);
        // The last message is not answered by these.
        self.consumed = 0;
        self.to_drain = self.journal.to_drain();
        let queued = self.queue(None);
        (self.consumed, self.to_drain) = (consumed, to_drain);
        queued?;
        self.flush().map(drop)
    }

    /// Queues the output, and is done with the last returned message.
    fn queue(&mut self, fd: Option<i32>) -> Result<(), ConnectionError> {
        let waiting = self.journal.queued() + self.output.len();
        if self.journal.queued() > 0 && waiting > MAX_QUEUED_BYTES {
            return Err(ConnectionError::ClientDoesNotRead { waiting });
        }
        let consumed = std::mem::take(&mut self.consumed);
        let committed = self
            .journal
            .commit(consumed, self.to_drain, &self.output, fd);
        committed
            .map_err(|JournalError(waiting)| ConnectionError::ClientDoesNotRead { waiting })?;
        self.moved(consumed);
        Ok(())
    }

    /// Whether replies wait for the socket to become writable. Not calling
    /// [`receive`](Self::receive) meanwhile throttles a client that pipelines more
    /// than it reads.
    pub fn wants_write(&self) -> bool {
        self.journal.queued() > 0
    }

    /// Sends as many of the queued replies as the socket takes. Returns whether the
    /// queue is empty.
    ///
    /// # Errors
    ///
    /// Fails if the client has closed the connection or the socket fails.
    pub fn flush(&mut self) -> Result<bool, ConnectionError> {
        let flushed = self.journal.flush(self.socket.as_fd());
        flushed.map_err(|error| match errno(&error) {
            Errno::PIPE | Errno::CONNRESET => ConnectionError::Closed,
            errno => ConnectionError::Send(errno),
        })
    }

    /// Data may have arrived since the last read, and the socket have been reported readable for it.
    pub(super) fn may_have_more(&mut self) {
        self.emptied = false;
    }

    /// Whether the last read, since [`may_have_more`](Self::may_have_more), emptied the socket and all
    /// its messages have been returned. Another [`receive`](Self::receive) would only get EAGAIN; data
    /// that arrived since makes the socket readable.
    pub(super) fn is_emptied(&self) -> bool {
        self.emptied && !self.ending && self.consumed == self.journal.input().len()
    }

    fn header(&self) -> Option<Header> {
        self.journal.input().first_chunk().map(Header::decode)
    }

    /// Is done with the last returned message, without an answer.
    fn discard_consumed(&mut self) {
        let consumed = std::mem::take(&mut self.consumed);
        if consumed > 0 {
            let committed = self.journal.commit(consumed, self.to_drain, &[], None);
            debug_assert!(committed.is_ok(), "there is nothing to queue");
            self.moved(consumed);
        }
    }

    /// The input begins `bytes` later.
    fn moved(&mut self, bytes: usize) {
        self.to_drain = self.journal.to_drain();
        if bytes > 0 {
            self.in_hand.clear();
        }
        for passed in &mut self.fds {
            passed.start -= bytes;
        }
    }

    /// Returns the message at the front, of this header, which is complete or too long.
    fn hand_out(&mut self, header: Header) -> Message<'_> {
        let have = self.journal.input().len();
        let (payload, end) = match frame_size(&header) {
            Some(size) => (HEADER_SIZE..size, size),
            // Too long: the rest of the input is the start of its body.
            None => {
                self.to_drain = header.size - have as u32;
                (have..have, have)
            }
        };
        self.consumed = end;
        let (fds, fds_refused): (Vec<_>, _) = match self.fds.first() {
            Some(passed) if passed.start < end => {
                let Passed { fds, refused, .. } = self.fds.remove(0);
                let duplicates: Result<_, _> = fds.iter().map(OwnedFd::try_clone).collect();
                self.in_hand = fds;
                // This process has too many open.
                duplicates.map_or((Vec::new(), true), |fds| (fds, refused))
            }
            _ => (Vec::new(), false),
        };
        Message {
            header,
            payload: &self.journal.input()[payload],
            fds,
            fds_refused,
        }
    }

    /// Reads once, to at most `want` bytes of input. Returns whether any arrived.
    fn fill(&mut self, want: usize) -> Result<bool, ConnectionError> {
        let from = self.journal.input().len();
        let carried = self.fds.first().map(|it| (it.fds.as_slice(), it.refused));
        let read = self
            .journal
            .receive(self.socket.as_fd(), want, carried.unwrap_or_default());
        let Some(Received {
            bytes: received,
            fds,
            refused,
        }) = read.map_err(receive_error)?
        else {
            return Ok(false);
        };
        if received == 0 {
            return Err(match from {
                0 => ConnectionError::Closed,
                received => ConnectionError::ClosedInMessage { received },
            });
        }
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
        let input = self.journal.input();
        let mut start = 0;
        while let Some(header) = input[start..].first_chunk().map(Header::decode) {
            match frame_size(&header) {
                Some(size) if start + size < input.len() => start += size,
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
        let left = self.journal.to_drain();
        // A process before may have received a part, and not been done with it.
        if self.journal.input().is_empty() {
            let most = BUFFER.min(left as usize);
            let read = self
                .journal
                .receive(self.socket.as_fd(), most, Default::default());
            let Some(Received { bytes, .. }) = read.map_err(receive_error)? else {
                return Ok(false);
            };
            if bytes == 0 {
                return Err(ConnectionError::ClosedInMessage { received: 0 });
            }
        }
        let bytes = self.journal.input().len().min(left as usize);
        let committed = self.journal.commit(bytes, left - bytes as u32, &[], None);
        debug_assert!(committed.is_ok(), "there is nothing to queue");
        self.to_drain = self.journal.to_drain();
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

fn receive_error(error: io::Error) -> ConnectionError {
    match errno(&error) {
        // The client closed with replies unread.
        Errno::CONNRESET => ConnectionError::Closed,
        errno => ConnectionError::Receive(errno),
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
