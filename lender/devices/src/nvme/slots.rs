//! Commands in flight. A slot's number is its tag at the medium.

use super::{block::Tag, namespace::Extent};

/// I/O commands in flight at most; beyond that the controller stops fetching.
pub const IO_SLOTS: u16 = 1024;
/// Slots that only admin commands and a shutdown can have, so that they are
/// never starved by I/O.
pub const RESERVED_SLOTS: u16 = 4;

/// What a slot does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Work {
    #[default]
    Free,
    Read {
        len: u64,
    },
    Write {
        len: u64,
    },
    /// A flush, on its own or as the end of a write-like command.
    Flush,
    /// Zeroes, and a flush after it when it has to be durable.
    Zero {
        durable: bool,
    },
    /// Holes; the ranges left are the slot's.
    Deallocate,
    /// Reads the rest in parts, and compares it with guest memory.
    Compare {
        rest: Extent,
        done: u64,
    },
    /// Reads the rest in parts.
    Verify {
        rest: Extent,
    },
    /// The flush of a shutdown; no command waits for it.
    Shutdown,
}

#[derive(Debug, Default)]
pub struct Slot {
    pub work: Work,
    pub sq_id: u16,
    pub command_id: u16,
    pub nsid: u32,
    pub lba: u64,
    /// Ranges still to be deallocated.
    pub ranges: Vec<Extent>,
}

#[derive(Debug)]
pub struct Slots {
    slots: Vec<Slot>,
    free: Vec<Tag>,
}

impl Slots {
    pub fn new() -> Self {
        let count = IO_SLOTS + RESERVED_SLOTS;
        Self {
            slots: (0..count).map(|_| Slot::default()).collect(),
            // The most recently used is taken first: its memory is warm.
            free: (0..count).rev().collect(),
        }
    }

    /// Whether an I/O command can be fetched.
    pub fn has_room_for_io(&self) -> bool {
        self.free.len() > usize::from(RESERVED_SLOTS)
    }

    /// Whether an admin command can be fetched; the last slot is kept for a
    /// shutdown.
    pub fn has_room_for_admin(&self) -> bool {
        self.free.len() > 1
    }

    pub fn busy(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes a slot.
    pub fn take(&mut self) -> Option<Tag> {
        self.free.pop()
    }

    /// Gives a slot back.
    pub fn release(&mut self, tag: Tag) {
        let slot = &mut self[tag];
        slot.work = Work::Free;
        slot.ranges.clear();
        self.free.push(tag);
    }

    /// Gives all back, as a reset does.
    pub fn clear(&mut self) {
        *self = Self::new();
    }
}

impl std::ops::Index<Tag> for Slots {
    type Output = Slot;

    fn index(&self, tag: Tag) -> &Slot {
        &self.slots[usize::from(tag)]
    }
}

impl std::ops::IndexMut<Tag> for Slots {
    fn index_mut(&mut self, tag: Tag) -> &mut Slot {
        &mut self.slots[usize::from(tag)]
    }
}
