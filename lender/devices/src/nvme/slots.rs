//! Commands in flight. A slot's number is its tag at the medium.

use super::namespace::Extent;
use crate::{
    block::{DEPTH, Tag},
    state::Entry,
};

/// Most I/O commands in flight; at the limit the controller stops fetching.
pub const IO_SLOTS: u16 = DEPTH - RESERVED_SLOTS;
/// Slots reserved for admin commands and shutdown, so that I/O cannot starve them.
pub const RESERVED_SLOTS: u16 = 4;

/// The work of a slot.
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
    /// A flush, as a command or as the last step of one.
    Flush,
    /// Write zeroes, followed by a flush if `durable`.
    Zero {
        durable: bool,
    },
    /// Punches holes; the slot has the remaining ranges.
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
    /// A request for the lender of a shared namespace.
    Reserve,
    /// A report on its reservations, of the lender.
    Report,
    /// The flush of a shutdown, without a command.
    Shutdown,
}

#[derive(Debug, Default)]
pub struct Slot {
    pub work: Work,
    pub sq_id: u16,
    pub command_id: u16,
    pub entry: Entry,
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
            // LIFO: the most recently used slot is warm in the cache.
            free: (0..count).rev().collect(),
        }
    }

    /// Whether an I/O command can be fetched.
    pub fn has_room_for_io(&self) -> bool {
        self.free.len() > usize::from(RESERVED_SLOTS)
    }

    /// Whether an admin command can be fetched; the last slot is reserved for shutdown.
    pub fn has_room_for_admin(&self) -> bool {
        self.free.len() > 1
    }

    pub fn busy(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether any slot has such work.
    pub fn are_any(&self, is_such: impl Fn(Work) -> bool) -> bool {
        self.slots.iter().any(|slot| is_such(slot.work))
    }

    /// Takes a slot.
    pub fn take(&mut self) -> Option<Tag> {
        self.free.pop()
    }

    /// Frees a slot.
    pub fn release(&mut self, tag: Tag) {
        let slot = &mut self[tag];
        slot.work = Work::Free;
        slot.ranges.clear();
        self.free.push(tag);
    }

    /// Frees all slots, as a reset does.
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
