//! A cache of finished translations, as an IOTLB is.

use std::sync::Arc;

use crate::{Iova, memory::SharedMemory};

/// Entries. A VM's RAM is a few ranges, so a few entries hit nearly always.
const ENTRIES: usize = 16;

/// A range of IOVA that all three tables translate to one run of host memory.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// First IOVA.
    pub(super) start: Iova,
    /// Bytes.
    pub(super) len: u64,
    /// The memory behind it.
    pub(super) memory: Arc<SharedMemory>,
    /// Where the range begins in `memory`.
    pub(super) offset: u64,
    /// Whether the device may write.
    pub(super) writable: bool,
}

/// A fixed number of [`Entry`]s. It must be emptied on every change of the
/// tables; entries are then never out of date.
#[derive(Debug, Default)]
pub(super) struct Iotlb {
    entries: [Option<Entry>; ENTRIES],
    /// The entry of the last hit: checked first.
    last: usize,
    /// The entry to replace next.
    victim: usize,
}

impl Iotlb {
    /// The entry that contains `iova`.
    #[inline]
    pub(super) fn find(&mut self, iova: Iova) -> Option<&Entry> {
        if !Self::holds(&self.entries[self.last], iova) {
            self.last = (0..ENTRIES).find(|&index| Self::holds(&self.entries[index], iova))?;
        }
        self.entries[self.last].as_ref()
    }

    /// Replaces the oldest entry by `entry`.
    pub(super) fn insert(&mut self, entry: Entry) {
        self.last = self.victim;
        self.entries[self.victim] = Some(entry);
        self.victim = (self.victim + 1) % ENTRIES;
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    #[inline]
    fn holds(entry: &Option<Entry>, iova: Iova) -> bool {
        entry
            .as_ref()
            .is_some_and(|entry| iova.get().wrapping_sub(entry.start.get()) < entry.len)
    }
}
