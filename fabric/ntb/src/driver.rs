//! The interface of a userspace driver for one kind of NTB endpoint.
//!
//! docs/ntb-adapters.md describes the requirements of other adapters.

use std::sync::Arc;
use std::time::Duration;

use farside_fabric::{LutRange, NtbLimits, PeerAddress, VmShare};

use crate::NtbError;

/// Sizes of one port of an NTB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Number of the window BAR.
    pub window_bar: u8,
    /// Bytes of that BAR; a power of two.
    pub window_size: u64,
    /// Entries of the LUT, which cuts that BAR into segments; a power of two.
    pub lut_entries: u32,
    /// Alignment of the peer address in a LUT entry, in bytes; a power of two. At most a segment if
    /// windows have several entries.
    pub address_alignment: u64,
    /// Maximum number of LUT entries of a window; `None` if unlimited.
    pub entries_per_window: Option<u32>,
    /// Entries of the requester table.
    pub requester_entries: u32,
    /// Number of doorbells that this port can raise at its peer.
    pub doorbells: u32,
    /// Scratchpads of 32 bits.
    pub scratchpads: u32,
    /// Maximum time of [`NtbDriver::set_window`] or [`NtbDriver::clear_window`]. If longer than
    /// some milliseconds, windows must be planned once and not changed while a guest waits.
    pub remap_time: Duration,
}

impl Capabilities {
    /// Bytes that one LUT entry translates.
    pub fn segment(&self) -> u64 {
        self.window_size / u64::from(self.lut_entries.max(1))
    }

    /// The fabric's limits, with `reserved_requesters` of the requester entries used by CPUs.
    pub fn limits(&self, reserved_requesters: u32, per_vm: VmShare) -> NtbLimits {
        NtbLimits {
            bar_size: self.window_size,
            lut_entries: self.lut_entries,
            alignment: Some(self.address_alignment),
            entries_per_window: self.entries_per_window,
            requester_entries: self.requester_entries,
            reserved_requesters,
            per_vm,
        }
    }
}

/// Sizes of the peer port, at the peer host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCapabilities {
    /// Bytes of its window BAR.
    pub window_size: u64,
    /// Entries of its LUT.
    pub lut_entries: u32,
    /// Alignment of peer addresses in its LUT, which are in the domain of *this* host's endpoint,
    /// in bytes.
    pub address_alignment: u64,
}

impl PeerCapabilities {
    /// Bytes that one of its LUT entries translates.
    pub fn segment(&self) -> u64 {
        self.window_size / u64::from(self.lut_entries.max(1))
    }
}

/// How far the link has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkState {
    /// Both sides enable it.
    pub up: bool,
    /// The peer port's host is running.
    pub peer_present: bool,
    /// A driver at the peer enables the link.
    pub peer_enabled: bool,
    /// The peer port may master its bus, so writes to a window reach the peer host.
    pub peer_bus_master: bool,
}

impl LinkState {
    /// Whether windows are usable.
    pub fn usable(&self) -> bool {
        self.up && self.peer_bus_master
    }
}

/// Events since the last call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// The link status changed: read it again.
    pub link: bool,
    /// Accesses through this port's window were refused by the NTB.
    pub refused: Option<Refused>,
}

impl Events {
    /// Adds later events.
    pub(crate) fn merge(&mut self, later: Events) {
        self.link |= later.link;
        if let Some(later) = later.refused {
            let before = self.refused.as_ref().map_or(0, |before| before.count);
            let count = before.saturating_add(later.count);
            self.refused = Some(Refused { count, ..later });
        }
    }
}

/// Accesses that the NTB refused. A write was dropped; a read returned all ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Their number, since the last call.
    pub count: u32,
    /// Whether the last one was a write.
    pub write: bool,
    /// Offset of the last one in the window BAR, in bytes.
    pub offset: u64,
    /// Its peer address; 0 when it was not translated.
    pub peer_address: PeerAddress,
    /// The reason, for display.
    pub reason: String,
}

/// A driver of one port of an NTB, in userspace.
///
/// Translation is *outbound*: LUT entry `i` holds the address at the peer host of segment `i` of
/// this port's own window BAR. If hardware translates at the peer port, the driver forwards the
/// request to it.
///
/// Callers allocate entries in [`farside_fabric::NtbTables`], so a driver does not track them.
pub trait NtbDriver: Send {
    /// This port's sizes.
    fn capabilities(&self) -> &Capabilities;

    /// The peer port's sizes; `None` if unknown because the link is down.
    fn peer(&self) -> Option<PeerCapabilities>;

    /// How far the link has come.
    fn link(&self) -> LinkState;

    /// Enables the link at this port. When it comes up depends on the peer, and raises an event.
    ///
    /// # Errors
    /// What the hardware reports.
    fn enable_link(&mut self) -> Result<(), NtbError>;

    /// Takes the link down.
    fn disable_link(&mut self);

    /// Clears the LUT and the requester table, including entries of a former driver.
    ///
    /// # Errors
    /// What the hardware reports.
    fn clear_tables(&mut self) -> Result<(), NtbError>;

    /// Programs consecutive LUT entries to translate to consecutive segments from peer address
    /// `peer_address` on, in one batch if batches are slow. Effective on return; after an error,
    /// none of the entries is valid.
    ///
    /// # Errors
    /// What the hardware reports.
    fn set_window(&mut self, entries: LutRange, peer_address: PeerAddress) -> Result<(), NtbError>;

    /// Clears LUT entries. After `Ok`, no new access passes through them.
    ///
    /// # Errors
    /// What the hardware reports.
    fn clear_window(&mut self, entries: LutRange) -> Result<(), NtbError>;

    /// Lets a requester (bus, device, function) use this port's window.
    ///
    /// # Errors
    /// [`NtbError::RequesterTable`] when the table is full.
    fn add_requester(&mut self, requester: u16) -> Result<(), NtbError>;

    /// Removes a requester. One that was added twice is removed once.
    ///
    /// # Errors
    /// What the hardware reports.
    fn remove_requester(&mut self, requester: u16) -> Result<(), NtbError>;

    /// MSI-X vector of events.
    fn event_vector(&self) -> u16;

    /// Lets events raise [`NtbDriver::event_vector`].
    fn enable_events(&mut self);

    /// Takes pending events; later ones raise the vector again.
    fn take_events(&mut self) -> Events;

    /// Returns an object that flushes posted writes to the peer host.
    fn flush(&self) -> Arc<dyn Flush>;
}

/// Flushes posted writes through a window, without the driver's lock: called for every relayed
/// interrupt.
pub trait Flush: Send + Sync {
    /// Returns when all earlier device writes through the window BAR are visible at the peer host.
    /// `offset` is in an open window that is backed by memory, in bytes, a multiple of 4.
    fn flush(&self, offset: u64);
}
