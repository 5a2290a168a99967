//! What a server has mapped, in the lease's page of the borrower's file, for a process that goes on with the connection.
//!
//! | offset | content |
//! | --- | --- |
//! | 0 | of the lease: how many register accesses were served |
//! | 64 | not 0: no process can go on, since there were more mappings than entries, or DMA by messages |
//! | 128 | entries of 16 bytes: IOVA, whose low bits are the [`State`], and bytes |
//!
//! The borrower can write to it. What it can reach by that is its own device, and its own memory.

use std::sync::atomic::Ordering::{Acquire, Release};

use farside_fabric::memory::HostSlice;
use farside_lender_protocol::STATE_PAGE;

const AT_VOID: usize = 64;
const ENTRIES: usize = 128;
const ENTRY: usize = 16;
const MOST: usize = (STATE_PAGE as usize - ENTRIES) / ENTRY;

/// The bits of an IOVA that are no address.
const LOW: u64 = 0xfff;

/// Whether a mapping is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The server has been asked to map or to unmap it, and has not answered.
    Asked = 1,
    /// It is.
    Mapped = 2,
}

/// A range of the device's addresses: its IOVA and bytes.
pub(super) type Range = (u64, u64);

/// The mappings of the processes before this one.
pub(super) type Inherited = Vec<(Range, State)>;

/// The record, which this process alone writes.
#[derive(Debug)]
pub(super) struct Record {
    page: HostSlice,
    /// The mapping of each entry.
    entries: Vec<Option<Range>>,
    is_void: bool,
}

impl Record {
    /// An empty record.
    pub(super) fn start(page: HostSlice) -> Self {
        let record = Self {
            page,
            entries: vec![None; MOST],
            is_void: false,
        };
        for at in (0..MOST).map(offset) {
            record.put(at, 0);
        }
        record.put(AT_VOID, 0);
        record
    }

    /// Goes on with the record of another process, and returns what that had mapped. `None`: nobody can go on.
    pub(super) fn resume(page: HostSlice) -> Option<(Self, Inherited)> {
        let get = |at: usize| page.load_u64(at, Acquire).unwrap_or_default();
        if get(AT_VOID) != 0 {
            return None;
        }
        let (mut entries, mut inherited) = (vec![None; MOST], Inherited::new());
        for (n, entry) in entries.iter_mut().enumerate() {
            let (word, len) = (get(offset(n)), get(offset(n) + 8));
            let state = match word & LOW {
                1 => State::Asked,
                2 => State::Mapped,
                _ => continue,
            };
            let range = (word & !LOW, len);
            *entry = Some(range);
            inherited.push((range, state));
        }
        let record = Self {
            page,
            entries,
            is_void: false,
        };
        Some((record, inherited))
    }

    /// Records a mapping, before and after the server is asked for it. An entry that it has stays the same.
    pub(super) fn set(&mut self, range: Range, state: State) {
        let has = |entry: &Option<Range>| *entry == Some(range);
        let free = || self.entries.iter().position(Option::is_none);
        let Some(n) = self.entries.iter().position(has).or_else(free) else {
            self.give_up();
            return;
        };
        self.entries[n] = Some(range);
        let (iova, len) = range;
        self.put(offset(n) + 8, len);
        self.put(offset(n), iova & !LOW | state as u64);
    }

    /// A mapping is no more.
    pub(super) fn clear(&mut self, range: Range) {
        let mut entries = self.entries.iter();
        if let Some(n) = entries.position(|entry| *entry == Some(range)) {
            self.entries[n] = None;
            self.put(offset(n), 0);
        }
    }

    /// No process can go on from here.
    pub(super) fn give_up(&mut self) {
        self.is_void = true;
        self.put(AT_VOID, 1);
    }

    pub(super) fn is_void(&self) -> bool {
        self.is_void
    }

    fn put(&self, at: usize, value: u64) {
        // Inside, by the constants above.
        let _ = self.page.store_u64(at, value, Release);
    }
}

fn offset(entry: usize) -> usize {
    ENTRIES + entry * ENTRY
}

#[cfg(test)]
mod tests {
    use farside_fabric::memory::SharedMemory;

    use super::*;

    fn page() -> HostSlice {
        let len = STATE_PAGE as usize;
        let memory = SharedMemory::anonymous(len).unwrap();
        memory.slice(0, len).unwrap()
    }

    #[test]
    fn what_is_mapped_is_found_with_its_state() {
        let page = page();
        page.store_u64(0, 7, Release).unwrap();
        let mut record = Record::start(page.clone());
        record.set((0, 0xa_0000), State::Mapped);
        record.set((0x10_0000, 0x1000), State::Asked);
        record.set((0x20_0000, 0x1000), State::Mapped);
        record.set((0x20_0000, 0x1000), State::Asked);
        record.set((0x30_0000, 0x1000), State::Mapped);
        record.clear((0x30_0000, 0x1000));
        let (mut next, inherited) = Record::resume(page.clone()).unwrap();
        let expected = [
            ((0, 0xa_0000), State::Mapped),
            ((0x10_0000, 0x1000), State::Asked),
            ((0x20_0000, 0x1000), State::Asked),
        ];
        assert_eq!(inherited, expected);
        next.clear((0, 0xa_0000));
        next.set((0x10_0000, 0x1000), State::Mapped);
        let (_, inherited) = Record::resume(page.clone()).unwrap();
        let expected = [
            ((0x10_0000, 0x1000), State::Mapped),
            ((0x20_0000, 0x1000), State::Asked),
        ];
        assert_eq!(inherited, expected);
        assert_eq!(page.load_u64(0, Acquire), Some(7));
    }

    #[test]
    fn nobody_goes_on_after_more_mappings_than_there_are_entries() {
        let page = page();
        let mut record = Record::start(page.clone());
        for n in 0..MOST as u64 {
            record.set((n * 0x1000, 0x1000), State::Mapped);
        }
        assert_eq!(Record::resume(page.clone()).unwrap().1.len(), MOST);
        record.set((MOST as u64 * 0x1000, 0x1000), State::Asked);
        assert!(Record::resume(page.clone()).is_none());
        // The next lease begins anew.
        Record::start(page.clone());
        assert_eq!(Record::resume(page).unwrap().1, []);
    }
}
