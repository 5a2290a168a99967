//! The status of a device at its lender.

use farside_fabric::{FaultSummary, Usage};
use farside_irq_relay::VectorCount;
use serde::{Deserialize, Serialize};

use crate::{DeviceEntry, LimitUse};

/// The status of one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Its entry in the list of devices.
    pub entry: DeviceEntry,
    /// The device's bus-master enable.
    pub bus_master: bool,
    /// Windows and mappings of the current borrow.
    pub usage: Usage,
    /// Interrupts raised in the current borrow, of vectors with a nonzero count. Encoded as
    /// (index, vector, count).
    #[serde(with = "rows")]
    pub interrupts: Vec<VectorCount>,
    /// DMA faults of the current borrow, or else of the last one.
    pub faults: FaultSummary,
    /// Counters of the device model.
    pub counters: Vec<Counter>,
    /// What the current borrow uses of its limits.
    #[serde(default)]
    pub limits: Vec<LimitUse>,
}

/// A counter of a device model. Encoded as (name, value).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(String, u64)", into = "(String, u64)")]
pub struct Counter {
    /// Its name, in lower case.
    pub name: String,
    /// Its value.
    pub value: u64,
}

impl From<(String, u64)> for Counter {
    fn from((name, value): (String, u64)) -> Self {
        Self { name, value }
    }
}

impl From<Counter> for (String, u64) {
    fn from(Counter { name, value }: Counter) -> Self {
        (name, value)
    }
}

mod rows {
    use farside_irq_relay::{IrqIndex, VectorCount};
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(
        counts: &[VectorCount],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let rows = counts.iter().map(|c| (c.index as u8, c.vector, c.fired));
        serializer.collect_seq(rows)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<VectorCount>, D::Error> {
        let rows = Vec::<(u8, u16, u64)>::deserialize(deserializer)?.into_iter();
        let counts = rows.map(|(index, vector, fired)| {
            let index = IrqIndex::try_from(u32::from(index))?;
            Ok(VectorCount {
                index,
                vector,
                fired,
            })
        });
        let counts: Result<_, farside_irq_relay::SetIrqsError> = counts.collect();
        counts.map_err(Error::custom)
    }
}

impl DeviceStatus {
    /// Whether DMA is disabled and no memory is mapped.
    pub fn is_closed(&self) -> bool {
        !self.bus_master && self.usage.windows == 0 && self.usage.bytes_mapped == 0
    }

    /// Whether the device is unleased and [closed](Self::is_closed).
    pub fn is_free(&self) -> bool {
        self.entry.borrowed_by.is_none() && self.is_closed()
    }
}
