//! Results of a run, as printed and as read by tests.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A whole run: the JSON object printed at its end.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Whether every step succeeded.
    pub ok: bool,
    /// The device's socket.
    pub socket: String,
    /// Bytes of guest RAM: low and high.
    pub guest_ram_bytes: u64,
    /// Bytes from GPA 0 on.
    pub low_ram_bytes: u64,
    /// Bytes from GPA 4 GiB on.
    pub high_ram_bytes: u64,
    /// Page size of RAM.
    pub page_bytes: u64,
    /// Duration of the first bus-master enable, microseconds.
    pub bme_us: Option<u64>,
    /// Whether all data read back matched; null without any `io`.
    pub checksum_ok: Option<bool>,
    /// Interrupts delivered to the guest.
    pub msix_guest: Interrupts,
    /// Interrupts that arrived before their completion was in memory.
    pub early_interrupts: u64,
    /// Activity before bus-master enable; from the last such step.
    pub before_bme: Option<BeforeBme>,
    /// DMA attempts outside RAM.
    pub rogue: Vec<Rogue>,
    /// Bytes of RAM changed by them; null without any `rogue`.
    pub rogue_bytes_written: Option<u64>,
    /// The BARs by access kind.
    pub areas: Vec<Area>,
    /// Register accesses by load or store.
    pub mapped_accesses: u64,
    /// Register accesses by message.
    pub trapped_accesses: u64,
    /// Access latencies; from the last `latency` step.
    pub round_trips: Option<RoundTrips>,
    /// Every step, in order.
    pub steps: Vec<Answer>,
}

/// The result of a step: one line of JSON in `--step` mode.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The step as written.
    pub step: String,
    /// Whether it succeeded.
    pub ok: bool,
    /// Whether it was performed because a later step requires it.
    pub implied: bool,
    /// Duration, microseconds.
    pub us: u64,
    /// The error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<Found>,
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Found {
    /// Bytes mapped now.
    Mapped(u64),
    /// The BARs and MSI-X.
    Placed(Placed),
    /// Duration of bus-master enable, microseconds.
    BmeUs(u64),
    /// Activity before bus-master enable.
    BeforeBme(BeforeBme),
    /// The NVMe device.
    Drive(Drive),
    /// Data written and read.
    Io(Io),
    /// Interrupts so far.
    Interrupts(Interrupts),
    /// A register's value.
    Value(u32),
    /// DMA outside RAM.
    Rogue(Rogue),
    /// Access latencies.
    RoundTrips(RoundTrips),
    /// The driver's unbind.
    Unbound(Unbound),
}

/// Results of firmware's enumeration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Placed {
    /// (BAR, guest-physical address, bytes).
    pub bars: Vec<(u32, u64, u64)>,
    /// MSI-X vectors of the function.
    pub vectors: u32,
    /// Vectors with an eventfd.
    pub vectors_used: u32,
}

/// An NVMe device's identify data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Drive {
    /// Serial number.
    pub serial: String,
    /// Model.
    pub model: String,
    /// Bytes.
    pub bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Most bytes of a transfer.
    pub transfer_bytes: u64,
    /// I/O queues, each with a separate vector.
    pub queues: u16,
}

/// Interrupts counted on the guest's eventfds since the start of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interrupts {
    /// All.
    pub sum: u64,
    /// Per vector, if not zero.
    pub vectors: BTreeMap<u32, u64>,
}

/// Data written and read back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Io {
    /// Whether the three checksums are equal.
    pub checksum_ok: bool,
    /// Bytes written, and read back.
    pub bytes: u64,
    /// Offset in the namespace, bytes.
    pub offset: u64,
    /// The seed of the pattern.
    pub seed: u64,
    /// SHA-256 of the pattern.
    pub sha256_pattern: String,
    /// SHA-256 of the source memory, after the write.
    pub sha256_source: String,
    /// SHA-256 of the destination memory.
    pub sha256_read: String,
    /// Duration of write and flush, microseconds.
    pub write_us: u64,
    /// Duration of the read, microseconds.
    pub read_us: u64,
}

/// Device activity while bus-master enable was clear; all zero if there was none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeforeBme {
    /// Duration of the observation, milliseconds.
    pub waited_ms: u64,
    /// Completions found in memory.
    pub completions: u64,
    /// Interrupts.
    pub interrupts: u64,
    /// Bytes changed in the memory that the command points to.
    pub ram_bytes_changed: u64,
    /// The controller's status register at the end of the wait.
    pub csts: u32,
}

/// A read command whose destination is outside RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rogue {
    /// Destination.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    /// Whether the command completed.
    pub completed: bool,
    /// Its status (type and code).
    pub status: Option<u16>,
    /// Bytes of RAM changed.
    pub ram_bytes_changed: u64,
}

/// A part of a BAR.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Area {
    /// 0 to 5.
    pub bar: u32,
    /// Offset, bytes.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Whether accesses are loads and stores.
    pub mapped: bool,
}

/// Round-trip times of accesses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundTrips {
    /// Four bytes of configuration space.
    pub config_read: RoundTrip,
    /// Four bytes of BAR 0, by message.
    pub bar_read: RoundTrip,
    /// Four bytes of a mapped BAR, if there is one.
    pub mapped_read: Option<RoundTrip>,
}

/// Statistics of a repeated operation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundTrip {
    /// Repetitions.
    pub n: u64,
    /// Median, microseconds.
    pub p50_us: f64,
    /// 99th percentile, microseconds.
    pub p99_us: f64,
}

/// A driver's unbind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unbound {
    /// Whether the controller reported shutdown complete; null without a driver.
    pub shut_down: Option<bool>,
    /// Duration of clearing bus-master enable, microseconds.
    pub bme_off_us: u64,
}
