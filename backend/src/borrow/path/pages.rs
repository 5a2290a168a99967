//! Windows for pages behind a vIOMMU.

use farside_guest_layout::GpaRange;
use farside_lender_protocol::Client;

use super::OpenPath;
use crate::{borrow::error::PathError, dma_table::LOW_MEMORY};

/// Granularity of windows for pages until a window has shown the size of the lender's LUT entries;
/// a power of two.
const PAGE_WINDOW: u64 = 128 << 20;

impl OpenPath {
    /// Whether a mapping is of pages behind a vIOMMU: without one, every guest has RAM at 1 MiB.
    /// (Lower ranges may be remapped before the RAM at 1 MiB is mapped.)
    pub(super) fn is_page(&self, range: GpaRange) -> bool {
        if range.start() <= LOW_MEMORY {
            return false;
        }
        let below = self.segments.range(..=LOW_MEMORY).next_back();
        !below.is_some_and(|(_, segment)| segment.range.contains(LOW_MEMORY))
    }

    /// Whether windows for pages span whole LUT entries. Not behind an IOMMU: a physical function's
    /// IOMMU may have reserved ranges there. Elsewhere an empty window costs only its LUT entry.
    pub(super) fn keeps_windows(&self) -> bool {
        !self.peer_mapper.is_behind_iommu()
    }

    /// Opens windows for pages in `range` that span whole LUT entries, or exactly `range` if there
    /// is no room for that.
    pub(super) fn open_page_windows(
        &mut self,
        client: &mut Client,
        range: GpaRange,
    ) -> Result<(), PathError> {
        let unit = self.page_window.unwrap_or(PAGE_WINDOW);
        for window in self.without_window(whole_units(range, unit)) {
            if !window.overlaps(range) {
                continue;
            }
            match self.open_own_window(client, window) {
                Ok(()) => {
                    if let Some(opened) = self.windows.last() {
                        let segment = opened.range.len() / u64::from(opened.lut_entries.max(1));
                        let segment = segment.max(1).next_power_of_two().min(PAGE_WINDOW);
                        self.page_window.get_or_insert(segment);
                    }
                }
                Err(error) if error.is_limit() => {
                    // Make room: close the windows kept open for later pages.
                    self.close_empty(client)?;
                    let mut gaps = self.without_window(range).into_iter();
                    return gaps.try_for_each(|gap| self.open_own_window(client, gap));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// `range`, rounded out to multiples of `unit`.
fn whole_units(range: GpaRange, unit: u64) -> GpaRange {
    let start = range.start().align_down(unit);
    let end = range.end().checked_align_up(unit);
    let whole = end.and_then(|end| GpaRange::between(start, end).ok());
    whole.unwrap_or(range)
}

#[cfg(test)]
mod tests {
    use super::{super::tests::range, *};

    #[test]
    fn a_page_has_the_window_of_its_lut_entry() {
        let unit = 0x8000;
        assert_eq!(
            whole_units(range(0xf000, 0x11000), unit),
            range(0x8000, 0x18000)
        );
        assert_eq!(
            whole_units(range(0x8000, 0x10000), unit),
            range(0x8000, 0x10000)
        );
        // No overflow at the end of the address space.
        let last = range(u64::MAX - 0x1fff, u64::MAX - 0xfff);
        assert_eq!(whole_units(last, unit), last);
    }
}
