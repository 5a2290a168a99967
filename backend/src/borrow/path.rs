//! The way from a device to guest RAM: pins, mappings in the borrower's IOMMU
//! domain, and windows onto them.

use std::{collections::BTreeMap, time::Instant};

use farside_control::{CallError, Client};
use farside_fabric::{MemoryRange, pin::{PinError, PinPolicy, Pins}};
use farside_guest_layout::{GpaRange, Plan};
use serde::Serialize;

use crate::dma_table::Mapping;

/// Where guest-physical address 0 is in the borrower's IOMMU domain. The domain
/// is the VM's own, so a constant distance makes every window contiguous; and
/// far above all host RAM, a stray untranslated access hits nothing.
const FAR_BASE: u64 = 1 << 46;

/// Why a way to guest RAM could not be made or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PathError {
    #[error(transparent)]
    Lender(#[from] CallError),
    #[error("cannot pin guest RAM: {0}")]
    Pin(#[from] PinError),
    #[error("guest memory at GPA {start:#x}: {source}")]
    Memory {
        start: u64,
        source: farside_fabric::FabricError,
    },
}

/// What opening came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct OpenReport {
    /// Bytes of guest RAM that the device reaches.
    pub(crate) bytes_pinned: u64,
    /// Of those, bytes locked in memory.
    pub(crate) bytes_locked: u64,
    pub(crate) windows: u32,
    pub(crate) lut_entries: u32,
}

struct Segment {
    range: GpaRange,
    pins: Pins,
}

/// The open way of one borrow. Empty when closed.
#[derive(Default)]
pub(crate) struct OpenPath {
    segments: BTreeMap<u64, Segment>,
    windows: Vec<(GpaRange, u32)>,
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
        pinning: &mut Pinning<'_>,
    ) -> Result<(), PathError> {
        let planned = |mapping: &&Mapping| {
            let mut windows = plan.windows.iter();
            windows.any(|window| window.range.covers(mapping.range))
        };
        for mapping in mappings.iter().filter(planned) {
            self.add(client, mapping, pinning)?;
        }
        for window in &plan.windows {
            self.open_window(client, window.range)?;
        }
        Ok(())
    }

    /// Makes one more mapping reachable.
    pub(crate) fn map(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
        pinning: &mut Pinning<'_>,
    ) -> Result<(), PathError> {
        self.add(client, mapping, pinning)?;
        let range = mapping.range;
        if !self.windows.iter().any(|(window, _)| window.covers(range)) {
            self.open_window(client, range)?;
        }
        Ok(())
    }

    /// Makes a mapping unreachable, then unpins it. A window that has nothing
    /// left in it is closed.
    pub(crate) fn unmap(&mut self, client: &mut Client, mapping: &Mapping) -> Result<(), PathError> {
        let range = mapping.range;
        if !self.segments.contains_key(&range.start().get()) {
            return Ok(());
        }
        client.far_unmap(far(range), range.len())?;
        self.segments.remove(&range.start().get());
        let segments = &self.segments;
        let (used, empty) = std::mem::take(&mut self.windows)
            .into_iter()
            .partition(|(window, _)| segments.values().any(|left| left.range.overlaps(*window)));
        self.windows = used;
        for (window, _) in empty as Vec<(GpaRange, u32)> {
            client.close_window(window.start().get())?;
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
        self.windows.clear();
        self.segments.clear();
    }

    pub(crate) fn report(&self) -> OpenReport {
        let pins = || self.segments.values().map(|segment| &segment.pins);
        OpenReport {
            bytes_pinned: pins().map(Pins::bytes).sum(),
            bytes_locked: pins().map(Pins::bytes_locked).sum(),
            windows: self.windows.len() as u32,
            lut_entries: self.windows.iter().map(|(_, entries)| entries).sum(),
        }
    }

    fn add(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
        pinning: &mut Pinning<'_>,
    ) -> Result<(), PathError> {
        let Some(backing) = &mapping.backing else {
            return Ok(());
        };
        let range = mapping.range;
        let memory = MemoryRange::new(
            backing.file.clone(),
            backing.offset,
            range.len(),
            mapping.writable,
        )
        .map_err(|source| PathError::Memory {
            start: range.start().get(),
            source,
        })?;
        let pins = pinning.pin(&memory)?;
        client.far_map(
            far(range),
            range.len(),
            std::os::fd::AsFd::as_fd(&*backing.file),
            backing.offset,
            mapping.writable,
        )?;
        self.segments
            .insert(range.start().get(), Segment { range, pins });
        Ok(())
    }

    fn open_window(&mut self, client: &mut Client, range: GpaRange) -> Result<(), PathError> {
        let entries = client.open_window(range.start().get(), far(range), range.len())?;
        self.windows.push((range, entries));
        Ok(())
    }
}

/// How pinning goes about it, and how far it has come.
pub(crate) struct Pinning<'a> {
    pub(crate) policy: PinPolicy,
    pub(crate) deadline: Instant,
    /// Called with the bytes done since the last call.
    pub(crate) progress: &'a (dyn Fn(u64) + Sync),
}

impl Pinning<'_> {
    fn pin(&mut self, memory: &MemoryRange) -> Result<Pins, PinError> {
        Pins::new(memory, self.policy, self.deadline, self.progress)
    }
}

fn far(range: GpaRange) -> u64 {
    FAR_BASE + range.start().get()
}
