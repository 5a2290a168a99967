//! The content of the memory, copied once.

use std::collections::BTreeSet;

use farside_hand_over::{decode, read_writer};

use super::{
    AT_CURRENT, AT_MAGIC, AT_MASK, AT_SEQUENCES, AT_VERSION, AT_WRITER, COMMAND, COMMAND_SIZE,
    COMPLETION, COPY_SIZE, ENTRIES, ENTRY_SIZE, Entry, FORMAT, HEADER, InFlight, KINDS, MOST,
    NUMBER, NUMBERS, OWNER, QUEUES, Restored, SEQUENCE, Snapshot, StateError, Words, copy_at,
    entry_at, words_at,
};

/// The version of the state that begins with these [`HEADER`] bytes. `None`: nothing was written to it.
pub fn version(header: &[u8]) -> Result<Option<u32>, StateError> {
    let header = Copied {
        bytes: header,
        current: 0,
    };
    match header.u64(AT_MAGIC) {
        0 => Ok(None),
        magic if KINDS.iter().any(|kind| kind.magic == magic) => Ok(Some(header.u32(AT_VERSION))),
        magic => Err(StateError::Unknown(magic)),
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
pub(crate) struct Copied<'a> {
    bytes: &'a [u8],
    pub current: u32,
}

impl<'a> Copied<'a> {
    /// `None`: nothing was written to it.
    pub fn check<S: Snapshot>(bytes: &'a [u8]) -> Result<Option<Self>, StateError> {
        let mut copied = Self { bytes, current: 0 };
        match copied.u64(AT_MAGIC) {
            0 => return Ok(None),
            magic if magic == S::KIND.magic => check_version(bytes)?,
            magic => {
                let kind = KINDS.iter().find(|kind| kind.magic == magic);
                return Err(match kind {
                    Some(kind) => StateError::Foreign {
                        of: kind.name,
                        expected: S::KIND.name,
                    },
                    None => StateError::Unknown(magic),
                });
            }
        }
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

    pub fn restore<S: Snapshot>(&self) -> Result<Restored<S>, StateError> {
        let at = copy_at(self.current);
        let len = usize::try_from(self.u64(at)).ok();
        let len = len.filter(|&len| len <= COPY_SIZE - 8);
        let snapshot = len.and_then(|len| self.bytes.get(at + 8..at + 8 + len));
        let mut saved: S = snapshot
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
        let session = *saved.session();
        let mut in_flight: Vec<InFlight> = (0..ENTRIES as u16)
            .filter_map(|index| self.entry(index, session))
            .collect();
        let is_large = |it: &InFlight| {
            it.entry.sequence >= MOST || it.completion.is_some_and(|number| number >= MOST)
        };
        let sequences = self.u64(AT_SEQUENCES);
        let is_large_answer = saved.answered().is_some_and(|sequence| sequence >= MOST);
        if is_large_answer || sequences >= MOST || in_flight.iter().any(is_large) {
            return Err(StateError::Invalid("a counter of a command is too large"));
        }
        in_flight.sort_by_key(|command| command.entry.sequence);
        let mut seen = BTreeSet::new();
        if !in_flight
            .iter()
            .all(|it| seen.insert((it.queue, it.number)))
        {
            return Err(StateError::Invalid(NUMBERS));
        }
        Ok(Restored {
            saved,
            mask: self.u32(AT_MASK),
            sequences,
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
        let mut command = [0; COMMAND_SIZE];
        command.copy_from_slice(self.bytes.get(at + COMMAND..at + ENTRY_SIZE)?);
        Some(InFlight {
            entry: Entry { index, sequence },
            queue: owner as u16,
            number: self.u64(at + NUMBER),
            completion: self.u64(at + COMPLETION).checked_sub(1),
            command,
        })
    }
}
