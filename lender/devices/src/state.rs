//! The state of a model that outlives its process, in memory of the borrower.
//!
//! A process that is killed leaves this memory as it was at some instruction. From it the next process goes on so
//! that each command (of a virtio device: each request) has one effect that the guest can see:
//!
//! | offset | content |
//! | --- | --- |
//! | 0 | magic number of the model's [`Kind`], version, which copy of the snapshot is current, interrupt mask; since version 2 the version of farside |
//! | [`WORDS`] | for each queue pair four counters: commands fetched, tail, completions posted, head |
//! | [`COPIES`] | two copies of the model's [`Snapshot`]: what changes otherwise than by commands of I/O queues |
//! | [`TABLE`] | the commands in flight |
//!
//! A queue of a virtio device is a pair with one number, without tail and head. Its used index in guest memory is what a
//! completion queue's entries are to an NVMe controller.
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
//! memory, or is not: there is one such entry for each completion queue, and the model looks at the guest's memory.
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

mod read;

use std::{
    marker::PhantomData,
    sync::atomic::{
        Ordering::{Relaxed, Release},
        fence,
    },
};

use farside_fabric::memory::HostSlice;
use farside_hand_over::{Format, Unreadable, WRITER, writer};
use serde::{Serialize, de::DeserializeOwned};

use crate::{block::DEPTH, nvme, virtio};
use read::Copied;
pub use read::{check_version, version};

/// Which model has a state.
#[derive(Debug)]
pub struct Kind {
    magic: u64,
    /// As in "the state is that of …".
    name: &'static str,
}

impl Kind {
    pub(crate) const fn new(magic: [u8; 8], name: &'static str) -> Self {
        Self {
            magic: u64::from_le_bytes(magic),
            name,
        }
    }
}

const KINDS: [Kind; 2] = [nvme::STATE_KIND, virtio::STATE_KIND];

/// The part of a model's state that is written as a whole.
///
/// Its encoding is that of [postcard](https://postcard.jamesmunns.com/wire-format): fields in their order, numbers of
/// variable length. A change of it is a new version ([`FORMAT`]): new fields are appended, where zero means that they are
/// absent, and the structures in it stay as they are.
pub(crate) trait Snapshot: Serialize + DeserializeOwned {
    const KIND: Kind;

    /// Of the device since it was last reset: commands in flight of others are void.
    fn session(&mut self) -> &mut u32;

    /// The sequence number of the command whose result is in it.
    fn answered(&self) -> Option<u64> {
        None
    }
}

/// The version that is written, and those that are read. See docs/hand-over-state.md before changing the layout.
///
/// | version | new in it |
/// | --- | --- |
/// | 2 | the version of farside; sequence numbers that are set apart |
pub const FORMAT: Format = Format::new("the state of the model", 2);

const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 8;
/// 0: none, 1 or 2: the copy.
const AT_CURRENT: usize = 12;
const AT_MASK: usize = 16;
/// Sequence numbers below this one may have been used. Zero in version 1.
const AT_SEQUENCES: usize = 24;
/// [`WRITER`] bytes. Zero in version 1.
const AT_WRITER: usize = 64;

/// Bytes from which its version is read ([`version`]).
pub const HEADER: usize = AT_WRITER + WRITER;

/// Queue numbers, with that of an admin queue.
pub(crate) const QUEUES: usize = 256;
const WORDS: usize = 4096;
const WORDS_SIZE: usize = 32;

const COPIES: usize = WORDS + QUEUES * WORDS_SIZE;
const COPY_SIZE: usize = 32 << 10;

const TABLE: usize = COPIES + 2 * COPY_SIZE;
const ENTRY_SIZE: usize = 128;

/// Most commands in flight: those with a slot, event requests, deletions of queues, and the one that is being fetched.
pub(crate) const ENTRIES: usize = 1536;
const _: () = assert!(ENTRIES > DEPTH as usize + QUEUES + 8);

/// Bytes of a model's state.
pub const SIZE: usize = TABLE + ENTRIES * ENTRY_SIZE;

/// Offsets in an entry.
const SEQUENCE: usize = 0;
const OWNER: usize = 8;
const NUMBER: usize = 16;
const COMPLETION: usize = 24;
const COMMAND: usize = 64;

/// Most bytes of a command.
pub(crate) const COMMAND_SIZE: usize = ENTRY_SIZE - COMMAND;

/// Sequence numbers that are set apart at once, so that a process does not use those of one before it.
const SEQUENCES: u64 = 1 << 20;

/// Most of a counter: none overflows in the life of a device.
const MOST: u64 = 1 << 56;

/// Compares the `size` of a disk with the one that was saved. Returns whether it has grown since: of the version before, which
/// has none, that is not known.
pub(crate) fn has_grown(saved: u64, size: u64) -> Result<bool, StateError> {
    match size < saved {
        true => Err(StateError::Shrunk {
            from: saved,
            to: size,
        }),
        false => Ok(saved != 0 && saved < size),
    }
}

/// A command's place in the table, and its sequence number there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    index: u16,
    pub sequence: u64,
}

/// The writer. Without memory it keeps nothing.
#[derive(Debug)]
pub(crate) struct State<S> {
    memory: Option<HostSlice>,
    /// See [`Snapshot::session`].
    session: u32,
    /// The next entry's.
    sequence: u64,
    /// Those below are set apart.
    sequences: u64,
    free: Vec<u16>,
    /// The copy that is current.
    current: u32,
    snapshot: PhantomData<fn(S)>,
}

impl<S> Default for State<S> {
    fn default() -> Self {
        Self {
            memory: None,
            session: 0,
            sequence: 0,
            sequences: 0,
            free: Vec::new(),
            current: 0,
            snapshot: PhantomData,
        }
    }
}

/// A command that was in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InFlight {
    pub entry: Entry,
    pub queue: u16,
    /// Its number in its queue.
    pub number: u64,
    /// The number of its completion, if that was begun.
    pub completion: Option<u64>,
    pub command: [u8; COMMAND_SIZE],
}

/// The counters of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Words {
    pub fetched: u64,
    pub tail: u64,
    pub posted: u64,
    pub head: u64,
}

/// The content of the memory, copied once.
#[derive(Debug)]
pub(crate) struct Restored<S> {
    pub saved: S,
    pub mask: u32,
    /// Sequence numbers below this one may have been used.
    pub sequences: u64,
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
    /// Of another kind of device.
    #[error("the state is that of {of}, and not of {expected}")]
    Foreign {
        /// Its device.
        of: &'static str,
        /// The device that was to go on with it.
        expected: &'static str,
    },
    /// Of no device.
    #[error("the state is that of no device: it begins with {0:#018x}")]
    Unknown(u64),
    /// Of a version that is not read.
    #[error(transparent)]
    Version(#[from] Unreadable),
    /// The snapshot cannot be decoded.
    #[error("the state's snapshot is malformed")]
    Malformed,
    /// The medium has fewer bytes than the guest has seen.
    #[error("the disk has {to} bytes, and the guest has seen {from}: a disk does not shrink")]
    Shrunk {
        /// Bytes that the guest has seen.
        from: u64,
        /// Bytes of the medium.
        to: u64,
    },
    /// A value that no model has.
    #[error("the state is invalid: {0}")]
    Invalid(&'static str),
}

impl<S: Snapshot> State<S> {
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
            ..Self::default()
        };
        state.put_u32(AT_CURRENT, 0);
        state.put(AT_SEQUENCES, 0);
        for entry in 0..ENTRIES {
            state.put(TABLE + entry * ENTRY_SIZE + SEQUENCE, 0);
        }
        state.put_u32(AT_MASK, 0);
        state.put_version();
        state.put(AT_MAGIC, S::KIND.magic);
        Ok(state)
    }

    /// Keeps the state in `memory` from now on. With `resume` returns what it held, if anything.
    pub fn keep_in(
        &mut self,
        memory: HostSlice,
        resume: bool,
    ) -> Result<Option<Restored<S>>, StateError> {
        if resume && let Some((state, restored)) = Self::resume(memory.clone())? {
            *self = state;
            return Ok(Some(restored));
        }
        *self = Self::start(memory)?;
        Ok(None)
    }

    /// Reads what `memory` holds, and goes on writing it. `None`: it holds nothing yet.
    pub fn resume(memory: HostSlice) -> Result<Option<(Self, Restored<S>)>, StateError> {
        if memory.len() != SIZE {
            return Err(StateError::Size(memory.len()));
        }
        let mut bytes = vec![0; SIZE];
        memory.read(&mut bytes);
        let Some(copied) = Copied::check::<S>(&bytes)? else {
            return Ok(None);
        };
        let mut restored = copied.restore::<S>()?;
        let mut state = Self {
            memory: Some(memory),
            session: *restored.saved.session(),
            sequence: restored.sequences.max(1),
            sequences: restored.sequences,
            free: all_free(),
            current: copied.current,
            snapshot: PhantomData,
        };
        // What version 1 has. Above that of the last result, too: a later command with its number would get that result.
        let in_flight = restored.in_flight.iter().map(|it| it.entry.sequence);
        for sequence in in_flight.chain(restored.saved.answered()) {
            state.sequence = state.sequence.max(sequence + 1);
        }
        let is_used = |index| restored.in_flight.iter().any(|it| it.entry.index == index);
        state.free.retain(|&index| !is_used(index));
        state.put_version();
        Ok(Some((state, restored)))
    }

    /// Makes a snapshot current.
    pub fn save(&mut self, mut saved: S) {
        let Some(memory) = &self.memory else {
            return;
        };
        *saved.session() = self.session;
        let next = if self.current == 1 { 2 } else { 1 };
        let at = copy_at(next);
        let Ok(bytes) = postcard::to_stdvec(&saved) else {
            return;
        };
        let Some(to) = memory
            .slice(at + 8, bytes.len())
            .filter(|_| bytes.len() <= COPY_SIZE - 8)
        else {
            // Larger than any that a model makes.
            log::error!("the state has a snapshot of {} bytes", bytes.len());
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

impl<S> State<S> {
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

    /// Records a command, number `number` of a queue, before it is executed. `None`: the table is full.
    pub fn record<const N: usize>(
        &mut self,
        queue: u16,
        number: u64,
        command: &[u8; N],
    ) -> Option<Entry> {
        const { assert!(N.is_multiple_of(8) && N <= COMMAND_SIZE) };
        if self.sequence >= self.sequences {
            self.sequences = self.sequence + SEQUENCES;
            self.put(AT_SEQUENCES, self.sequences);
        }
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
        let owner = u64::from(self.session) << 32 | u64::from(queue);
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

    /// Judges a command that was in flight, of a queue of which `fetched` commands were counted and `posted` completions.
    /// Counts it, and frees the place of one that is done. Returns whether it must be executed again.
    pub fn must_replay(
        &mut self,
        it: &InFlight,
        fetched: &mut u64,
        posted: u64,
    ) -> Result<bool, StateError> {
        if it.number == *fetched {
            // Recorded, and not counted.
            *fetched += 1;
            self.fetched(it.queue, *fetched);
        }
        if it.number >= *fetched {
            return Err(StateError::Invalid(NUMBERS));
        }
        match it.completion {
            Some(number) if number < posted => {
                self.release(it.entry);
                Ok(false)
            }
            Some(number) if number > posted => {
                Err(StateError::Invalid("the number of a completion"))
            }
            _ => Ok(true),
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

    /// See [`Snapshot::session`].
    pub fn session(&self) -> u32 {
        self.session
    }

    /// Begins a session: with the next snapshot, all entries are void.
    pub fn new_session(&mut self) {
        self.session = self.session.wrapping_add(1);
        if self.is_kept() {
            self.free = all_free();
        }
    }
}

const NUMBERS: &str = "the number of a command in flight";

/// Where a test has the process be killed.
pub(crate) fn crash_point() {
    #[cfg(test)]
    crate::nvme::tests::crash::point();
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

#[cfg(test)]
mod tests;
