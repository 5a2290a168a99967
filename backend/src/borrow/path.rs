//! The way from a device to guest RAM: pins, mappings in the borrower's IOMMU
//! domain, and windows onto them.

use std::{collections::BTreeMap, sync::Arc};

use farside_control::{CallError, Client};
use farside_fabric::{
    MemoryRange,
    pin::{PinOptions, PinProgress, Pins},
};
use farside_guest_layout::{GpaRange, Plan};
use serde::Serialize;

use super::{
    error::PathError,
    far::{FAR_STEP, Far, FarSide},
};
use crate::dma_table::Mapping;

/// What opening came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct OpenReport {
    /// Bytes of guest RAM that the device reaches.
    pub(crate) bytes_pinned: u64,
    /// Of those, bytes locked in memory.
    pub(crate) bytes_locked: u64,
    pub(crate) dma_windows: u32,
    pub(crate) lut_entries: u32,
}

/// A mapping that the device reaches.
struct Segment {
    range: GpaRange,
    /// Where the borrower's domain has it: one piece for each window that it
    /// is in.
    pieces: Vec<Piece>,
    pins: Pins,
}

#[derive(Clone, Copy)]
struct Piece {
    range: GpaRange,
    far: u64,
}

/// A window, and where the borrower's domain has it.
struct Window {
    range: GpaRange,
    far: Far,
    lut_entries: u32,
}

/// The open way of one borrow. Empty when closed.
#[derive(Default)]
pub(crate) struct OpenPath {
    far_side: FarSide,
    segments: BTreeMap<u64, Segment>,
    windows: Vec<Window>,
}

impl OpenPath {
    /// A closed way, whose far end is `far_side`.
    pub(crate) fn new(far_side: FarSide) -> Self {
        Self {
            far_side,
            ..Self::default()
        }
    }

    /// Opens a window for each of the plan's, then pins all that `mappings`
    /// share within them and maps it there. On an error some of that is done;
    /// the caller closes.
    ///
    /// Windows come first, so that a guest that does not fit is found before
    /// its RAM is pinned, which takes long. Nothing masters the bus meanwhile.
    pub(crate) fn open(
        &mut self,
        client: &mut Client,
        plan: &Plan,
        mappings: &[Mapping],
        pinning: &PinOptions<'_>,
    ) -> Result<(), PathError> {
        for window in &plan.windows {
            self.open_window(client, window.range)?;
        }
        let total = plan.ram_bytes();
        let mut before = 0;
        for mapping in mappings.iter().filter(|mapping| mapping.is_shared()) {
            // Of one mapping; people want to know of the guest.
            let show = |at: PinProgress| {
                if let Some(progress) = pinning.progress {
                    let done = before + at.done;
                    progress(PinProgress { done, total });
                }
            };
            let pinning = PinOptions {
                progress: Some(&show),
                ..*pinning
            };
            self.add(client, mapping, &pinning)?;
            before += mapping.range.len();
        }
        Ok(())
    }

    /// Makes one more mapping reachable, with windows for what no open one
    /// spans.
    pub(crate) fn map(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
        pinning: &PinOptions<'_>,
    ) -> Result<(), PathError> {
        if mapping.is_shared() {
            for range in self.without_window(mapping.range) {
                self.open_window(client, range)?;
            }
        }
        self.add(client, mapping, pinning)
    }

    /// Makes a mapping unreachable, then unpins it. A window that has nothing
    /// left in it is closed.
    pub(crate) fn unmap(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
    ) -> Result<(), PathError> {
        let start = mapping.range.start().get();
        let Some(segment) = self.segments.get(&start) else {
            return Ok(());
        };
        for piece in &segment.pieces {
            self.far_side.unmap(client, piece.far, piece.range.len())?;
        }
        self.segments.remove(&start);
        let segments = &self.segments;
        let in_use = |window: &Window| {
            segments
                .values()
                .any(|left| left.range.overlaps(window.range))
        };
        while let Some(at) = self.windows.iter().position(|window| !in_use(window)) {
            client.close_window(self.windows[at].range.start().get())?;
            self.windows.swap_remove(at);
        }
        Ok(())
    }

    /// Stops DMA and undoes everything; pins go last.
    pub(crate) fn close(&mut self, client: &mut Client) -> Result<(), CallError> {
        client.close()?;
        self.forget();
        Ok(())
    }

    /// Unmaps and unpins, when the lender has undone its part already, or is
    /// gone.
    pub(crate) fn forget(&mut self) {
        self.far_side.unmap_all();
        self.segments.clear();
        self.windows.clear();
    }

    pub(crate) fn report(&self) -> OpenReport {
        let pins = || self.segments.values().map(|segment| segment.pins.report());
        OpenReport {
            bytes_pinned: pins().map(|pins| pins.bytes_pinned).sum(),
            bytes_locked: pins().map(|pins| pins.bytes_locked).sum(),
            dma_windows: self.windows.len() as u32,
            lut_entries: self.windows.iter().map(|window| window.lut_entries).sum(),
        }
    }

    /// Pins a mapping and puts it in its windows. What is in no window is
    /// beyond what any device can address.
    fn add(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
        pinning: &PinOptions<'_>,
    ) -> Result<(), PathError> {
        let pieces = self.pieces(mapping.range);
        let Some(memory) = mapping.memory().filter(|_| !pieces.is_empty()) else {
            return Ok(());
        };
        let pins = Pins::new(std::slice::from_ref(&memory), pinning)?;
        let start = mapping.range.start().get();
        for piece in &pieces {
            let part = MemoryRange {
                file: Arc::clone(&memory.file),
                offset: memory.offset + (piece.range.start().get() - start),
                len: piece.range.len(),
                writable: memory.writable,
            };
            self.far_side.map(client, piece.far, part)?;
        }
        let segment = Segment {
            range: mapping.range,
            pieces,
            pins,
        };
        self.segments.insert(start, segment);
        Ok(())
    }

    fn open_window(&mut self, client: &mut Client, range: GpaRange) -> Result<(), PathError> {
        let far = self
            .far_side
            .take(range.len(), || self.free_far(range.len()))?;
        let lut_entries = client.open_window(range.start().get(), far.start, range.len())?;
        self.windows.push(Window {
            range,
            far,
            lut_entries,
        });
        Ok(())
    }

    /// The lowest place in the borrower's domain that no window has.
    fn free_far(&self, len: u64) -> u64 {
        let taken = self.windows.iter();
        let mut taken: Vec<_> = taken
            .map(|window| {
                let start = window.far.start;
                (start, start.saturating_add(steps(window.range.len())))
            })
            .collect();
        taken.sort_unstable();
        let mut free = FAR_STEP;
        for (start, end) in taken {
            if free.saturating_add(steps(len)) <= start {
                break;
            }
            free = end;
        }
        free
    }

    /// The parts of `range` by the windows that span them, and where the
    /// borrower's domain has those.
    fn pieces(&self, range: GpaRange) -> Vec<Piece> {
        let part = |window: &Window| {
            let start = window.range.start().max(range.start());
            let end = window.range.end().min(range.end());
            let skip = start.checked_sub(window.range.start())?;
            Some(Piece {
                range: GpaRange::between(start, end).ok()?,
                far: window.far.start.checked_add(skip)?,
            })
        };
        self.windows.iter().filter_map(part).collect()
    }

    /// The parts of `range` that no window spans.
    fn without_window(&self, range: GpaRange) -> Vec<GpaRange> {
        let mut spanned: Vec<_> = self.pieces(range);
        spanned.sort_by_key(|piece| piece.range.start());
        let mut gaps = Vec::new();
        let mut at = range.start();
        for piece in spanned {
            gaps.extend(GpaRange::between(at, piece.range.start()));
            at = piece.range.end();
        }
        gaps.extend(GpaRange::between(at, range.end()));
        gaps
    }
}

/// `len` in whole steps.
fn steps(len: u64) -> u64 {
    len.checked_next_multiple_of(FAR_STEP).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use farside_guest_layout::Gpa;

    use super::*;

    fn range(start: u64, end: u64) -> GpaRange {
        GpaRange::between(Gpa::new(start), Gpa::new(end)).unwrap()
    }

    fn open(windows: &[(u64, u64)]) -> OpenPath {
        let mut path = OpenPath::default();
        for &(start, end) in windows {
            let range = range(start, end);
            let far = Far::at(path.free_far(range.len()));
            path.windows.push(Window {
                range,
                far,
                lut_entries: 1,
            });
        }
        path
    }

    #[test]
    fn a_mapping_is_cut_where_windows_end() {
        let path = open(&[(0, 0x8000), (0xa000, 0xc000)]);
        let pieces = path.pieces(range(0x6000, 0xe000));
        let found: Vec<_> = pieces
            .iter()
            .map(|piece| (piece.range, piece.far))
            .collect();
        let expected = [
            (range(0x6000, 0x8000), FAR_STEP + 0x6000),
            (range(0xa000, 0xc000), 2 * FAR_STEP),
        ];
        assert_eq!(found, expected);
        let gaps = path.without_window(range(0x6000, 0xe000));
        assert_eq!(gaps, [range(0x8000, 0xa000), range(0xc000, 0xe000)]);
        assert_eq!(path.without_window(range(0x1000, 0x8000)), []);
        assert_eq!(
            path.without_window(range(0x10000, 0x11000)),
            [range(0x10000, 0x11000)]
        );
    }

    #[test]
    fn far_addresses_are_used_again() {
        let mut path = open(&[
            (0, 0x1000),
            (0x1000, 3 * FAR_STEP),
            (4 * FAR_STEP, 5 * FAR_STEP),
        ]);
        let fars: Vec<_> = path.windows.iter().map(|window| window.far.start).collect();
        assert_eq!(fars, [FAR_STEP, 2 * FAR_STEP, 5 * FAR_STEP]);
        path.windows.remove(1);
        assert_eq!(path.free_far(3 * FAR_STEP), 2 * FAR_STEP);
        assert_eq!(path.free_far(3 * FAR_STEP + 1), 6 * FAR_STEP);
        assert_eq!(path.free_far(u64::MAX), 6 * FAR_STEP);
    }
}
