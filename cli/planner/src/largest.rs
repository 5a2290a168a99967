//! The largest guest that fits.

use farside_guest_layout::Plan;
use farside_qemu_configs::{Machine, ram_split};

use crate::{MAX_RAM, guest::windows};

/// The largest RAM, in whole granules, whose windows are `good`.
///
/// More RAM has to be no better than less, as long as both have high memory or
/// neither has. Between the two that is not so: as high memory begins, low
/// memory shrinks.
pub(crate) fn largest(machine: Machine, granule: u64, good: impl Fn(&Plan) -> bool) -> Option<u64> {
    let granule = granule.max(1);
    let low_only = |n: u64| ram_split(machine, n * granule).1 == 0;
    let good = |n: u64| good(&windows(machine, n * granule));
    let most = MAX_RAM / granule;
    let split = last(1, most, low_only).unwrap_or(0);
    last(split + 1, most, good)
        .or_else(|| last(1, split, good))
        .map(|n| n * granule)
}

/// The last number from `first` to `end` that `holds`, which is true of all
/// before it.
fn last(first: u64, end: u64, holds: impl Fn(u64) -> bool) -> Option<u64> {
    if first > end || !holds(first) {
        return None;
    }
    let (mut good, mut bad) = (first, end + 1);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        match holds(middle) {
            true => good = middle,
            false => bad = middle,
        }
    }
    Some(good)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn low_memory_that_shrinks_lets_a_larger_guest_in() {
        // No window over 2.5 GiB: 2.6 GiB are one window, 4 GiB are two.
        let small = |plan: &Plan| plan.spans().iter().all(|&span| span <= 5 * GIB / 2);
        let found = largest(Machine::Q35, 1 << 20, small);
        assert_eq!(found, Some(2 * GIB + 5 * GIB / 2));
        // An i440FX never has less than 3 GiB low once it has high memory.
        let found = largest(Machine::I440fx, 1 << 20, small);
        assert_eq!(found, Some(5 * GIB / 2));
    }

    #[test]
    fn ends_are_found() {
        assert_eq!(largest(Machine::Q35, 1 << 20, |_| false), None);
        let all = largest(Machine::Q35, 1 << 20, |_| true);
        assert_eq!(all, Some(MAX_RAM));
        assert_eq!(last(3, 2, |_| true), None);
        assert_eq!(last(3, 3, |_| true), Some(3));
    }
}
