//! Shared helpers: short notations for layouts, and a naive memory map.
// Each test binary uses a part of it.
#![allow(dead_code)]

use farside_guest_layout::{Gpa, GpaRange, MemoryMap, Resolution};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
pub const TIB: u64 = 1 << 40;

/// The range from `start` up to `end`.
pub fn span(start: u64, end: u64) -> GpaRange {
    GpaRange::between(Gpa::new(start), Gpa::new(end)).expect("the test's ranges are not empty")
}

/// Ranges that do not overlap (but may be adjacent), searched linearly.
pub struct Naive(pub Vec<GpaRange>);

impl MemoryMap for Naive {
    fn resolve(&mut self, range: GpaRange) -> Resolution {
        let common: u64 = self
            .0
            .iter()
            .map(|ram| {
                let start = ram.start().max(range.start());
                let end = ram.end().min(range.end());
                end.offset_from(start).unwrap_or(0)
            })
            .sum();
        if common == range.len() {
            Resolution::All
        } else if common == 0 {
            Resolution::Empty
        } else {
            Resolution::Partial
        }
    }
}
