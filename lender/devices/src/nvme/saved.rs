//! The snapshot: the part of a controller's state that registers other than doorbells, and admin commands change. See
//! [`Snapshot`] before changing it.

use serde::{Deserialize, Serialize};

use crate::state::{Kind, Snapshot};

/// The controller's state.
pub const STATE_KIND: Kind = Kind::new(*b"FARSNVME", "an NVMe controller");

/// Since version 1, where a field says nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    pub session: u32,
    pub cc: u32,
    pub ready: bool,
    pub fatal: bool,
    /// CSTS.SHST.
    pub shutdown: u8,
    pub aqa: u32,
    pub asq: u64,
    pub acq: u64,
    /// The controller is being disabled.
    pub draining: bool,
    pub features: SavedFeatures,
    /// Types of events that wait for their log to be read: errors, health. The others are `masked_notices` and `masked_reservations`.
    pub masked_events: [bool; 2],
    pub sqs: Vec<SavedSq>,
    pub cqs: Vec<SavedCq>,
    pub buffer: Option<SavedBuffer>,
    pub msix_table: Vec<u8>,
    pub answered: Option<Answered>,
    /// A flush has failed, which the kernel reports once.
    pub flush_failed: bool,
    /// CMBMSC. Since version 2.
    pub cmb_control: u64,
    /// Since version 2.
    pub host_identifier: u128,
    /// It has 128 bits. Since version 2.
    pub extended_identifier: bool,
    /// Since version 2.
    pub reservation_mask: u32,
    /// Bytes of the namespace. Since version 2.
    pub size: u64,
    /// The list of changed namespaces has it. Since version 2.
    pub namespace_changed: bool,
    /// Since version 2.
    pub masked_notices: bool,
    /// Since version 2.
    pub reservation_log: SavedReservationLog,
    /// Since version 2.
    pub masked_reservations: bool,
    /// The event of that log waits for a request. Since version 2.
    pub pending_reservations: bool,
}

impl Snapshot for Saved {
    const KIND: Kind = STATE_KIND;

    fn session(&mut self) -> &mut u32 {
        &mut self.session
    }

    fn answered(&self) -> Option<u64> {
        self.answered.map(|it| it.sequence)
    }
}

/// Features that are not at their defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedFeatures {
    pub arbitration: u32,
    pub over: u16,
    pub under: u16,
    pub error_recovery: u32,
    pub write_cache: bool,
    pub coalescing: u32,
    pub vectors_without_coalescing: [u64; 4],
    pub write_atomicity: u32,
    pub event_config: u32,
    /// Milliseconds as set by the host, and when that was, of the lender's host, in milliseconds since 1970.
    pub timestamp: Option<(u64, u64)>,
}

/// See [`ReservationLog`](crate::nvme::reservation_log::ReservationLog).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedReservationLog {
    pub upto: Option<u64>,
    pub count: u64,
    /// The count and type of each page.
    pub pages: Vec<(u64, u8)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSq {
    pub id: u16,
    pub base: u64,
    pub entries: u16,
    pub cq: u16,
    pub shadow: SavedShadow,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedCq {
    pub id: u16,
    pub base: u64,
    pub entries: u16,
    pub vector: Option<u16>,
    pub shadow: SavedShadow,
}

/// See [`Shadow`](crate::nvme::doorbells::Shadow).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedShadow {
    pub stale: Option<u32>,
    pub unwritten: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedBuffer {
    pub values: u64,
    pub events: u64,
    pub live: bool,
}

/// The result of the admin command whose entry has this sequence number: its completion may not be posted yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answered {
    pub sequence: u64,
    pub result: u32,
    pub status: u16,
}
