//! Windows for RAM that comes while a device runs.

use crate::{Gpa, GpaRange, HIGH_MEMORY};

/// Spans that are tried when a memory device's whole region finds no room,
/// bytes: few LUT entries, for many blocks of memory.
const STEPS: [u64; 2] = [1 << 30, 128 << 20];

/// What a new window for `ram` may span, best first; the last is `ram` itself.
///
/// A memory device such as virtio-mem adds its RAM in blocks of 2 MiB or so,
/// each of which would take a LUT entry of its own. So the window spans the
/// device's `region` where that is known: later blocks fall into it. What no
/// RAM is in costs LUT entries and is mapped to nothing.
///
/// `open` are the windows that are open, of which none overlaps `ram`. None is
/// overlapped, and below 4 GiB, where RAM is not plugged but MMIO is, nothing
/// but `ram` is spanned.
pub fn spans(ram: GpaRange, region: Option<GpaRange>, open: &[GpaRange]) -> Vec<GpaRange> {
    let mut spans = Vec::new();
    if let Some(region) = region.filter(|region| region.covers(ram))
        && ram.start() >= HIGH_MEMORY
    {
        let room = room(ram, region, open);
        spans.push(room);
        spans.extend(STEPS.iter().map(|step| aligned(ram, *step, room)));
    }
    spans.push(ram);
    spans.dedup();
    spans
}

/// The part of `region` around `ram` up to the next windows and 4 GiB.
fn room(ram: GpaRange, region: GpaRange, open: &[GpaRange]) -> GpaRange {
    let below = open.iter().map(|window| window.end());
    let below = below.filter(|end| *end <= ram.start());
    let above = open.iter().map(|window| window.start());
    let above = above.filter(|start| *start >= ram.end());
    let start = below.chain([region.start(), HIGH_MEMORY]).max();
    let end = above.chain([region.end()]).min();
    between(start.unwrap_or(ram.start()), end.unwrap_or(ram.end()), ram)
}

/// `ram`, rounded out to multiples of `step` within `room`.
fn aligned(ram: GpaRange, step: u64, room: GpaRange) -> GpaRange {
    let start = ram.start().align_down(step).max(room.start());
    let end = ram.end().checked_align_up(step);
    let end = end.map_or(room.end(), |end| end.min(room.end()));
    between(start, end, ram)
}

fn between(start: Gpa, end: Gpa, ram: GpaRange) -> GpaRange {
    GpaRange::between(start, end).unwrap_or(ram)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn range(start: u64, end: u64) -> GpaRange {
        GpaRange::between(Gpa::new(start), Gpa::new(end)).unwrap()
    }

    #[test]
    fn a_devices_region_is_spanned_whole_or_in_steps() {
        let region = range(5 * GIB, 13 * GIB);
        let block = range(6 * GIB + 2 * MIB, 6 * GIB + 4 * MIB);
        assert_eq!(
            spans(block, Some(region), &[range(0, 2 * GIB)]),
            [
                region,
                range(6 * GIB, 7 * GIB),
                range(6 * GIB, 6 * GIB + 128 * MIB),
                block
            ]
        );
        // Beside what is open.
        let open = [range(4 * GIB, 6 * GIB + 2 * MIB), range(7 * GIB, 8 * GIB)];
        assert_eq!(
            spans(block, Some(region), &open),
            [
                range(6 * GIB + 2 * MIB, 7 * GIB),
                range(6 * GIB + 2 * MIB, 6 * GIB + 128 * MIB),
                block
            ]
        );
    }

    #[test]
    fn ram_without_a_region_is_spanned_alone() {
        let ram = range(5 * GIB, 6 * GIB);
        assert_eq!(spans(ram, None, &[]), [ram]);
        assert_eq!(spans(ram, Some(ram), &[]), [ram]);
        // Not a region that it is in.
        assert_eq!(spans(ram, Some(range(0, GIB)), &[]), [ram]);
    }

    #[test]
    fn nothing_is_spanned_below_4_gib_but_the_ram() {
        let low = range(MIB, 2 * MIB);
        assert_eq!(spans(low, Some(range(0, 8 * GIB)), &[]), [low]);
        let high = range(4 * GIB, 5 * GIB);
        let spans = spans(high, Some(range(GIB, 9 * GIB)), &[range(0, 3 * GIB)]);
        assert_eq!(spans, [range(4 * GIB, 9 * GIB), high]);
    }

    #[test]
    fn the_end_of_the_address_space_is_no_trouble() {
        let end = !0xfff;
        let ram = range(end - 0x1000, end);
        let spans = spans(ram, Some(range(4 * GIB, end)), &[]);
        assert!(spans.iter().all(|span| span.covers(ram)), "{spans:?}");
    }
}
