//! What `farside status --json` says, as far as it matters here.

use std::fmt;

use serde::Deserialize;

/// The whole answer.
#[derive(Debug, Deserialize)]
pub(crate) struct Status {
    backends: Vec<Backend>,
    lenders: Vec<Lender>,
}

#[derive(Debug, Deserialize)]
struct Backend {
    devices: Vec<Borrow>,
}

#[derive(Debug, Deserialize)]
struct Lender {
    devices: Vec<Lent>,
}

/// The borrower's side of a device.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Borrow {
    pub(crate) device: String,
    pub(crate) state: String,
    pub(crate) bytes_pinned: u64,
    pub(crate) bytes_locked: u64,
    pub(crate) dma_windows: u64,
    pub(crate) lut_entries: u64,
    pub(crate) guest_ram_bytes: u64,
    pub(crate) layout_probes: u64,
    pub(crate) bme_to_ready_us: u64,
    pub(crate) bytes_pinned_before_bme: u64,
    pub(crate) interrupts: Relayed,
    pub(crate) last_error: Option<String>,
}

/// Interrupts that passed through the backend.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Relayed {
    pub(crate) dropped: u64,
    pub(crate) failed: u64,
}

/// The lender's side of a device.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Lent {
    pub(crate) entry: Entry,
    pub(crate) bus_master: bool,
    pub(crate) usage: Usage,
    pub(crate) interrupts: Vec<Fired>,
    pub(crate) faults: Faults,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Entry {
    pub(crate) id: String,
    pub(crate) summary: String,
    pub(crate) borrowed_by: Option<Borrower>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Borrower {
    pub(crate) vm: String,
    pub(crate) epoch: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Usage {
    pub(crate) windows: u64,
    pub(crate) lut_entries: u64,
    pub(crate) bytes_mapped: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Faults {
    pub(crate) total: u64,
}

/// Kind of interrupt, vector, how often it fired.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Fired(pub(crate) u8, pub(crate) u16, pub(crate) u64);

impl fmt::Display for Fired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(index, vector, count) = self;
        match index {
            0 => write!(f, "INTx: {count}"),
            1 => write!(f, "MSI {vector}: {count}"),
            2 => write!(f, "MSI-X {vector}: {count}"),
            _ => write!(f, "interrupt {index}.{vector}: {count}"),
        }
    }
}

impl Status {
    /// The borrower's side of `device`.
    pub(crate) fn borrow(&self, device: &str) -> Option<&Borrow> {
        let mut devices = self.backends.iter().flat_map(|backend| &backend.devices);
        devices.find(|borrow| borrow.device == device)
    }

    /// The lender's side of `device`.
    pub(crate) fn lent(&self, device: &str) -> Option<&Lent> {
        let mut devices = self.lenders.iter().flat_map(|lender| &lender.devices);
        devices.find(|lent| lent.entry.id == device)
    }
}

impl Lent {
    /// Whether nobody has it and it reaches nothing.
    pub(crate) fn is_free(&self) -> bool {
        self.entry.borrowed_by.is_none()
            && !self.bus_master
            && self.usage.windows == 0
            && self.usage.bytes_mapped == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = r#"{
        "backends": [{"vm": "demo", "pid": 7, "devices": [{
            "device": "disk0", "summary": "x", "lender": "/s", "state": "ready", "epoch": 1,
            "bytes_pinned": 10, "bytes_locked": 9, "dma_windows": 2, "lut_entries": 3,
            "guest_ram_bytes": 10, "layout_probes": 4, "bme_to_ready_us": 5,
            "bytes_pinned_before_bme": 0, "bars": [],
            "interrupts": {"enabled": null, "fired": [], "pending": 0, "dropped": 0, "failed": 0},
            "last_error": null}]}],
        "lenders": [{"lender": "l", "address": "/s", "devices": [{
            "entry": {"id": "disk0", "source": "model", "summary": "x",
                      "borrowed_by": {"vm": "demo", "epoch": 1, "seconds": 2}},
            "bus_master": true,
            "usage": {"windows": 2, "lut_entries": 3, "window_bytes": 10, "bytes_mapped": 10},
            "interrupts": [[2, 1, 40]],
            "faults": {"total": 0, "recent": []}, "counters": []}]}]}"#;

    #[test]
    fn both_sides_of_a_device_are_found() {
        let status: Status = serde_json::from_str(JSON).unwrap();
        let borrow = status.borrow("disk0").unwrap();
        assert_eq!((borrow.bytes_pinned, borrow.dma_windows), (10, 2));
        let lent = status.lent("disk0").unwrap();
        assert!(!lent.is_free());
        assert_eq!(lent.interrupts[0].to_string(), "MSI-X 1: 40");
        assert!(status.borrow("disk1").is_none() && status.lent("disk1").is_none());
    }

    #[test]
    fn what_is_left_open_is_not_free() {
        let mut lent = Lent::default();
        assert!(lent.is_free());
        lent.usage.windows = 1;
        assert!(!lent.is_free());
    }
}
