//! What a userspace driver of one kind of NTB endpoint gives.
//!
//! docs/ntb-adapters.md describes the requirements of other adapters.

use std::sync::Arc;
use std::time::Duration;

use farside_fabric::{FarAddress, LutRange, NtbLimits};

use crate::NtbError;

/// Sizes of one port of an NTB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Number of the BAR that the windows are in.
    pub window_bar: u8,
    /// Bytes of that BAR; a power of two.
    pub window_size: u64,
    /// Entries of the LUT, which cuts that BAR into segments; a power of two.
    pub lut_entries: u32,
    /// What the peer address in a LUT entry must be a multiple of, bytes; a power
    /// of two. At most a segment where windows have several entries.
    pub far_alignment: u64,
    /// Most LUT entries that one window may take; `None` when all.
    pub entries_per_window: Option<u32>,
    /// Entries of the requester table.
    pub requester_entries: u32,
    /// Doorbells that this port can raise at its peer.
    pub doorbells: u32,
    /// Scratchpads of 32 bits.
    pub scratchpads: u32,
    /// How long one [`NtbDriver::set_window`] or
    /// [`NtbDriver::clear_window`] takes at most. Longer than some
    /// milliseconds, windows must be planned once and not changed while a
    /// guest waits.
    pub remap_time: Duration,
}

impl Capabilities {
    /// Bytes that one LUT entry translates.
    pub fn segment(&self) -> u64 {
        self.window_size / u64::from(self.lut_entries.max(1))
    }

    /// As the fabric's limits, when CPUs take `reserved_requesters` of the
    /// requester entries.
    pub fn limits(&self, reserved_requesters: u32) -> NtbLimits {
        NtbLimits {
            bar_size: self.window_size,
            lut_entries: self.lut_entries,
            alignment: Some(self.far_alignment),
            entries_per_window: self.entries_per_window,
            requester_entries: self.requester_entries,
            reserved_requesters,
        }
    }
}

/// Sizes of the peer port, which is the other host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCapabilities {
    /// Bytes of its window BAR.
    pub window_size: u64,
    /// Entries of its LUT.
    pub lut_entries: u32,
    /// What peer addresses in its LUT, which are in *this* host's endpoint's
    /// domain, must be a multiple of, bytes.
    pub far_alignment: u64,
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
    /// The peer port is in a host that runs.
    pub peer_present: bool,
    /// A driver at the peer enables the link.
    pub peer_enabled: bool,
    /// The peer port may master its bus, so what is written to a window is
    /// written at the other host.
    pub peer_bus_master: bool,
}

impl LinkState {
    /// Whether a window reaches the other host.
    pub fn usable(&self) -> bool {
        self.up && self.peer_bus_master
    }
}

/// What happened since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// The link's state changed: ask for it.
    pub link: bool,
    /// Accesses through this port's window were refused by the NTB.
    pub refused: Option<Refused>,
}

impl Events {
    /// Adds what happened later.
    pub(crate) fn merge(&mut self, later: Events) {
        self.link |= later.link;
        if let Some(later) = later.refused {
            let before = self.refused.as_ref().map_or(0, |before| before.count);
            let count = before.saturating_add(later.count);
            self.refused = Some(Refused { count, ..later });
        }
    }
}

/// Accesses that the NTB refused. A write was dropped; a read gave all ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// How many, since the last look.
    pub count: u32,
    /// Whether the last one was a write.
    pub write: bool,
    /// Where in the window BAR the last one began, bytes.
    pub offset: u64,
    /// Its peer address; 0 when it was not translated.
    pub far: u64,
    /// Why it was refused, in words.
    pub reason: String,
}

/// A driver of one port of an NTB, in userspace.
///
/// Translation is *outbound*: LUT entry `i` gives where segment `i` of this port's
/// own window BAR leads in the other host. Where hardware translates at the other
/// port, its driver passes the request there.
///
/// Whoever holds a driver has taken the entries that it names
/// ([`farside_fabric::NtbTables`]), so that a driver keeps no books.
pub trait NtbDriver: Send {
    /// This port's sizes.
    fn capabilities(&self) -> &Capabilities;

    /// The peer port's sizes; `None` where they cannot be known while the link
    /// is down.
    fn peer(&self) -> Option<PeerCapabilities>;

    /// How far the link has come.
    fn link(&self) -> LinkState;

    /// Makes this side want the link. Whether it comes up is the peer's to
    /// say, and an event.
    ///
    /// # Errors
    /// What the hardware reports.
    fn enable_link(&mut self) -> Result<(), NtbError>;

    /// Takes the link down.
    fn disable_link(&mut self);

    /// Clears the LUT and the requester table, whatever a former driver left.
    ///
    /// # Errors
    /// What the hardware reports.
    fn clear_tables(&mut self) -> Result<(), NtbError>;

    /// Makes consecutive LUT entries lead to consecutive segments of the peer side,
    /// from `far` on. All of them in one batch, where a batch is what takes long.
    /// Done when it returns; after an error, none of them leads anywhere.
    ///
    /// # Errors
    /// What the hardware reports.
    fn set_window(&mut self, entries: LutRange, far: FarAddress) -> Result<(), NtbError>;

    /// Makes LUT entries lead nowhere. When it has returned `Ok`, no new access
    /// goes through them.
    ///
    /// # Errors
    /// What the hardware reports.
    fn clear_window(&mut self, entries: LutRange) -> Result<(), NtbError>;

    /// Lets a requester (bus, device, function) use this port's window.
    ///
    /// # Errors
    /// [`NtbError::RequesterTable`] when the table is full.
    fn add_requester(&mut self, requester: u16) -> Result<(), NtbError>;

    /// Ends that. A requester that was added twice is removed once.
    ///
    /// # Errors
    /// What the hardware reports.
    fn remove_requester(&mut self, requester: u16) -> Result<(), NtbError>;

    /// Raises a doorbell at the peer; below [`Capabilities::doorbells`].
    fn ring_doorbell(&mut self, doorbell: u32);

    /// Doorbells that the peer raised since the last call, a bit each.
    fn take_doorbells(&mut self) -> u64;

    /// Which doorbells of this port raise their vectors, a bit each.
    fn unmask_doorbells(&mut self, doorbells: u64);

    /// This port's scratchpad `index`, below [`Capabilities::scratchpads`].
    fn scratchpad(&self, index: u32) -> u32;

    /// Writes this port's scratchpad.
    fn set_scratchpad(&mut self, index: u32, value: u32);

    /// The peer's scratchpad `index`; all ones while the link is down.
    fn peer_scratchpad(&self, index: u32) -> u32;

    /// Writes the peer's scratchpad, as far as the link is up.
    fn set_peer_scratchpad(&mut self, index: u32, value: u32);

    /// MSI-X vector of `doorbell`.
    fn doorbell_vector(&self, doorbell: u32) -> u16;

    /// MSI-X vector of events.
    fn event_vector(&self) -> u16;

    /// Lets events raise [`NtbDriver::event_vector`].
    fn enable_events(&mut self);

    /// Takes what has happened; the vector is raised again for what happens
    /// from then on.
    fn take_events(&mut self) -> Events;

    /// What pushes posted writes to the other host.
    fn flush(&self) -> Arc<dyn Flush>;
}

/// Pushes posted writes through a window, without the driver's lock: it is
/// done for every interrupt that is relayed.
pub trait Flush: Send + Sync {
    /// Returns when everything that devices wrote through the window BAR
    /// before is visible at the other host. `offset` is somewhere in an open
    /// window with memory behind it, bytes, a multiple of 4.
    fn flush(&self, offset: u64);
}
