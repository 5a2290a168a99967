//! The memory behind an open path.

use super::{OpenPath, OpenReport};

impl OpenPath {
    pub(crate) fn report(&self) -> OpenReport {
        let pins = || {
            let own = self
                .segments
                .values()
                .filter_map(|segment| segment.pins.as_ref())
                .map(|pins| pins.report());
            own.chain([self.page_pins.report()])
        };
        OpenReport {
            bytes_pinned: pins().map(|pins| pins.bytes_pinned).sum(),
            bytes_locked: pins().map(|pins| pins.bytes_locked).sum(),
            dma_windows: (self.windows.len() + self.lenders_bars.len()) as u32,
            lut_entries: self.windows.iter().map(|window| window.lut_entries).sum(),
            bytes_unreachable: self.unreachable.values().sum(),
        }
    }
}
