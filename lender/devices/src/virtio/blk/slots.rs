//! Requests in flight. A slot's number is its tag at the medium.

use farside_fabric::Iova;

use super::request::{Extent, Part};
use crate::{
    block::{DEPTH, Tag},
    state::Entry,
};

/// The work of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Free,
    Read,
    Write,
    /// A flush, as a request or as the last step of one.
    Flush,
    /// Zeroes a range, and flushes if `durable`.
    Zero {
        unmap: bool,
        durable: bool,
    },
    /// Punches holes.
    Discard,
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) work: Work,
    pub(super) queue: u16,
    /// The index of the chain's first descriptor.
    pub(super) head: u16,
    /// Its place in the table of requests in flight.
    pub(super) entry: Entry,
    /// Where the status byte is.
    pub(super) status: Iova,
    /// Bytes of the data that the device writes.
    pub(super) in_len: u64,
    /// The data.
    pub(super) data: Vec<Part>,
    /// The first of `data` that has not been moved, and how much of it has.
    pub(super) next: (usize, u32),
    /// The same when the part in flight has been moved.
    pub(super) after: (usize, u32),
    /// The part of the disk that is left to be moved.
    pub(super) rest: Extent,
    /// Bytes of the part that is in flight.
    pub(super) moving: u64,
    /// Ranges still to be discarded or zeroed: the last one is in flight.
    pub(super) ranges: Vec<Extent>,
}

impl Slot {
    fn free() -> Self {
        Self {
            work: Work::Free,
            queue: 0,
            head: 0,
            entry: Entry::default(),
            status: Iova::new(0),
            in_len: 0,
            data: Vec::new(),
            next: (0, 0),
            after: (0, 0),
            rest: Extent::default(),
            moving: 0,
            ranges: Vec::new(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    free: Vec<Tag>,
    /// Requests whose step the medium has given up, in their order: it is done again.
    parked: Vec<Tag>,
}

impl Slots {
    pub(super) fn new() -> Self {
        Self {
            slots: (0..DEPTH).map(|_| Slot::free()).collect(),
            // LIFO: the most recently used slot is warm in the cache.
            free: (0..DEPTH).rev().collect(),
            parked: Vec::new(),
        }
    }

    /// Whether a request can be taken.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn busy(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Requests that the medium has.
    pub(super) fn in_flight(&self) -> usize {
        self.busy() - self.parked.len()
    }

    pub(super) fn park(&mut self, tag: Tag) {
        self.parked.push(tag);
    }

    /// All that is parked, which is in flight then.
    pub(super) fn unpark(&mut self) -> Vec<Tag> {
        std::mem::take(&mut self.parked)
    }

    pub(super) fn take(&mut self) -> Option<Tag> {
        self.free.pop()
    }

    pub(super) fn release(&mut self, tag: Tag) {
        let slot = &mut self[tag];
        slot.work = Work::Free;
        slot.data.clear();
        slot.ranges.clear();
        self.free.push(tag);
    }

    /// Frees all slots, as a reset does.
    pub(super) fn clear(&mut self) {
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
