//! The controller's state that outlives its process, in memory of the borrower.
//!
//! A process that is killed leaves this memory as it was at some instruction. From it the next process goes on so
//! that each command has one effect that the guest can see:
//!
//! | offset | content |
//! | --- | --- |
//! | 0 | [`MAGIC`], version, which copy of the snapshot is current, interrupt mask; since version 2 the version of farside |
//! | [`WORDS`] | for each queue pair four counters: commands fetched, tail, completions posted, head |
//! | [`COPIES`] | two copies of the snapshot ([`saved`]): what commands of the admin queue and registers change |
//! | [`TABLE`] | the commands in flight |
//!
//! # Order of stores
//!
//! Fetching a command: its entry, void meanwhile, with the number that it has in its queue; the entry's sequence number,
//! which makes it valid; the queue's count of fetched commands. An entry whose number equals that count was recorded, and the
//! count not yet.
//!
//! Completing one: the number that its completion has in the completion queue, into its entry; the completion, into
//! guest memory; the queue's count of posted completions; then the entry is freed. So an entry with a number below the
//! count is done, one without a number is not, and of one whose number equals the count the completion is in guest
//! memory, or is not: there is one such entry for each completion queue, and the guest's memory is looked at
//! ([`super::recovery`]).
//!
//! What an admin command changes is in the snapshot together with its result ("answered"), which becomes current by
//! one store, before its completion is posted.
//!
//! While the process runs it is the only writer, and never reads this memory: the borrower can write to it.
//!
//! # Versions
//!
//! This version and the one before are read ([`FORMAT`]). What the one before has not is zero in it, which means that it
//! is absent. A process that goes on from the version before writes what is new, and then the version.

pub mod saved;

use std::sync::atomic::{
    Ordering::{Relaxed, Release},
    fence,
};

use farside_fabric::memory::HostSlice;
use farside_hand_over::{Format, Unreadable, WRITER, decode, read_writer, writer};

use super::{
    command::SQE_SIZE,
    slots::{IO_SLOTS, RESERVED_SLOTS},
};
use saved::Saved;

/// "FARSNVME".
const MAGIC: u64 = u64::from_le_bytes(*b"FARSNVME");

/// The version that is written, and those that are read. See docs/hand-over-state.md before changing the layout.
///
/// | version | new in it |
/// | --- | --- |
/// | 2 | the version of farside |
pub const FORMAT: Format = Format::new("the state of the NVMe controller", 2);

const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 8;
/// 0: none, 1 or 2: the copy.
const AT_CURRENT: usize = 12;
const AT_MASK: usize = 16;
/// [`WRITER`] bytes. Zero in version 1.
const AT_WRITER: usize = 64;

/// Bytes by which a state is told from others, and its version known ([`version`]).
pub const HEADER: usize = AT_WRITER + WRITER;

/// Queue numbers, with that of the admin queue.
const QUEUES: usize = 256;
const WORDS: usize = 4096;
const WORDS_SIZE: usize = 32;

const COPIES: usize = WORDS + QUEUES * WORDS_SIZE;
const COPY_SIZE: usize = 32 << 10;

const TABLE: usize = COPIES + 2 * COPY_SIZE;
const ENTRY_SIZE: usize = 128;

/// Most commands in flight: those with a slot, event requests, deletions of queues, and the one that is being fetched.
const ENTRIES: usize = 1536;
const _: () = assert!(ENTRIES > (IO_SLOTS + RESERVED_SLOTS) as usize + QUEUES + 8);

/// Bytes of the state.
pub const SIZE: usize = TABLE + ENTRIES * ENTRY_SIZE;

/// Offsets in an entry.
const SEQUENCE: usize = 0;
const OWNER: usize = 8;
const NUMBER: usize = 16;
const COMPLETION: usize = 24;
const COMMAND: usize = 64;

/// Most of a counter: none overflows in the life of a device.
const MOST: u64 = 1 << 56;

/// A command's place in the table, and its sequence number there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    index: u16,
    pub sequence: u64,
}

/// The writer. Without memory it keeps nothing.
#[derive(Debug, Default)]
pub struct State {
    memory: Option<HostSlice>,
    /// Of the controller since it was last reset: entries of others are void.
    session: u32,
    /// The next entry's.
    sequence: u64,
    free: Vec<u16>,
    /// The copy that is current.
    current: u32,
}

/// A command that was in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlight {
    pub entry: Entry,
    pub sq: u16,
    /// Its number in its queue.
    pub number: u64,
    /// The number of its completion, if that was begun.
    pub completion: Option<u64>,
    pub command: [u8; SQE_SIZE],
}

/// The counters of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Words {
    pub fetched: u64,
    pub tail: u64,
    pub posted: u64,
    pub head: u64,
}

/// What the memory held, copied once.
#[derive(Debug)]
pub struct Restored {
    pub saved: Saved,
    pub mask: u32,
    pub words: Vec<Words>,
    /// In the order in which they were fetched.
    pub in_flight: Vec<InFlight>,
}

/// Why a state cannot be gone on with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// Too few bytes.
    #[error("the state has {0} bytes, and not {SIZE}")]
    Size(usize),
    /// Not of an NVMe controller.
    #[error("the state is not that of an NVMe controller")]
    Foreign,
    /// Of a version that is not read.
    #[error(transparent)]
    Version(#[from] Unreadable),
    /// The snapshot cannot be decoded.
    #[error("the state's snapshot is malformed")]
    Malformed,
    /// A value that no controller has.
    #[error("the state is invalid: {0}")]
    Invalid(&'static str),
}

impl State {
    /// The writer for `memory`, which is [`SIZE`] bytes, whose content is void from now on.
    pub fn start(memory: HostSlice) -> Result<Self, StateError> {
        if memory.len() != SIZE {
            return Err(StateError::Size(memory.len()));
        }
        let state = Self {
            memory: Some(memory),
            session: 0,
            sequence: 1,
            free: all_free(),
            current: 0,
        };
        state.put_u32(AT_CURRENT, 0);
        for entry in 0..ENTRIES {
            state.put(TABLE + entry * ENTRY_SIZE + SEQUENCE, 0);
        }
        state.put_u32(AT_MASK, 0);
        state.put_version();
        state.put(AT_MAGIC, MAGIC);
        Ok(state)
    }

    /// Reads what `memory` holds, and goes on writing it. `None`: it holds nothing yet.
    pub fn resume(memory: HostSlice) -> Result<Option<(Self, Restored)>, StateError> {
        if memory.len() != SIZE {
            return Err(StateError::Size(memory.len()));
        }
        let mut bytes = vec![0; SIZE];
        memory.read(&mut bytes);
        let Some(copied) = Copied::check(&bytes)? else {
            return Ok(None);
        };
        let restored = copied.restore()?;
        let mut state = Self {
            memory: Some(memory),
            session: restored.saved.session,
            sequence: 1,
            free: all_free(),
            current: copied.current,
        };
        // Above that of the last result, too: a later command with its number would get that result.
        let in_flight = restored.in_flight.iter().map(|it| it.entry.sequence);
        let answered = restored.saved.answered.map(|it| it.sequence);
        for sequence in in_flight.chain(answered) {
            state.sequence = state.sequence.max(sequence + 1);
        }
        let is_used = |index| restored.in_flight.iter().any(|it| it.entry.index == index);
        state.free.retain(|&index| !is_used(index));
        state.put_version();
        Ok(Some((state, restored)))
    }

    /// What is new in this version is there before it: the version before ignores it.
    fn put_version(&self) {
        for (n, word) in writer().as_chunks().0.iter().enumerate() {
            self.put(AT_WRITER + n * 8, u64::from_le_bytes(*word));
        }
        self.put_u32(AT_VERSION, FORMAT.version());
    }

    /// Whether anything is kept.
    pub fn is_kept(&self) -> bool {
        self.memory.is_some()
    }

    /// Leaves the memory as it is from now on.
    pub fn detach(&mut self) {
        self.memory = None;
    }

    fn put(&self, at: usize, value: u64) {
        if let Some(memory) = &self.memory {
            crash_point();
            // Inside, by the constants above.
            let _ = memory.store_u64(at, value, Release);
            crash_point();
        }
    }

    fn put_u32(&self, at: usize, value: u32) {
        if let Some(memory) = &self.memory {
            crash_point();
            let _ = memory.store_u32(at, value, Release);
            crash_point();
        }
    }

    /// Records a command, number `number` of queue `sq`, before it is executed. `None`: the table is full.
    pub fn record(&mut self, sq: u16, number: u64, command: &[u8; SQE_SIZE]) -> Option<Entry> {
        let Some(memory) = &self.memory else {
            return Some(Entry::default());
        };
        let entry = Entry {
            index: self.free.pop()?,
            sequence: self.sequence,
        };
        let at = entry_at(entry.index);
        crash_point();
        // That of a session before: void by its owner only, which is about to change.
        let _ = memory.store_u64(at + SEQUENCE, 0, Relaxed);
        fence(Release);
        for (n, word) in command.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
            let _ = memory.store_u64(at + COMMAND + n * 8, word, Relaxed);
        }
        let owner = u64::from(self.session) << 32 | u64::from(sq);
        let _ = memory.store_u64(at + OWNER, owner, Relaxed);
        let _ = memory.store_u64(at + NUMBER, number, Relaxed);
        let _ = memory.store_u64(at + COMPLETION, 0, Relaxed);
        crash_point();
        let _ = memory.store_u64(at + SEQUENCE, self.sequence, Release);
        crash_point();
        self.sequence += 1;
        Some(entry)
    }

    /// The completion of a command will be number `number` of its queue.
    pub fn completing(&self, entry: Entry, number: u64) {
        self.put(entry_at(entry.index) + COMPLETION, number + 1);
    }

    /// A command is not completed: another one may get the number that it had.
    pub fn not_completed(&self, entry: Entry) {
        self.put(entry_at(entry.index) + COMPLETION, 0);
    }

    /// A command is done: its completion is recorded as posted.
    pub fn release(&mut self, entry: Entry) {
        if self.memory.is_some() {
            self.put(entry_at(entry.index) + SEQUENCE, 0);
            self.free.push(entry.index);
        }
    }

    pub fn fetched(&self, sq: u16, count: u64) {
        self.put(words_at(sq), count);
    }

    pub fn tail(&self, sq: u16, tail: u16) {
        self.put(words_at(sq) + 8, tail.into());
    }

    pub fn posted(&self, cq: u16, count: u64) {
        self.put(words_at(cq) + 16, count);
    }

    pub fn head(&self, cq: u16, head: u16) {
        self.put(words_at(cq) + 24, head.into());
    }

    pub fn mask(&self, mask: u32) {
        self.put_u32(AT_MASK, mask);
    }

    /// The counters of a new submission queue.
    pub fn new_sq(&self, id: u16) {
        self.fetched(id, 0);
        self.tail(id, 0);
    }

    /// The counters of a new completion queue.
    pub fn new_cq(&self, id: u16) {
        self.posted(id, 0);
        self.head(id, 0);
    }

    /// Begins a session: with the next snapshot, all entries are void.
    pub fn new_session(&mut self) {
        self.session = self.session.wrapping_add(1);
        if self.is_kept() {
            self.free = all_free();
        }
    }

    /// Makes a snapshot current.
    pub fn save(&mut self, mut saved: Saved) {
        let Some(memory) = &self.memory else {
            return;
        };
        saved.session = self.session;
        let next = if self.current == 1 { 2 } else { 1 };
        let at = copy_at(next);
        let Ok(bytes) = postcard::to_stdvec(&saved) else {
            return;
        };
        let Some(to) = memory
            .slice(at + 8, bytes.len())
            .filter(|_| bytes.len() <= COPY_SIZE - 8)
        else {
            // Larger than any that a controller makes.
            log::error!("the controller's state has {} bytes", bytes.len());
            return;
        };
        crash_point();
        to.write(&bytes);
        let _ = memory.store_u64(at, bytes.len() as u64, Relaxed);
        crash_point();
        let _ = memory.store_u32(AT_CURRENT, next, Release);
        crash_point();
        self.current = next;
    }
}

/// Where a test has the process be killed.
fn crash_point() {
    #[cfg(test)]
    super::tests::crash::point();
}

fn all_free() -> Vec<u16> {
    (0..ENTRIES as u16).rev().collect()
}

fn entry_at(index: u16) -> usize {
    TABLE + usize::from(index) * ENTRY_SIZE
}

fn words_at(queue: u16) -> usize {
    WORDS + usize::from(queue) * WORDS_SIZE
}

fn copy_at(copy: u32) -> usize {
    COPIES + (copy as usize - 1) * COPY_SIZE
}

/// The version of the state that begins with these [`HEADER`] bytes. `None`: nothing was written to it.
pub fn version(header: &[u8]) -> Result<Option<u32>, StateError> {
    let header = Copied {
        bytes: header,
        current: 0,
    };
    match header.u64(AT_MAGIC) {
        0 => Ok(None),
        MAGIC => Ok(Some(header.u32(AT_VERSION))),
        _ => Err(StateError::Foreign),
    }
}

/// Checks that the state that begins with these [`HEADER`] bytes is of a version that is read.
pub fn check_version(header: &[u8]) -> Result<(), StateError> {
    let farside = header.get(AT_WRITER..HEADER).and_then(read_writer);
    match version(header)? {
        Some(version) => Ok(FORMAT.check(version, farside.as_deref())?),
        None => Ok(()),
    }
}

/// A copy of the memory.
struct Copied<'a> {
    bytes: &'a [u8],
    current: u32,
}

impl<'a> Copied<'a> {
    /// `None`: nothing was written to it.
    fn check(bytes: &'a [u8]) -> Result<Option<Self>, StateError> {
        let mut copied = Self { bytes, current: 0 };
        if version(bytes)?.is_none() {
            return Ok(None);
        }
        check_version(bytes)?;
        copied.current = copied.u32(AT_CURRENT);
        match copied.current {
            0 => Ok(None),
            1 | 2 => Ok(Some(copied)),
            _ => Err(StateError::Malformed),
        }
    }

    fn u64(&self, at: usize) -> u64 {
        let bytes = self.bytes.get(at..at + 8);
        bytes.map_or(0, |it| {
            u64::from_le_bytes(it.try_into().unwrap_or_default())
        })
    }

    fn u32(&self, at: usize) -> u32 {
        let bytes = self.bytes.get(at..at + 4);
        bytes.map_or(0, |it| {
            u32::from_le_bytes(it.try_into().unwrap_or_default())
        })
    }

    fn restore(&self) -> Result<Restored, StateError> {
        let at = copy_at(self.current);
        let len = usize::try_from(self.u64(at)).ok();
        let len = len.filter(|&len| len <= COPY_SIZE - 8);
        let snapshot = len.and_then(|len| self.bytes.get(at + 8..at + 8 + len));
        let saved: Saved = snapshot
            .and_then(|bytes| decode(bytes).ok())
            .ok_or(StateError::Malformed)?;
        let words: Vec<Words> = (0..QUEUES as u16)
            .map(|queue| {
                let at = words_at(queue);
                Words {
                    fetched: self.u64(at),
                    tail: self.u64(at + 8),
                    posted: self.u64(at + 16),
                    head: self.u64(at + 24),
                }
            })
            .collect();
        if words
            .iter()
            .any(|it| it.fetched >= MOST || it.posted >= MOST)
        {
            return Err(StateError::Invalid("a counter of a queue is too large"));
        }
        let mut in_flight: Vec<InFlight> = (0..ENTRIES as u16)
            .filter_map(|index| self.entry(index, saved.session))
            .collect();
        let is_large = |it: &InFlight| {
            it.entry.sequence >= MOST || it.completion.is_some_and(|number| number >= MOST)
        };
        let is_large_answer = saved.answered.is_some_and(|it| it.sequence >= MOST);
        if is_large_answer || in_flight.iter().any(is_large) {
            return Err(StateError::Invalid("a counter of a command is too large"));
        }
        in_flight.sort_by_key(|command| command.entry.sequence);
        Ok(Restored {
            saved,
            mask: self.u32(AT_MASK),
            words,
            in_flight,
        })
    }

    fn entry(&self, index: u16, session: u32) -> Option<InFlight> {
        let at = entry_at(index);
        let (sequence, owner) = (self.u64(at + SEQUENCE), self.u64(at + OWNER));
        if sequence == 0 || owner >> 32 != u64::from(session) {
            return None;
        }
        let mut command = [0; SQE_SIZE];
        command.copy_from_slice(self.bytes.get(at + COMMAND..at + COMMAND + SQE_SIZE)?);
        Some(InFlight {
            entry: Entry { index, sequence },
            sq: owner as u16,
            number: self.u64(at + NUMBER),
            completion: self.u64(at + COMPLETION).checked_sub(1),
            command,
        })
    }
}

#[cfg(test)]
mod tests;
