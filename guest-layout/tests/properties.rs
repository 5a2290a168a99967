//! Random layouts against a naive memory map: every byte of RAM is in exactly one
//! segment, no other byte is, and windows do not overlap.

mod common;

use common::Naive;
use farside_guest_layout::{
    Gpa, GpaRange, PlanRules, ProbeLimits, RangeSet, Resolution, plan, probe,
};
use proptest::prelude::*;

/// Ascending ranges from (gap, length) in pages, of every order of magnitude.
fn layouts() -> impl Strategy<Value = Vec<GpaRange>> {
    let pages = (0u32..22).prop_flat_map(|bits| 0u64..=(1 << bits));
    let gap_and_len = (pages.clone(), pages);
    prop::collection::vec(gap_and_len, 0..24).prop_map(|runs| {
        let mut at = 0;
        let mut ranges = Vec::new();
        for (gap, len) in runs {
            at += gap * 4096;
            if let Ok(range) = GpaRange::new(Gpa::new(at), len * 4096) {
                ranges.push(range);
            }
            at += len * 4096;
        }
        ranges
    })
}

fn merged(ranges: impl IntoIterator<Item = GpaRange>) -> RangeSet {
    ranges.into_iter().collect()
}

proptest! {
    #[test]
    fn a_plan_covers_all_ram_and_nothing_else(ram in layouts(), min_gap in 0u64..(4 << 30)) {
        let layout = probe(&mut Naive(ram.clone()), &ProbeLimits::default())?;
        let plan = plan(&layout, &PlanRules { min_gap });
        let segments: Vec<GpaRange> =
            plan.windows.iter().flat_map(|w| w.segments.clone()).collect();

        // Ascending and apart: no byte is in two segments.
        for pair in segments.windows(2) {
            prop_assert!(pair[0].end() <= pair[1].start());
        }
        // The same bytes, however they were cut.
        prop_assert_eq!(merged(segments), merged(ram.clone()));
        prop_assert_eq!(plan.ram_bytes(), ram.iter().map(|r| r.len()).sum::<u64>());
        for pair in plan.windows.windows(2) {
            prop_assert!(!pair[0].range.overlaps(pair[1].range));
        }
        for window in &plan.windows {
            prop_assert_eq!(window.segments[0].start(), window.range.start());
            prop_assert_eq!(window.segments.last().map(|s| s.end()), Some(window.range.end()));
            prop_assert!(window.segments.iter().all(|s| window.range.covers(*s)));
        }
        // Each edge costs at most 40 probes for the length (2^40 pages), 12 for its order
        // of magnitude, and one for the rest.
        let edges = 2 * (layout.low.len() + layout.high.len()) as u32 + 2;
        prop_assert!(layout.probes <= edges * 53);
    }

    #[test]
    fn wasted_span_is_bounded(ram in layouts()) {
        let rules = PlanRules::default();
        let layout = probe(&mut Naive(ram), &ProbeLimits::default())?;
        for window in plan(&layout, &rules).windows {
            let mut ram = 0;
            for pair in window.segments.windows(2) {
                ram += pair[0].len();
                let gap = pair[1].start().offset_from(pair[0].end()).expect("ascending");
                prop_assert!(gap <= rules.min_gap.max(ram));
            }
        }
    }

    #[test]
    fn a_range_set_answers_as_the_naive_oracle(
        ram in layouts(),
        start in 0u64..(1 << 24),
        pages in 1u64..(1 << 20),
    ) {
        use farside_guest_layout::MemoryMap;
        let asked = GpaRange::new(Gpa::new(start * 4096), pages * 4096)?;
        let expected: Resolution = Naive(ram.clone()).resolve(asked);
        prop_assert_eq!(merged(ram).resolve(asked), expected);
    }
}
