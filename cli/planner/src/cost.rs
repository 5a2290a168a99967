//! The resources of an adapter that VMs take, and how many VMs fit.

use farside_fabric::NtbLimits;
use serde::Serialize;

/// The resources of an adapter that some VMs use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// DMA windows.
    pub windows: u64,
    /// Bytes that they span, holes included.
    pub span_bytes: u64,
    /// LUT entries that they take.
    pub lut_entries: u64,
    /// Bytes of the BAR: the entries' segments.
    pub bar_bytes: u64,
    /// Entries of the requester table.
    pub requester_entries: u64,
}

impl Cost {
    /// Of a VM whose `devices` share windows of `spans` bytes.
    pub(crate) fn of_vm(spans: &[u64], devices: u64, limits: &NtbLimits) -> Self {
        let entries = spans.iter().map(|&span| limits.entries_for(span));
        let lut_entries = entries.fold(0, u64::saturating_add);
        Self {
            windows: spans.len() as u64,
            span_bytes: spans.iter().copied().fold(0, u64::saturating_add),
            lut_entries,
            bar_bytes: lut_entries.saturating_mul(limits.segment()),
            requester_entries: devices,
        }
    }

    /// Of `times` as many.
    pub(crate) fn times(self, times: u64) -> Self {
        Self {
            windows: self.windows.saturating_mul(times),
            span_bytes: self.span_bytes.saturating_mul(times),
            lut_entries: self.lut_entries.saturating_mul(times),
            bar_bytes: self.bar_bytes.saturating_mul(times),
            requester_entries: self.requester_entries.saturating_mul(times),
        }
    }

    /// Of both.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            windows: self.windows.saturating_add(other.windows),
            span_bytes: self.span_bytes.saturating_add(other.span_bytes),
            lut_entries: self.lut_entries.saturating_add(other.lut_entries),
            bar_bytes: self.bar_bytes.saturating_add(other.bar_bytes),
            requester_entries: self
                .requester_entries
                .saturating_add(other.requester_entries),
        }
    }
}

/// The resource of an adapter that is exhausted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Every requester entry would be taken.
    RequesterEntries,
    /// Windows would span more than the BAR has.
    BarSize,
    /// The BAR has the bytes, but entries translate too large a segment each, or
    /// are too few for so many windows.
    LutEntries,
    /// One window would take more entries than one window may.
    EntriesPerWindow,
    /// A VM's windows would take more entries than its share.
    LutEntriesPerVm,
    /// A VM has more devices than its share of requester entries.
    RequesterEntriesPerVm,
}

impl Limit {
    /// Its name in a lender's configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::RequesterEntries => "requester-entries",
            Self::BarSize => "bar-size",
            Self::LutEntries => "lut-entries",
            Self::EntriesPerWindow => "entries-per-window",
            Self::LutEntriesPerVm => "per-vm.lut-entries",
            Self::RequesterEntriesPerVm => "per-vm.requester-entries",
        }
    }
}

/// How many VMs fit beside what is `taken`, one after the other, and what
/// refuses the next. Each has `devices` devices, which share windows of `spans`.
///
/// Windows are taken lowest entries first and here none goes back, so what is
/// free is one run, and counting is enough.
pub(crate) fn room(spans: &[u64], devices: u64, taken: Cost, limits: &NtbLimits) -> (u64, Limit) {
    let most = u64::from(limits.max_entries());
    if spans.iter().any(|&span| limits.entries_for(span) > most) && most < limits.lut_entries.into()
    {
        return (0, Limit::EntriesPerWindow);
    }
    let vm = Cost::of_vm(spans, devices, limits);
    let requesters = u64::from(limits.max_devices()).saturating_sub(taken.requester_entries);
    let entries = u64::from(limits.lut_entries).saturating_sub(taken.lut_entries);
    let with_windows = entries.checked_div(vm.lut_entries).unwrap_or(u64::MAX);
    let vms = with_windows.min(requesters / devices.max(1));
    if vms > 0 && exceeds(limits.per_vm.lut_entries, vm.lut_entries) {
        return (0, Limit::LutEntriesPerVm);
    }
    if vms > 0 && exceeds(limits.per_vm.requester_entries, devices) {
        return (0, Limit::RequesterEntriesPerVm);
    }
    // The first device of a VM takes its requester entry, then the windows; the others take
    // requester entries alone.
    let limit = if with_windows > vms || requesters == vms.saturating_mul(devices) {
        Limit::RequesterEntries
    } else {
        let next = vm.times(vms.saturating_add(1));
        match taken.and(next).span_bytes > limits.bar_size {
            true => Limit::BarSize,
            false => Limit::LutEntries,
        }
    };
    (vms, limit)
}

/// Whether a VM that needs this much exceeds its share.
fn exceeds(share: Option<u32>, needed: u64) -> bool {
    share.is_some_and(|share| needed > share.into())
}
