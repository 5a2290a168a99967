//! Giving out consecutive LUT entries.

use std::collections::BTreeMap;

/// The LUT entries in use, and the sizes of their windows.
#[derive(Clone, Debug)]
pub(crate) struct Lut {
    entries: u32,
    /// By first entry.
    taken: BTreeMap<u32, Taken>,
}

#[derive(Clone, Copy, Debug)]
struct Taken {
    entries: u32,
    bytes: u64,
}

impl Lut {
    pub(crate) fn new(entries: u32) -> Self {
        Self {
            entries,
            taken: BTreeMap::new(),
        }
    }

    /// Takes the lowest free run of `entries` (at least one) for a window of
    /// `bytes`; returns its first entry, or `None` when no run is long enough.
    pub(crate) fn take(&mut self, entries: u64, bytes: u64) -> Option<u32> {
        let entries = u32::try_from(entries).ok().filter(|&entries| entries > 0)?;
        let (first, _) = self.free_runs().find(|&(_, len)| len >= entries)?;
        self.taken.insert(first, Taken { entries, bytes });
        Some(first)
    }

    /// Takes the run of `entries` from `first`, if it is free.
    pub(crate) fn take_at(&mut self, first: u32, entries: u32, bytes: u64) -> bool {
        let end = u64::from(first) + u64::from(entries);
        let free = self
            .free_runs()
            .any(|(at, len)| entries > 0 && at <= first && end <= u64::from(at) + u64::from(len));
        if free {
            self.taken.insert(first, Taken { entries, bytes });
        }
        free
    }

    /// Gives back the run that begins at `first`.
    pub(crate) fn give_back(&mut self, first: u32) {
        self.taken.remove(&first);
    }

    /// Entries that are free.
    pub(crate) fn free(&self) -> u32 {
        self.free_runs().map(|(_, len)| len).sum()
    }

    /// Most consecutive entries that are free.
    pub(crate) fn largest_run(&self) -> u32 {
        self.free_runs().map(|(_, len)| len).max().unwrap_or(0)
    }

    /// Bytes of each window, in the order of entries.
    pub(crate) fn window_bytes(&self) -> impl Iterator<Item = u64> + Clone + '_ {
        self.taken.values().map(|taken| taken.bytes)
    }

    /// Free runs as (first, entries), ascending.
    fn free_runs(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let ends = self
            .taken
            .iter()
            .map(|(&first, taken)| (first, first + taken.entries));
        let mut at = 0;
        ends.chain([(self.entries, self.entries)])
            .filter_map(move |(first, end)| {
                let run = (at, first - at);
                at = end;
                (run.1 > 0).then_some(run)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn entries_are_given_out_once_and_all_come_back(
            steps in prop::collection::vec((any::<bool>(), 1u64..40, any::<prop::sample::Index>()), 0..200)
        ) {
            const ENTRIES: u32 = 64;
            let mut lut = Lut::new(ENTRIES);
            // The naive allocator: one flag an entry.
            let mut taken = [false; ENTRIES as usize];
            let mut held: Vec<(u32, u32)> = Vec::new();
            for (take, entries, pick) in steps {
                if take {
                    match lut.take(entries, entries * 4096) {
                        Some(first) => {
                            let run = first as usize..first as usize + entries as usize;
                            prop_assert!(run.end <= taken.len());
                            prop_assert!(taken[run.clone()].iter().all(|t| !t));
                            taken[run].fill(true);
                            held.push((first, entries as u32));
                        }
                        None => {
                            let longest = taken.split(|&t| t).map(<[bool]>::len).max();
                            prop_assert!(longest < Some(entries as usize));
                        }
                    }
                } else if !held.is_empty() {
                    let (first, entries) = held.swap_remove(pick.index(held.len()));
                    lut.give_back(first);
                    taken[first as usize..(first + entries) as usize].fill(false);
                }
                prop_assert_eq!(lut.free() as usize, taken.iter().filter(|t| !**t).count());
                let longest = taken.split(|&t| t).map(<[bool]>::len).max().unwrap_or(0);
                prop_assert_eq!(lut.largest_run() as usize, longest);
            }
            for (first, _) in held {
                lut.give_back(first);
            }
            prop_assert_eq!(lut.largest_run(), ENTRIES);
        }
    }
}
