//! The report on a device, for `farside status`.

use farside_backend_api::DeviceReport;
use farside_pci::Description;

use crate::borrow::{
    path::OpenReport,
    worker::{LayoutReport, Settings},
};

/// The report on a device before its first borrow.
pub(super) fn initial(settings: &Settings, description: &Description) -> DeviceReport {
    let lender = settings.lender.clone();
    DeviceReport {
        open_timeout_ms: settings.open_limit().as_millis() as u64,
        ..DeviceReport::new(&settings.device, &description.summary, lender)
    }
}

impl OpenReport {
    /// Puts the figures into `report`.
    pub(super) fn fill(self, report: &mut DeviceReport) {
        report.bytes_pinned = self.bytes_pinned;
        report.bytes_locked = self.bytes_locked;
        report.dma_windows = self.dma_windows;
        report.lut_entries = self.lut_entries;
        report.bytes_unreachable = self.bytes_unreachable;
    }
}

impl LayoutReport {
    /// Puts the figures into `report`.
    pub(super) fn fill(self, report: &mut DeviceReport) {
        report.guest_ram_bytes = self.guest_ram_bytes;
        report.layout_probes = self.layout_probes;
        report.bme_to_ready_us = self.bme_to_ready_us;
        report.bytes_pinned_before_bme = self.bytes_pinned_before_bme;
    }
}
