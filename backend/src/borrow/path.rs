//! The way from a device to guest RAM: pins, mappings in the borrower's IOMMU
//! domain, and windows onto them.

use std::{collections::BTreeMap, os::fd::AsFd, sync::Arc};

use farside_control::{CallError, Client};
use farside_fabric::{
    MemoryRange,
    pin::{PinError, PinOptions, Pins},
};
use farside_guest_layout::{GpaRange, Plan};
use serde::Serialize;

use crate::dma_table::Mapping;

/// Windows begin at multiples of this in the borrower's IOMMU domain: more than
/// any NTB asks for, and few enough bits for a 48-bit IOVA.
const FAR_STEP: u64 = 64 << 30;

/// Why a way to guest RAM could not be made or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PathError {
    #[error(transparent)]
    Lender(#[from] CallError),
    #[error("cannot pin guest RAM: {0}")]
    Pin(#[from] PinError),
}

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
    far: u64,
    pins: Pins,
}

/// A window, and where the borrower's domain has it.
struct Window {
    range: GpaRange,
    far: u64,
    lut_entries: u32,
}

/// The open way of one borrow. Empty when closed.
#[derive(Default)]
pub(crate) struct OpenPath {
    segments: BTreeMap<u64, Segment>,
    windows: Vec<Window>,
    /// Windows that were opened since the last close.
    opened: u64,
}

impl OpenPath {
    /// Pins all that `mappings` share within `plan`, maps it contiguously, and
    /// opens a window for each of the plan's. On an error some of that is
    /// done; the caller closes.
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
        for mapping in mappings {
            self.add(client, mapping, pinning)?;
        }
        Ok(())
    }

    /// Makes one more mapping reachable.
    pub(crate) fn map(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
        pinning: &PinOptions<'_>,
    ) -> Result<(), PathError> {
        if mapping.is_shared() && self.window_of(mapping.range).is_none() {
            self.open_window(client, mapping.range)?;
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
        let range = mapping.range;
        let Some(far) = self
            .segments
            .get(&range.start().get())
            .map(|segment| segment.far)
        else {
            return Ok(());
        };
        client.far_unmap(far, range.len())?;
        self.segments.remove(&range.start().get());
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

    /// Unpins, when the lender has undone its part already.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
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

    /// Pins a mapping and puts it in its window. What is in no window is
    /// beyond what any device can address.
    fn add(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
        pinning: &PinOptions<'_>,
    ) -> Result<(), PathError> {
        let range = mapping.range;
        let (Some(backing), Some(far)) = (&mapping.backing, self.window_of(range)) else {
            return Ok(());
        };
        let memory = MemoryRange {
            file: Arc::clone(&backing.file),
            offset: backing.offset,
            len: range.len(),
            writable: mapping.writable,
        };
        let pins = Pins::new(&[memory], pinning)?;
        client.far_map(
            far,
            range.len(),
            backing.file.as_fd(),
            backing.offset,
            mapping.writable,
        )?;
        let segment = Segment { range, far, pins };
        self.segments.insert(range.start().get(), segment);
        Ok(())
    }

    fn open_window(&mut self, client: &mut Client, range: GpaRange) -> Result<(), PathError> {
        // Any place does that no other window of this borrow has.
        let far = (self.opened + 1) * FAR_STEP;
        let lut_entries = client.open_window(range.start().get(), far, range.len())?;
        self.opened += range.len().div_ceil(FAR_STEP);
        self.windows.push(Window {
            range,
            far,
            lut_entries,
        });
        Ok(())
    }

    /// Where the borrower's domain has `range`, by the window that covers it.
    fn window_of(&self, range: GpaRange) -> Option<u64> {
        let window = self
            .windows
            .iter()
            .find(|window| window.range.covers(range))?;
        let offset = range.start().checked_sub(window.range.start())?;
        Some(window.far + offset)
    }
}
