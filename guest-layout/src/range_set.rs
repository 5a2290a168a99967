//! A set of addresses, kept as few ranges.

use crate::{Gpa, GpaRange, MemoryMap, Resolution};

/// A set of guest-physical addresses: sorted ranges that neither overlap nor
/// touch. It answers as a [`MemoryMap`] in logarithmic time.
///
/// ```
/// use farside_guest_layout::{Gpa, GpaRange, RangeSet};
/// let page = |n: u64| GpaRange::new(Gpa::new(n * 4096), 4096).unwrap();
/// let set: RangeSet = [page(5), page(1), page(2)].into_iter().collect();
/// assert_eq!(set.ranges().len(), 2); // pages 1 and 2 are one range
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet {
    ranges: Vec<GpaRange>,
}

impl RangeSet {
    /// The ranges, in ascending order.
    pub fn ranges(&self) -> &[GpaRange] {
        &self.ranges
    }

    /// Bytes in the set.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.len()).sum()
    }

    /// How much of `range` is in the set.
    pub fn resolve(&self, range: GpaRange) -> Resolution {
        // The first range that ends above the start is the only one that can
        // cover it, since ranges of the set do not touch.
        let at = self
            .ranges
            .partition_point(|held| held.end() <= range.start());
        match self.ranges.get(at) {
            Some(held) if held.covers(range) => Resolution::All,
            Some(held) if held.overlaps(range) => Resolution::Partial,
            _ => Resolution::Empty,
        }
    }
}

impl FromIterator<GpaRange> for RangeSet {
    fn from_iter<I: IntoIterator<Item = GpaRange>>(ranges: I) -> Self {
        let mut sorted: Vec<GpaRange> = ranges.into_iter().collect();
        sorted.sort_unstable();
        let mut merged: Vec<GpaRange> = Vec::with_capacity(sorted.len());
        for range in sorted {
            match merged.last_mut() {
                Some(last) if range.start() <= last.end() => {
                    let end: Gpa = last.end().max(range.end());
                    // Both are ranges, so their hull is one.
                    *last = GpaRange::between(last.start(), end).unwrap_or(*last);
                }
                _ => merged.push(range),
            }
        }
        Self { ranges: merged }
    }
}

impl MemoryMap for RangeSet {
    fn resolve(&mut self, range: GpaRange) -> Resolution {
        RangeSet::resolve(self, range)
    }
}
