//! Layouts of real machines, and hostile ones.

mod common;

use std::time::{Duration, Instant};

use common::{GIB, KIB, MIB, Naive, TIB, span};
use farside_guest_layout::{
    Gpa, GpaRange, Layout, MemoryMap, Plan, PlanRules, ProbeError, ProbeLimits, RangeSet,
    Resolution, plan, probe,
};

fn found(ram: &[GpaRange]) -> (Layout, Plan) {
    let layout = probe(&mut Naive(ram.to_vec()), &ProbeLimits::default()).expect("sane layout");
    assert_eq!(layout.ranges().collect::<Vec<_>>(), ram);
    assert!(layout.probes < 200, "{} probes", layout.probes);
    let plan = plan(&layout, &PlanRules::default());
    let segments: Vec<GpaRange> = plan
        .windows
        .iter()
        .flat_map(|window| window.segments.clone())
        .collect();
    assert_eq!(segments, ram);
    (layout, plan)
}

fn windows(plan: &Plan) -> Vec<GpaRange> {
    plan.windows.iter().map(|window| window.range).collect()
}

#[test]
fn q35_with_512_mib_has_one_window() {
    let (_, plan) = found(&[span(0, 640 * KIB), span(MIB, 512 * MIB)]);
    assert_eq!(windows(&plan), [span(0, 512 * MIB)]);
}

#[test]
fn q35_with_5_gib_splits_at_2_gib() {
    let (_, plan) = found(&[
        span(0, 640 * KIB),
        span(MIB, 2 * GIB),
        span(4 * GIB, 7 * GIB),
    ]);
    assert_eq!(windows(&plan), [span(0, 2 * GIB), span(4 * GIB, 7 * GIB)]);
    assert_eq!(plan.ram_bytes(), 5 * GIB - 384 * KIB);
    assert_eq!(plan.spans(), [2 * GIB, 3 * GIB]);
}

#[test]
fn q35_with_5_gib_splits_at_3_gib() {
    let (_, plan) = found(&[
        span(0, 640 * KIB),
        span(MIB, 3 * GIB),
        span(4 * GIB, 6 * GIB),
    ]);
    assert_eq!(windows(&plan), [span(0, 3 * GIB), span(4 * GIB, 6 * GIB)]);
}

#[test]
fn i440fx_splits_at_3_5_gib() {
    let (_, plan) = found(&[
        span(0, 640 * KIB),
        span(MIB, 3584 * MIB),
        span(4 * GIB, 4 * GIB + 512 * MIB),
    ]);
    assert_eq!(
        windows(&plan),
        [span(0, 3584 * MIB), span(4 * GIB, 4 * GIB + 512 * MIB)]
    );
}

#[test]
fn pam_fragments_and_roms_are_holes_of_the_low_window() {
    // Firmware has made some of the 16 KiB PAM segments writable (RAM) and
    // left others read-only (ROM).
    let (_, plan) = found(&[
        span(0, 640 * KIB),
        span(0xc_4000, 0xc_8000),
        span(0xd_0000, 0xd_4000),
        span(0xe_8000, 0xf_0000),
        span(MIB, 2 * GIB),
    ]);
    assert_eq!(windows(&plan), [span(0, 2 * GIB)]);
    assert_eq!(plan.windows[0].segments.len(), 5);
}

#[test]
fn flash_below_4_gib_does_not_stretch_the_low_window() {
    let (_, plan) = found(&[
        span(0, 640 * KIB),
        span(MIB, 512 * MIB),
        span(4 * GIB - 256 * KIB, 4 * GIB),
    ]);
    assert_eq!(
        windows(&plan),
        [span(0, 512 * MIB), span(4 * GIB - 256 * KIB, 4 * GIB)]
    );
}

#[test]
fn adjacent_pc_dimm_joins_the_high_window() {
    let (_, plan) = found(&[
        span(0, 640 * KIB),
        span(MIB, 2 * GIB),
        span(4 * GIB, 6 * GIB),
        span(7 * GIB, 8 * GIB),
    ]);
    assert_eq!(windows(&plan), [span(0, 2 * GIB), span(4 * GIB, 8 * GIB)]);
    assert_eq!(plan.windows[1].ram_bytes(), 3 * GIB);
}

#[test]
fn distant_pc_dimm_gets_its_own_window() {
    let (_, plan) = found(&[
        span(0, 640 * KIB),
        span(MIB, 2 * GIB),
        span(4 * GIB, 6 * GIB),
        span(64 * GIB, 65 * GIB),
    ]);
    assert_eq!(
        windows(&plan),
        [
            span(0, 2 * GIB),
            span(4 * GIB, 6 * GIB),
            span(64 * GIB, 65 * GIB)
        ]
    );
}

#[test]
fn virtio_mem_blocks_share_a_window() {
    let mut ram = vec![
        span(0, 640 * KIB),
        span(MIB, 2 * GIB),
        span(4 * GIB, 6 * GIB),
    ];
    // Every other 128 MiB of the device's region is plugged.
    ram.extend((0..8).map(|n| {
        let start = 8 * GIB + n * 256 * MIB;
        span(start, start + 128 * MIB)
    }));
    let layout = probe(&mut Naive(ram.clone()), &ProbeLimits::default()).expect("sane layout");
    assert_eq!(layout.ranges().collect::<Vec<_>>(), ram);
    let plan = plan(&layout, &PlanRules::default());
    assert_eq!(plan.windows.len(), 2);
    assert_eq!(plan.windows[1].segments.len(), 9);
}

fn four_tib() -> Vec<GpaRange> {
    vec![
        span(0, 640 * KIB),
        span(MIB, 2 * GIB),
        span(4 * GIB, 4 * TIB + 2 * GIB),
    ]
}

#[test]
#[cfg_attr(miri, ignore = "a time limit, which Miri exceeds")]
fn four_tib_takes_under_200_probes_and_1_ms() {
    let (layout, plan) = found(&four_tib());
    assert_eq!(plan.windows.len(), 2);
    // The fastest of many runs: the time without other load.
    let mut map: RangeSet = four_tib().into_iter().collect();
    let fastest = (0..100)
        .map(|_| {
            let start = Instant::now();
            let again = probe(&mut map, &ProbeLimits::default());
            assert_eq!(again.as_ref(), Ok(&layout));
            start.elapsed()
        })
        .min();
    assert!(fastest < Some(Duration::from_millis(1)), "{fastest:?}");
}

#[test]
fn four_tib_minus_a_page_costs_no_more() {
    found(&[
        span(0, 640 * KIB),
        span(MIB, 2 * GIB - 4096),
        span(4 * GIB, 4 * TIB - 4096),
    ]);
}

#[test]
fn no_ram_is_no_window() {
    let (layout, plan) = found(&[]);
    assert_eq!(layout.probes, 2);
    assert!(plan.windows.is_empty());
}

#[test]
fn ram_across_4_gib_is_low_and_high() {
    let all = span(GIB, 6 * GIB);
    let layout = probe(&mut Naive(vec![all]), &ProbeLimits::default()).expect("sane layout");
    assert_eq!(layout.low, [span(GIB, 4 * GIB)]);
    assert_eq!(layout.high, [span(4 * GIB, 6 * GIB)]);
}

#[test]
fn ram_up_to_the_end_of_the_search_is_found() {
    let limits = ProbeLimits {
        end: Gpa::new(8 * GIB),
        ..ProbeLimits::default()
    };
    let all = span(0, 16 * GIB);
    let layout = probe(&mut Naive(vec![all]), &limits).expect("sane layout");
    assert_eq!(layout.high, [span(4 * GIB, 8 * GIB)]);
    assert_eq!(layout.probes, 2);
}

/// Every other page is RAM.
struct Stripes;

impl MemoryMap for Stripes {
    fn resolve(&mut self, range: GpaRange) -> Resolution {
        if range.len() > 4096 {
            Resolution::Partial
        } else if (range.start().get() / 4096).is_multiple_of(2) {
            Resolution::All
        } else {
            Resolution::Empty
        }
    }
}

#[test]
fn thousands_of_tiny_regions_hit_the_limit_on_ranges() {
    let error = probe(&mut Stripes, &ProbeLimits::default()).expect_err("too fragmented");
    assert_eq!(
        error,
        ProbeError::TooManyRanges {
            limit: 1024,
            at: Gpa::new(1024 * 8192)
        }
    );
    assert!(error.to_string().contains("1024"));
}

#[test]
fn probes_are_bounded() {
    let limits = ProbeLimits {
        max_probes: 100,
        ..ProbeLimits::default()
    };
    let error = probe(&mut Stripes, &limits).expect_err("too fragmented");
    assert!(matches!(
        error,
        ProbeError::TooManyProbes { limit: 100, .. }
    ));
}

#[test]
fn partial_pages_are_refused() {
    for (ram, page) in [
        (span(0, 0x8_0100), 0x8_0000),
        (span(0x1100, 0x8_0000), 0x1000),
        (span(0x100, 0x8_0000), 0),
        (span(4 * GIB - 2048, 4 * GIB - 1024), 4 * GIB - 4096),
    ] {
        let error = probe(&mut Naive(vec![ram]), &ProbeLimits::default()).expect_err("partial");
        let at = Gpa::new(page);
        assert_eq!(error, ProbeError::PartialPage { at }, "{ram}");
    }
}

#[test]
fn an_oracle_that_contradicts_itself_does_not_hang_the_search() {
    struct Liar(u32);
    impl MemoryMap for Liar {
        fn resolve(&mut self, _: GpaRange) -> Resolution {
            self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            match self.0 >> 30 {
                0 => Resolution::All,
                1 => Resolution::Empty,
                _ => Resolution::Partial,
            }
        }
    }
    for seed in 0..1000 {
        let _ = probe(&mut Liar(seed), &ProbeLimits::default());
    }
}
