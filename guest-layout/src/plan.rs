//! Packing RAM into DMA windows.
//!
//! A window costs NTB table entries for its whole span, holes included. Low
//! and high memory are always apart, since nothing crosses 4 GiB but MMIO.
//! Within each, ranges share a window unless a gap would waste more than it
//! is worth: a gap larger than [`PlanRules::min_gap`] *and* larger than the RAM
//! that the window has so far begins a new one. So a window's span is less
//! than twice its RAM plus `min_gap` for every gap, and ordinary guests, whose
//! holes are small, get two windows.

use crate::{GpaRange, Layout};

/// When to begin a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanRules {
    /// Gaps of up to this many bytes never begin a window. 1 GiB by default:
    /// larger than every hole of a PC's RAM below 4 GiB, smaller than the
    /// distance at which RAM is hot-plugged.
    pub min_gap: u64,
}

impl Default for PlanRules {
    fn default() -> Self {
        Self { min_gap: 1 << 30 }
    }
}

/// A contiguous range of GPA that a device reaches through one DMA window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The span: from the first segment's start to the last one's end.
    pub range: GpaRange,
    /// RAM inside, ascending, at least one. What is between two segments is a
    /// hole: part of the span, but nothing is mapped there.
    pub segments: Vec<GpaRange>,
}

impl Window {
    /// Bytes of RAM.
    pub fn ram_bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.len()).sum()
    }
}

/// The windows through which a device reaches all guest RAM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Windows, ascending. They do not overlap.
    pub windows: Vec<Window>,
}

impl Plan {
    /// Bytes of RAM.
    pub fn ram_bytes(&self) -> u64 {
        self.windows.iter().map(Window::ram_bytes).sum()
    }

    /// Bytes of each window, holes included: what the NTB must provide.
    pub fn spans(&self) -> Vec<u64> {
        self.windows
            .iter()
            .map(|window| window.range.len())
            .collect()
    }
}

/// Packs the RAM of `layout` into windows.
pub fn plan(layout: &Layout, rules: &PlanRules) -> Plan {
    let mut windows = Vec::new();
    for zone in [&layout.low, &layout.high] {
        pack(zone, rules, &mut windows);
    }
    Plan { windows }
}

/// Appends the windows of one zone, whose ranges are ascending and apart.
fn pack(zone: &[GpaRange], rules: &PlanRules, windows: &mut Vec<Window>) {
    let mut open: Option<(Window, u64)> = None;
    for &segment in zone {
        open = Some(match open.take() {
            Some((mut window, ram)) => match joined(window.range, segment, ram, rules) {
                Some(range) => {
                    window.range = range;
                    window.segments.push(segment);
                    (window, ram.saturating_add(segment.len()))
                }
                None => {
                    windows.push(window);
                    begin(segment)
                }
            },
            None => begin(segment),
        });
    }
    windows.extend(open.map(|(window, _)| window));
}

fn begin(segment: GpaRange) -> (Window, u64) {
    let window = Window {
        range: segment,
        segments: vec![segment],
    };
    (window, segment.len())
}

/// The span of a window with `segment` added, or `None` when the segment is
/// too far away to share it.
fn joined(window: GpaRange, segment: GpaRange, ram: u64, rules: &PlanRules) -> Option<GpaRange> {
    let gap = segment.start().offset_from(window.end())?;
    if gap > rules.min_gap.max(ram) {
        return None;
    }
    GpaRange::between(window.start(), segment.end()).ok()
}
