//! What a run found, as it is printed and as tests read it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A whole run: the one JSON object at its end.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Whether every step did what it should.
    pub ok: bool,
    /// The device's socket.
    pub socket: String,
    /// Bytes of guest RAM: low and high.
    pub guest_ram_bytes: u64,
    /// Bytes from GPA 0 on.
    pub low_ram_bytes: u64,
    /// Bytes from GPA 4 GiB on.
    pub high_ram_bytes: u64,
    /// Bytes of the pages that RAM is made of.
    pub page_bytes: u64,
    /// How long the first bus-master enable took, microseconds.
    pub bme_us: Option<u64>,
    /// Whether all data came back as written; null without any `io`.
    pub checksum_ok: Option<bool>,
    /// Interrupts that reached the guest.
    pub msix_guest: Interrupts,
    /// Interrupts that came before their completion was in memory.
    pub early_interrupts: u64,
    /// The device without bus-master enable; the last such step.
    pub before_bme: Option<BeforeBme>,
    /// DMA outside RAM, a row an attempt.
    pub rogue: Vec<Rogue>,
    /// Bytes of RAM that it changed; null without any `rogue`.
    pub rogue_bytes_written: Option<u64>,
    /// The BARs by how they were reached.
    pub areas: Vec<Area>,
    /// Register accesses that were a load or store.
    pub mapped_accesses: u64,
    /// Register accesses that were a message.
    pub trapped_accesses: u64,
    /// How long accesses take; the last `latency` step.
    pub round_trips: Option<RoundTrips>,
    /// Every step, in order.
    pub steps: Vec<Answer>,
}

/// What came of a step: one line of JSON where steps come from the input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// As it was written.
    pub step: String,
    /// Whether it did what it should.
    pub ok: bool,
    /// Whether it was done because a later one needs it.
    pub implied: bool,
    /// How long it took, microseconds.
    pub us: u64,
    /// Why it could not be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What it found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<Found>,
}

/// What a step found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Found {
    /// Bytes that are mapped now.
    Mapped(u64),
    /// The BARs and MSI-X.
    Placed(Placed),
    /// How long bus-master enable took, microseconds.
    BmeUs(u64),
    /// The device without bus-master enable.
    BeforeBme(BeforeBme),
    /// The drive.
    Drive(Drive),
    /// Data written and read.
    Io(Io),
    /// Interrupts so far.
    Interrupts(Interrupts),
    /// What a register reads.
    Value(u32),
    /// DMA outside RAM.
    Rogue(Rogue),
    /// How long accesses take.
    RoundTrips(RoundTrips),
    /// The end of the driver.
    Unbound(Unbound),
}

/// What firmware found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Placed {
    /// (BAR, guest-physical address, bytes).
    pub bars: Vec<(u32, u64, u64)>,
    /// MSI-X vectors of the function.
    pub vectors: u32,
    /// Those that have an eventfd.
    pub vectors_used: u32,
}

/// A drive as it identifies itself.
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
    /// Most bytes of a command.
    pub transfer_bytes: u64,
    /// I/O queues, each with a vector of its own.
    pub queues: u16,
}

/// Interrupts that the guest counted on its eventfds, from the start of the
/// program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interrupts {
    /// All.
    pub sum: u64,
    /// Those of each vector that had any.
    pub vectors: BTreeMap<u32, u64>,
}

/// Data written and read back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Io {
    /// Whether the three checksums are one.
    pub checksum_ok: bool,
    /// Bytes written, and read.
    pub bytes: u64,
    /// Where on the drive, bytes.
    pub offset: u64,
    /// The seed of the pattern.
    pub seed: u64,
    /// SHA-256 of the pattern.
    pub sha256_pattern: String,
    /// SHA-256 of the memory that was written from, afterwards.
    pub sha256_source: String,
    /// SHA-256 of the memory that was read to.
    pub sha256_read: String,
    /// How long writing and flushing took, microseconds.
    pub write_us: u64,
    /// How long reading took, microseconds.
    pub read_us: u64,
}

/// What the device did while it might not DMA: all zero, if it did nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeforeBme {
    /// How long it was watched, milliseconds.
    pub waited_ms: u64,
    /// Completions in memory.
    pub completions: u64,
    /// Interrupts.
    pub interrupts: u64,
    /// Bytes changed of the memory that it was pointed at.
    pub ram_bytes_changed: u64,
    /// The controller's status register at the end of the wait.
    pub csts: u32,
}

/// A read command that pointed the drive outside RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rogue {
    /// Where.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    /// Whether the drive answered.
    pub completed: bool,
    /// The status (type and code) that it answered with.
    pub status: Option<u16>,
    /// Bytes of RAM that are not as they were.
    pub ram_bytes_changed: u64,
}

/// A part of a BAR.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Area {
    /// 0 to 5.
    pub bar: u32,
    /// Where it begins, bytes.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Whether it is reached by loads and stores.
    pub mapped: bool,
}

/// How long accesses take, there and back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundTrips {
    /// Four bytes of configuration space.
    pub config_read: RoundTrip,
    /// Four bytes of BAR 0, by message.
    pub bar_read: RoundTrip,
    /// Four bytes of a mapped BAR, where there is one.
    pub mapped_read: Option<RoundTrip>,
}

/// How long something takes that was done often.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundTrip {
    /// How often.
    pub n: u64,
    /// Half took no longer, microseconds.
    pub p50_us: f64,
    /// 99 of 100 took no longer, microseconds.
    pub p99_us: f64,
}

/// The end of a driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unbound {
    /// Whether the drive said that it had shut down; null without a driver.
    pub shut_down: Option<bool>,
    /// How long clearing bus-master enable took, microseconds.
    pub bme_off_us: u64,
}
