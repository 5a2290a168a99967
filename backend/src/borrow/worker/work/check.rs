//! Whether a device can be borrowed.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use farside_guest_layout::{PlanRules, ProbeLimits, plan, probe};
use farside_lender_protocol::{CallError, Client, DeviceEntry, RamRange};

use super::{super::WorkError, Borrower, Settings};
use crate::{borrow::path::window_iova, dma_table::DmaTable};

/// Maximum wait for the lender to notice that an earlier backend of this VM is gone.
const SUCCESSION_TIMEOUT: Duration = Duration::from_secs(2);

/// Polling interval for that.
const SUCCESSION_STEP: Duration = Duration::from_millis(10);

impl Borrower {
    pub(super) fn check(&mut self) -> Result<(), WorkError> {
        let Settings { vm, device, .. } = &self.settings;
        let mut client = self.connect(self.calls_by)?;
        let held = self.settings.fence()?;
        let entry = self.when_left(&mut client)?;
        if let Some(fence) = entry.fence(vm) {
            fence.check_held(device, held).map_err(CallError::from)?;
        }
        match entry.borrowed_by {
            None => Ok(entry.availability.check(device).map_err(CallError::from)?),
            Some(holder) => Err(CallError::from(holder.refusal(device)).into()),
        }
    }

    /// Returns the device's entry after the lender has revoked an orphaned lease of this VM: that
    /// of a killed backend, or of a borrow that was answered too late. Waits no longer than
    /// [`SUCCESSION_TIMEOUT`], and not after `cancel`.
    pub(super) fn when_left(&self, client: &mut Client) -> Result<DeviceEntry, CallError> {
        let Settings { vm, device, .. } = &self.settings;
        let patience = Instant::now() + SUCCESSION_TIMEOUT;
        loop {
            let entry = client.status(device)?.entry;
            let ours = entry
                .borrowed_by
                .as_ref()
                .is_some_and(|holder| holder.vm == *vm);
            let cancelled = self.cancel.load(Ordering::Relaxed);
            if !ours || cancelled || Instant::now() >= patience {
                return Ok(entry);
            }
            std::thread::sleep(SUCCESSION_STEP);
        }
    }
}

/// The guest's RAM ranges, for the lender's check.
pub(super) fn guest_ram(memory: &DmaTable) -> Result<Vec<RamRange>, WorkError> {
    let layout = probe(&mut memory.oracle(), &ProbeLimits::default())?;
    let windows = plan(&layout, &PlanRules::default()).windows;
    let ram = windows.iter().map(|window| RamRange {
        start: window_iova(window.range.start()),
        len: window.range.len(),
    });
    Ok(ram.collect())
}
