//! `farside status --json`.

use anyhow::{Context, Result};
use farside_backend_api::{DeviceReport, Status as Document};
use farside_fabric::Fault;
use farside_lender_protocol::{Counter, DeviceStatus};

/// The whole status.
#[derive(Clone, Debug)]
pub struct Status(pub Document);

/// A device as its backend reports it.
pub type Borrow = DeviceReport;

/// A device as its lender reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as in the status")]
pub struct Lent {
    /// The VM that borrows it.
    pub borrowed_by: Option<String>,
    pub bus_master: bool,
    pub windows: u32,
    pub lut_entries: u32,
    pub bytes_mapped: u64,
    /// (index, vector, count) of each vector that was raised.
    pub interrupts: Vec<(u8, u16, u64)>,
    pub fault_total: u64,
    pub faults: Vec<Fault>,
    is_closed: bool,
    counters: Vec<Counter>,
}

impl Status {
    /// Parses the output of `farside status --json`.
    pub fn from_json(json: &str) -> Result<Self> {
        let document = Document::from_json(json.as_bytes());
        let document = document.with_context(|| format!("farside status printed {json}"))?;
        Ok(Self(document))
    }

    /// The report on `device` by the backend of `vm`.
    pub fn borrow(&self, vm: &str, device: &str) -> Result<Borrow> {
        let backend = self.0.backend(vm);
        let backend = backend.with_context(|| format!("no backend of VM {vm} in {self:?}"))?;
        let found = backend.device(device).cloned();
        found.with_context(|| format!("no device {device} in {backend:?}"))
    }

    /// The report on `device` by its lender.
    pub fn lent(&self, device: &str) -> Result<Lent> {
        let found = self.0.lent(device).map(Lent::from);
        found.with_context(|| format!("no lender has {device} in {self:?}"))
    }
}

impl From<&DeviceStatus> for Lent {
    fn from(status: &DeviceStatus) -> Self {
        let borrowed_by = status.entry.borrowed_by.as_ref();
        Self {
            borrowed_by: borrowed_by.map(|by| by.vm.to_string()),
            bus_master: status.bus_master,
            windows: status.usage.windows,
            lut_entries: status.usage.lut_entries,
            bytes_mapped: status.usage.bytes_mapped,
            interrupts: status
                .interrupts
                .iter()
                .map(|count| (count.index as u8, count.vector, count.fired))
                .collect(),
            fault_total: status.faults.total,
            faults: status.faults.recent.iter().map(|r| r.fault).collect(),
            is_closed: status.is_closed(),
            counters: status.counters.clone(),
        }
    }
}

impl Lent {
    /// Whether the device can access no memory.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// A counter of the device model.
    pub fn counter(&self, name: &str) -> Result<u64> {
        self.counters
            .iter()
            .find(|counter| counter.name == name)
            .map(|counter| counter.value)
            .with_context(|| format!("no counter {name} in {:?}", self.counters))
    }
}
