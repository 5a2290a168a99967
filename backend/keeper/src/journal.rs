//! A client's stream, received and answered so that a process that is killed at any instruction loses and repeats
//! nothing of it.
//!
//! # How
//!
//! Bytes are received into, and sent from, buffers in the file; the kernel stores there how many it took, before the
//! system call returns. There are two buffers, with their arguments, for either direction: what is current is not
//! changed. One word, the *state*, says which are current, and how many received bytes are done. So each of these is
//! one store:
//!
//! - another read: what is left of the input is in the other buffer, behind which the call receives;
//! - a [commit](Journal::commit): the message is done, its answer is in the other output buffer, and the snapshot that
//!   was [staged](crate::Snapshots::stage) is current.

use std::{
    fmt, io,
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::system::{Area, SLOT, own};

/// Most descriptors of one message.
pub const MAX_FDS: usize = 16;

/// Bytes of an input buffer: more than the longest message.
pub(crate) const INPUT: usize = (1 << 20) + (64 << 10);

/// Bytes of an output buffer: more than may be queued.
pub(crate) const OUTPUT: usize = (4 << 20) + (64 << 10);

const WORDS: usize = 4096;
const SLOTS: usize = 4096;

// An offset in it has 21 bits of the state.
const _: () = assert!(INPUT < 1 << 21);

pub(crate) const BYTES: usize = WORDS + SLOTS + 2 * INPUT + 2 * OUTPUT;

/// Words.
const STATE: usize = 0;
/// The client's socket and 1, or 0.
const SOCKET: usize = 8;

/// How often the message at the front was begun, and not ended.
const TRIES: usize = 16;

/// Words of input buffer `half`: where the call's bytes begin, then what [`Carried`] has.
const fn input_word(half: usize, word: usize) -> usize {
    512 + half * 512 + word * 8
}

/// Words of output buffer `half`: bytes, descriptor and 1, where the descriptor goes.
const fn output_word(half: usize, word: usize) -> usize {
    2048 + half * 512 + word * 8
}

const fn input_slot(half: usize) -> usize {
    WORDS + half * SLOT
}

const fn output_slot(half: usize) -> usize {
    WORDS + (2 + half) * SLOT
}

const fn input_bytes(half: usize, bytes: &Range<usize>) -> Range<usize> {
    let start = WORDS + SLOTS + half * INPUT;
    start + bytes.start..start + bytes.end
}

const fn output_bytes(half: usize, bytes: &Range<usize>) -> Range<usize> {
    let start = WORDS + SLOTS + 2 * INPUT + half * OUTPUT;
    start + bytes.start..start + bytes.end
}

/// The word that says what is current.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct State {
    /// Bytes of the input that are done.
    front: usize,
    input: usize,
    output: usize,
    snapshot: Option<usize>,
    /// Counts the messages that are done, modulo 128.
    turn: u8,
    /// Bytes of a refused message that are to come, and are discarded.
    to_drain: u32,
}

impl State {
    fn word(self) -> u64 {
        let snapshot = self.snapshot.map_or(0, |half| half + 1);
        self.front as u64
            | (self.input as u64) << 21
            | (self.output as u64) << 22
            | (snapshot as u64) << 23
            | u64::from(self.turn & 127) << 25
            | u64::from(self.to_drain) << 32
    }

    fn of(word: u64) -> Self {
        let bits = |shift: u32, mask: u64| (word >> shift & mask) as usize;
        Self {
            front: bits(0, 0x1f_ffff),
            input: bits(21, 1),
            output: bits(22, 1),
            snapshot: bits(23, 3).checked_sub(1).map(|half| half & 1),
            turn: bits(25, 127) as u8,
            to_drain: (word >> 32) as u32,
        }
    }
}

/// What a read has brought.
#[derive(Debug)]
pub struct Received {
    /// How many bytes; 0 at the end of the stream.
    pub bytes: usize,
    /// Descriptors, which came with the last message that begins in these bytes.
    pub fds: Vec<OwnedFd>,
    /// The kernel has dropped some: there were too many, or this process has too many open.
    pub refused: bool,
}

/// Why an answer is not taken.
#[derive(Debug, thiserror::Error)]
#[error("{0} bytes to queue")]
pub struct JournalError(
    /// Bytes.
    pub usize,
);

/// See the module.
pub struct Journal {
    area: Area,
    /// A copy of the word in the file.
    state: State,
    /// The end of the input.
    filled: usize,
    /// Bytes of the output, of which some are sent.
    queued: Range<usize>,
    staged: Arc<AtomicUsize>,
    turn: Arc<AtomicUsize>,
}

impl Journal {
    pub(crate) fn new(area: Area, staged: Arc<AtomicUsize>, turn: Arc<AtomicUsize>) -> Self {
        let mut state = State::of(area.word(STATE).load(Ordering::Acquire));
        state.front = state.front.min(INPUT);
        let mut journal = Self {
            area,
            state,
            filled: 0,
            queued: 0..0,
            staged,
            turn,
        };
        journal.turn.store(state.turn.into(), Ordering::Relaxed);
        let received = journal.area.done(input_slot(state.input)).bytes;
        let base = journal.load(input_word(state.input, 0));
        journal.filled = base.saturating_add(received).min(INPUT).max(state.front);
        let len = journal.load(output_word(state.output, 0)).min(OUTPUT);
        let sent = journal.area.done(output_slot(state.output)).bytes;
        journal.queued = sent.min(len)..len;
        journal
    }

    /// The client that the process before had, if any: its socket.
    pub fn client(&self) -> Option<RawFd> {
        let socket = self.load(SOCKET).checked_sub(1)?;
        RawFd::try_from(socket).ok()
    }

    /// Which snapshot is current.
    pub(crate) fn snapshot(&self) -> Option<usize> {
        self.state.snapshot.filter(|_| self.client().is_some())
    }

    /// Numbers of the descriptors that came with the message at the front of the [input](Self::input), and with the last
    /// one that begins in it, and whether some were refused: for the process that takes it over. The first are of a
    /// message that is incomplete.
    pub fn inherited(&self) -> [(Vec<RawFd>, bool); 2] {
        if self.input().is_empty() {
            return Default::default();
        }
        let half = self.state.input;
        let word = |word| self.load(input_word(half, word));
        let received = self.area.done(input_slot(half));
        let last = (received.fds, received.truncated);
        if self.state.front > 0 {
            // The message that they were carried for is done.
            return [Default::default(), last];
        }
        let carried = (0..word(2).min(MAX_FDS)).map(|n| word(3 + n) as RawFd);
        [(carried.collect(), word(1) != 0), last]
    }

    /// A new client has this socket. What was staged is current.
    pub fn begin(&mut self, socket: RawFd) {
        let staged = self.staged.load(Ordering::Acquire);
        self.end();
        self.enter(State {
            snapshot: staged.checked_sub(1),
            ..State::default()
        });
        self.store(SOCKET, socket as usize + 1);
    }

    /// The client has gone.
    pub fn end(&mut self) {
        self.store(SOCKET, 0);
        self.store(TRIES, 0);
        self.staged.store(0, Ordering::Release);
        for half in 0..2 {
            self.area.clear_slot(input_slot(half));
            self.area.clear_slot(output_slot(half));
            self.store(input_word(half, 0), 0);
            self.store(input_word(half, 2), 0);
            self.store(output_word(half, 0), 0);
        }
        self.enter(State::default());
        (self.filled, self.queued) = (0, 0..0);
    }

    /// The message at the front is about to be processed. Returns how often it was, this time included: more than once if
    /// processes have ended in the middle of it.
    pub fn begin_try(&mut self) -> usize {
        let tries = self.load(TRIES).saturating_add(1);
        self.store(TRIES, tries);
        tries
    }

    /// This process has got through it.
    pub fn end_try(&mut self) {
        self.store(TRIES, 0);
    }

    /// What was received and is not done.
    pub fn input(&self) -> &[u8] {
        let bytes = self.state.front..self.filled;
        self.area.bytes(input_bytes(self.state.input, &bytes))
    }

    /// Bytes of a refused message that are to come.
    pub fn to_drain(&self) -> u32 {
        self.state.to_drain
    }

    /// Receives once, until the input has at most `want` bytes. `None` if nothing has arrived. `carried` are the
    /// descriptors of the message at the front, if it is incomplete, and whether some were refused.
    ///
    /// # Errors
    ///
    /// Those of recvmmsg(2).
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        want: usize,
        carried: (&[OwnedFd], bool),
    ) -> io::Result<Option<Received>> {
        let (old, left) = (self.state.input, self.state.front..self.filled);
        let (new, base) = (old ^ 1, left.len());
        let to = base..want.clamp(base, INPUT);
        if base > 0 {
            let to = input_bytes(new, &(0..base)).start;
            self.area.copy(input_bytes(old, &left), to);
        }
        self.store(input_word(new, 0), base);
        self.store(input_word(new, 1), carried.1.into());
        let fds = carried.0.iter().take(MAX_FDS);
        self.store(input_word(new, 2), fds.len());
        for (n, fd) in fds.enumerate() {
            self.store(input_word(new, 3 + n), fd.as_raw_fd() as usize);
        }
        self.area.clear_slot(input_slot(new));
        self.enter(State {
            front: 0,
            input: new,
            ..self.state
        });
        self.filled = base;
        let result = retry_receive(|| {
            let to = input_bytes(new, &to);
            self.area.receive(input_slot(new), socket, to)
        });
        match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            result => result?,
        }
        let done = self.area.done(input_slot(new));
        self.filled += done.bytes;
        Ok(Some(Received {
            bytes: done.bytes,
            fds: done.fds.into_iter().map(own).collect(),
            refused: done.truncated,
        }))
    }

    /// The first `done` bytes of the input are done, `to_drain` more of it are to be discarded, and `answer` is to be
    /// sent, with `fd`. What was staged is current.
    ///
    /// # Errors
    ///
    /// If too much is queued; then nothing is changed.
    pub fn commit(
        &mut self,
        done: usize,
        to_drain: u32,
        answer: &[u8],
        fd: Option<RawFd>,
    ) -> Result<(), JournalError> {
        let mut next = State {
            front: (self.state.front + done).min(self.filled),
            turn: self.state.turn.wrapping_add((done > 0).into()) & 127,
            to_drain,
            ..self.state
        };
        let staged = self.staged.load(Ordering::Acquire);
        if let Some(half) = staged.checked_sub(1) {
            next.snapshot = Some(half);
        }
        if !answer.is_empty() {
            let queued = self.queue(answer, fd)?;
            next.output ^= 1;
            self.queued = queued;
        }
        self.enter(next);
        if staged != 0 {
            self.staged.store(0, Ordering::Release);
        }
        Ok(())
    }

    /// Writes what is not sent, and `answer` behind it, to the other output buffer.
    fn queue(&mut self, answer: &[u8], fd: Option<RawFd>) -> Result<Range<usize>, JournalError> {
        let (old, left) = (self.state.output, self.queued.clone());
        let (new, before) = (old ^ 1, left.len());
        let len = before + answer.len();
        let mut passed = fd.map(|fd| (fd, before));
        if before > 0 {
            if let Some((waiting, at)) = self.waiting_fd() {
                // One request is answered at a time, so there is one.
                if passed.is_some() {
                    return Err(JournalError(len));
                }
                passed = Some((waiting, at - left.start));
            }
            if len > OUTPUT {
                return Err(JournalError(len));
            }
            let to = output_bytes(new, &(0..before)).start;
            self.area.copy(output_bytes(old, &left), to);
        } else if len > OUTPUT {
            return Err(JournalError(len));
        }
        self.area
            .bytes_mut(output_bytes(new, &(before..len)))
            .copy_from_slice(answer);
        self.store(output_word(new, 0), len);
        self.store(
            output_word(new, 1),
            passed.map_or(0, |(fd, _)| fd as usize + 1),
        );
        self.store(output_word(new, 2), passed.map_or(0, |(_, at)| at));
        self.area.clear_slot(output_slot(new));
        Ok(0..len)
    }

    /// The descriptor that waits to be sent.
    pub fn waiting(&self) -> Option<RawFd> {
        self.waiting_fd().map(|(fd, _)| fd)
    }

    /// Has `fd`, a duplicate of what [waits](Self::waiting), be sent in its place.
    pub fn replace_waiting(&mut self, fd: RawFd) {
        self.store(output_word(self.state.output, 1), fd as usize + 1);
    }

    /// The descriptor that is to be sent, and with which byte of the output.
    fn waiting_fd(&self) -> Option<(RawFd, usize)> {
        let half = self.state.output;
        let fd = RawFd::try_from(self.load(output_word(half, 1)).checked_sub(1)?).ok()?;
        let at = self.load(output_word(half, 2));
        self.queued.contains(&at).then_some((fd, at))
    }

    /// Bytes that are to be sent.
    pub fn queued(&self) -> usize {
        self.queued.len()
    }

    /// Those bytes.
    #[cfg(test)]
    pub(crate) fn queued_bytes(&self) -> &[u8] {
        self.area
            .bytes(output_bytes(self.state.output, &self.queued))
    }

    /// Sends what the socket takes. Returns whether all is sent.
    ///
    /// # Errors
    ///
    /// Those of sendmmsg(2).
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        while !self.queued.is_empty() {
            if self.queued.start > 0 {
                // The rest, with a call of its own.
                let queued = self.queue(&[], None).map_err(io::Error::other)?;
                self.queued = queued;
                let output = self.state.output ^ 1;
                self.enter(State {
                    output,
                    ..self.state
                });
            }
            let half = self.state.output;
            let (fd, end) = match self.waiting_fd() {
                Some((fd, 0)) => (Some(fd), self.queued.end),
                Some((_, at)) => (None, at),
                None => (None, self.queued.end),
            };
            let from = output_bytes(half, &(0..end));
            let result = retry(
                || {
                    let from = from.clone();
                    self.area.send(output_slot(half), socket, from, fd)
                },
                &[io::ErrorKind::Interrupted],
            );
            match result {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                result => result?,
            }
            self.queued.start = self.area.done(output_slot(half)).bytes;
        }
        Ok(true)
    }

    fn enter(&mut self, state: State) {
        self.state = state;
        self.turn.store(state.turn.into(), Ordering::Relaxed);
        self.area.word(STATE).store(state.word(), Ordering::Release);
    }

    fn load(&self, at: usize) -> usize {
        self.area.word(at).load(Ordering::Acquire) as usize
    }

    fn store(&self, at: usize, value: usize) {
        self.area.word(at).store(value as u64, Ordering::Release);
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal")
            .field("state", &self.state)
            .field("filled", &self.filled)
            .field("queued", &self.queued)
            .finish_non_exhaustive()
    }
}

/// Also after ECONNRESET, which recvmmsg(2) reports once, before the bytes that have arrived: the end of the stream
/// follows.
fn retry_receive(call: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    retry(
        call,
        &[io::ErrorKind::Interrupted, io::ErrorKind::ConnectionReset],
    )
}

fn retry(mut call: impl FnMut() -> io::Result<()>, after: &[io::ErrorKind]) -> io::Result<()> {
    loop {
        match call() {
            Err(error) if after.contains(&error.kind()) => {}
            result => return result,
        }
    }
}
