//! A connection that carries frames, without blocking.
//!
//! Data moves between the socket and the memory of an operation by one system call, without a copy in
//! this process; with TLS it is copied once, into or out of the record. What a call cannot finish, the
//! next one continues.
#![allow(unsafe_code)]

use std::{
    collections::VecDeque,
    io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::{
    Direction, Frame, FrameError, HEADER, Memory, Secrets,
    memory::{Cursor, Vectors},
    records::{MAX_BODY, MAX_CONTENT, RECORD_HEADER, RecordError, Records, record_len},
};

/// Time without a byte of the peer after which the connection counts as cut.
const SILENCE: Duration = Duration::from_secs(10);

/// Time without a byte to the peer after which [`Frame::Alive`] is sent.
const IDLE: Duration = Duration::from_secs(3);

/// Bytes read ahead: eight frames of a page, by one system call.
const AHEAD: usize = 8 * (HEADER + 4096);

/// Longest data of frames that are read ahead whole: of longer ones only the beginning is copied.
const SHORT: usize = 16 << 10;

/// Bytes read ahead behind frames with more data than that.
const AHEAD_OF_LONG: usize = 4096;

/// Most bytes of sealed records before they are sent.
const SEALED: usize = 128 << 10;

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer has closed it, or the network has.
    #[error("the connection was closed")]
    Closed,
    /// The socket failed.
    #[error("the connection failed")]
    System(#[source] io::Error),
    /// Nothing was received for that time.
    #[error("the peer has sent nothing for {0:?}")]
    Silent(Duration),
    /// The peer violates the protocol.
    #[error("the peer has sent what it must not")]
    Frame(#[from] FrameError),
    /// The TLS session has ended.
    #[error(transparent)]
    Tls(#[from] RecordError),
    /// The memory of this frame is gone, such as of a file that has shrunk.
    #[error("the memory of {0:?} is gone")]
    Memory(Frame),
}

/// A frame that is being sent.
#[derive(Debug)]
struct Outgoing {
    frame: Frame,
    header: [u8; HEADER],
    /// Bytes of the header that are sent.
    done: usize,
    data: Cursor,
}

/// TLS in both directions.
#[derive(Debug)]
struct Tls {
    sealing: Records,
    /// Records to send, from `sent` on.
    sealed: Vec<u8>,
    sent: usize,
    opening: Records,
    /// What is received of records.
    raw: Vec<u8>,
    /// The part of `raw` that is received and not opened.
    pending: std::ops::Range<usize>,
}

/// Bytes received ahead.
#[derive(Debug)]
struct Ahead {
    buffer: Box<[u8]>,
    filled: std::ops::Range<usize>,
}

impl Ahead {
    fn new(len: usize) -> Self {
        Self {
            buffer: vec![0; len].into(),
            filled: 0..0,
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.buffer[self.filled.clone()]
    }

    /// The unfilled part, after what is filled has moved to the front.
    fn room(&mut self) -> &mut [u8] {
        self.buffer.copy_within(self.filled.clone(), 0);
        self.filled = 0..self.filled.len();
        &mut self.buffer[self.filled.end..]
    }
}

/// A connection that carries frames.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
    tls: Option<Box<Tls>>,
    ahead: Ahead,
    /// The frame whose data is being received.
    incoming: Option<(Frame, Cursor)>,
    /// Bytes of data to come that nobody waits for.
    discarding: usize,
    /// Bytes to read ahead without TLS.
    ahead_of: usize,
    /// The last system call has received all that there was.
    drained: bool,
    outgoing: VecDeque<Outgoing>,
    /// Frames that the socket has taken as a whole.
    sent: u64,
    heard: Instant,
    spoken: Instant,
}

impl Link {
    /// A link over a connected, nonblocking stream socket, with the TLS session of `secrets`.
    ///
    /// # Errors
    /// [`RecordError::Key`], for secrets of no session.
    pub fn new(socket: OwnedFd, secrets: Option<&Secrets>) -> Result<Self, LinkError> {
        let tls = secrets.map(|Secrets { sending, receiving }| {
            let records = |direction: &Direction| Records::new(direction);
            Ok::<_, RecordError>(Box::new(Tls {
                sealing: records(sending)?,
                sealed: Vec::with_capacity(SEALED + RECORD_HEADER + MAX_BODY),
                sent: 0,
                opening: records(receiving)?,
                raw: vec![0; SEALED],
                pending: 0..0,
            }))
        });
        let tls = tls.transpose()?;
        let now = Instant::now();
        Ok(Self {
            socket,
            // A record is opened when less than a header is left.
            ahead: Ahead::new(match tls.is_some() {
                true => HEADER + MAX_CONTENT,
                false => AHEAD,
            }),
            tls,
            incoming: None,
            discarding: 0,
            ahead_of: AHEAD,
            drained: false,
            outgoing: VecDeque::new(),
            sent: 0,
            heard: now,
            spoken: now,
        })
    }

    /// Queues a frame with the data in `memory`. [`Link::flush`] sends it.
    pub fn post(&mut self, frame: Frame, memory: Memory) {
        self.outgoing.push_back(Outgoing {
            frame,
            header: frame.encode(),
            done: 0,
            data: Cursor::new(memory, frame.data_len()),
        });
    }

    /// The number of frames that were posted: that of the next one.
    pub fn posted(&self) -> u64 {
        self.sent + self.outgoing.len() as u64
    }

    /// The number of frames that were sent, in the order of [`Link::post`].
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Whether frames wait for room in the socket.
    pub fn wants_write(&self) -> bool {
        !self.outgoing.is_empty()
            || self
                .tls
                .as_ref()
                .is_some_and(|tls| tls.sent < tls.sealed.len())
    }

    /// Sends until the socket is full or everything is sent.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn flush(&mut self) -> Result<(), LinkError> {
        while self.wants_write() {
            let sent = match self.tls.is_some() {
                true => self.flush_records()?,
                false => self.flush_plain()?,
            };
            if !sent {
                break;
            }
            self.spoken = Instant::now();
        }
        Ok(())
    }

    /// One system call. Returns false if the socket is full.
    fn flush_plain(&mut self) -> Result<bool, LinkError> {
        let mut vectors = Vectors::new();
        for out in &self.outgoing {
            let rest = &out.header[out.done..];
            let header = libc::iovec {
                iov_base: rest.as_ptr().cast_mut().cast(),
                iov_len: rest.len(),
            };
            let is_whole = rest.is_empty() || vectors.push(header);
            if !(is_whole && out.data.append(&mut vectors)) {
                break;
            }
        }
        let Some(mut bytes) = self.send(&vectors)? else {
            return Ok(false);
        };
        while let Some(out) = self.outgoing.front_mut() {
            let header = bytes.min(HEADER - out.done);
            out.done += header;
            let data = (bytes - header).min(out.data.left);
            out.data.advance(data);
            bytes -= header + data;
            if out.done < HEADER || out.data.left > 0 {
                break;
            }
            self.outgoing.pop_front();
            self.sent += 1;
        }
        Ok(true)
    }

    /// sendmsg(2); `None` if the socket is full.
    fn send(&self, vectors: &Vectors) -> Result<Option<usize>, LinkError> {
        // SAFETY: all zeros are a valid `msghdr`, which is plain numbers and pointers.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = vectors.vectors.as_ptr().cast_mut();
        message.msg_iovlen = vectors.count as _;
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        loop {
            // SAFETY: the vectors name headers of `self.outgoing` and memory that is valid by the
            // contract of `Memory::new`; sendmsg(2) only reads it, with EFAULT where it is unmapped.
            let sent = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &message, flags) };
            if sent >= 0 {
                return Ok(Some(sent as usize));
            }
            match last_errno() {
                Errno::INTR => {}
                Errno::AGAIN => return Ok(None),
                Errno::FAULT => {
                    let frame = self.outgoing.front().map_or(Frame::Alive, |out| out.frame);
                    return Err(LinkError::Memory(frame));
                }
                errno => return Err(ended(errno)),
            }
        }
    }

    /// Seals as many frames as fit, and sends records. Returns false if the socket is full.
    fn flush_records(&mut self) -> Result<bool, LinkError> {
        let Some(tls) = &mut self.tls else {
            return Ok(false);
        };
        if tls.sent == tls.sealed.len() {
            tls.sealed.clear();
            tls.sent = 0;
            while tls.sealed.len() + RECORD_HEADER + MAX_BODY <= SEALED && !self.outgoing.is_empty()
            {
                let start = tls.sealed.len();
                tls.sealed.extend_from_slice(&[0; RECORD_HEADER]);
                let end = start + RECORD_HEADER + MAX_CONTENT;
                while let Some(out) = self.outgoing.front_mut() {
                    let room = end - tls.sealed.len();
                    let header = room.min(HEADER - out.done);
                    let bytes = &out.header[out.done..out.done + header];
                    tls.sealed.extend_from_slice(bytes);
                    out.done += header;
                    out.data.copy_out(&mut tls.sealed, room - header);
                    if out.done < HEADER || out.data.left > 0 {
                        break;
                    }
                    self.outgoing.pop_front();
                    self.sent += 1;
                }
                tls.sealing.seal(&mut tls.sealed, start)?;
            }
        }
        let rest = &tls.sealed[tls.sent..];
        match rustix::net::send(
            &self.socket,
            rest,
            rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT,
        ) {
            Ok(sent) => tls.sent += sent,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(false),
            Err(errno) => return Err(ended(errno)),
        }
        Ok(true)
    }

    /// The next frame, once it has arrived with its data. The data of a frame goes to the memory that
    /// `place` names, which refuses frames that the peer must not send, or too much data by less memory.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn receive(
        &mut self,
        place: impl FnMut(&Frame) -> Result<Memory, FrameError>,
    ) -> Result<Option<Frame>, LinkError> {
        self.drained = false;
        self.receive_some(place)
    }

    /// As [`Link::receive`], for those who call again or wait for input, level-triggered, after `None`: when
    /// the last system call has received less than it could, it is not followed by one that would fail
    /// with EAGAIN. So `None` does not say that the connection has not ended meanwhile.
    ///
    /// # Errors
    /// As [`Link::receive`].
    pub fn receive_some(
        &mut self,
        mut place: impl FnMut(&Frame) -> Result<Memory, FrameError>,
    ) -> Result<Option<Frame>, LinkError> {
        loop {
            let discarded = self.discarding.min(self.ahead.filled.len());
            self.ahead.filled.start += discarded;
            self.discarding -= discarded;
            if self.discarding > 0 {
                // More has to come.
            } else if let Some((frame, data)) = &mut self.incoming {
                let copied = data.copy_in(&self.ahead.buffer[self.ahead.filled.clone()]);
                self.ahead.filled.start += copied;
                if data.left == 0 {
                    let frame = *frame;
                    self.incoming = None;
                    return Ok(Some(frame));
                }
            } else if let Some((header, _)) = self.ahead.bytes().split_first_chunk::<HEADER>() {
                let frame = Frame::decode(header)?;
                let memory = place(&frame)?;
                if memory.is_discard() {
                    self.ahead.filled.start += HEADER;
                    self.discarding = frame.data_len();
                    return Ok(Some(frame));
                }
                let data = Cursor::new(memory, frame.data_len());
                if !data.is_covered() {
                    return Err(FrameError::Unexpected(frame).into());
                }
                self.ahead.filled.start += HEADER;
                if frame.data_len() > 0 {
                    self.ahead_of = match frame.data_len() > SHORT {
                        true => AHEAD_OF_LONG,
                        false => AHEAD,
                    };
                }
                self.incoming = Some((frame, data));
                continue;
            }
            if mem::take(&mut self.drained) || !self.fill()? {
                return Ok(None);
            }
            self.heard = Instant::now();
        }
    }

    /// Receives bytes. Returns false if there are none.
    fn fill(&mut self) -> Result<bool, LinkError> {
        if self.tls.is_some() {
            return self.fill_from_record();
        }
        let mut vectors = Vectors::new();
        if let Some((_, data)) = &self.incoming {
            // One vector is left for what follows.
            vectors.count = 1;
            data.append(&mut vectors);
            vectors.vectors[..vectors.count].rotate_left(1);
            vectors.count -= 1;
        }
        let direct: usize = vectors.vectors[..vectors.count]
            .iter()
            .map(|vector| vector.iov_len)
            .sum();
        let most = self.ahead_of;
        let room = self.ahead.room();
        let ahead = room.len().min(most);
        vectors.push(libc::iovec {
            iov_base: room.as_mut_ptr().cast(),
            iov_len: ahead,
        });
        let read = loop {
            // SAFETY: the vectors name memory that is valid and writable by the contract of
            // `Memory::new`, and the unfilled part of `ahead`. The kernel writes no more than they
            // have, with EFAULT where memory is unmapped.
            let read = unsafe {
                libc::readv(
                    self.socket.as_raw_fd(),
                    vectors.vectors.as_ptr(),
                    vectors.count as i32,
                )
            };
            match read {
                0 => return Err(LinkError::Closed),
                1.. => break read as usize,
                _ => {}
            }
            match (last_errno(), &self.incoming) {
                (Errno::INTR, _) => {}
                (Errno::AGAIN, _) => return Ok(false),
                (Errno::FAULT, Some((frame, _))) => return Err(LinkError::Memory(*frame)),
                (errno, _) => return Err(ended(errno)),
            }
        };
        self.drained = read < direct + ahead;
        if let Some((_, data)) = &mut self.incoming {
            data.advance(read.min(direct));
        }
        self.ahead.filled.end += read.saturating_sub(direct);
        Ok(true)
    }

    /// Opens the next record, when `ahead` is used up but for a part of a header.
    fn fill_from_record(&mut self) -> Result<bool, LinkError> {
        let Some(tls) = &mut self.tls else {
            return Ok(false);
        };
        loop {
            let pending = &tls.raw[tls.pending.clone()];
            if let Some(len) = record_len(pending)?.filter(|len| *len <= pending.len()) {
                let start = tls.pending.start;
                let record = &mut tls.raw[start..start + len];
                let content = tls.opening.open(record)?;
                let room = &mut self.ahead.room()[..content];
                room.copy_from_slice(&record[RECORD_HEADER..][..content]);
                self.ahead.filled.end += content;
                tls.pending.start += len;
                return Ok(true);
            }
            tls.raw.copy_within(tls.pending.clone(), 0);
            tls.pending = 0..tls.pending.len();
            let room = &mut tls.raw[tls.pending.end..];
            match rustix::net::recv(&self.socket, room, rustix::net::RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(LinkError::Closed),
                Ok((_, read)) => tls.pending.end += read,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(ended(errno)),
            }
        }
    }

    /// Discards the rest of a frame that has come in part, whose memory is then no longer used.
    pub fn discard_incoming(&mut self) {
        if let Some((_, data)) = self.incoming.take() {
            self.discarding += data.left;
        }
    }

    /// Keeps the connection alive, and finds out that it is not, if the caller `reads`. To be called every
    /// [`Link::TICK`].
    ///
    /// # Errors
    /// [`LinkError::Silent`].
    pub fn tick(&mut self, reads: bool) -> Result<(), LinkError> {
        if !reads {
            self.heard = Instant::now();
        }
        if self.heard.elapsed() >= SILENCE {
            return Err(LinkError::Silent(SILENCE));
        }
        if self.spoken.elapsed() >= IDLE && !self.wants_write() {
            self.post(Frame::Alive, Memory::NONE);
            return self.flush();
        }
        Ok(())
    }

    /// The interval of [`Link::tick`].
    pub const TICK: Duration = Duration::from_secs(1);

    /// Ends sending: the peer sees the end of the connection after the last frame.
    pub fn shut_down(&self) {
        // Fails if the connection has ended.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
    }

    /// Waits for the peer to close the connection, for up to `timeout`.
    pub fn wait_closed(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        loop {
            // The last frames of the peer, which nobody waits for.
            match self.receive(|_| Ok(Memory::DISCARD)) {
                Ok(Some(_)) if Instant::now() < deadline => continue,
                Ok(_) => {}
                Err(_) => return,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let left = Timespec::try_from(left).unwrap_or_default();
            // An interrupted wait is only shorter.
            let _ = poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left));
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn ended(errno: Errno) -> LinkError {
    match errno {
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => LinkError::Closed,
        other => LinkError::System(other.into()),
    }
}

#[cfg(test)]
mod tests;
