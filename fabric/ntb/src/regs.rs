//! Register set of farside's NTB endpoint: PCI ids, BARs, offsets, bits and limits, for drivers.
//! Registers are little-endian.
//!
//! PCI ids: vendor [`VENDOR_ID`], device [`DEVICE_ID`] (not assigned by the
//! PCI-SIG), class 06 80 00, header type 0, PCIe endpoint with function-level
//! reset, MSI-X with 33 vectors.
//!
//! # BAR 0: 64 KiB, 32-bit, not prefetchable
//!
//! | offset | what |
//! | --- | --- |
//! | 0x0000 | control registers, below |
//! | 0x1000 | requester table: `COUNTS.requesters` entries of 32 bits: RID in 15:0, valid in 31 |
//! | 0x4000 | MSI-X table, 33 entries: doorbell n is vector n, events are vector 32 |
//! | 0x5000 | MSI-X pending bits |
//! | 0x8000 | LUT: 2^`CAPS.lut_shift` entries of 64 bits: peer address in 63:12, valid in 0 |
//!
//! Little-endian; naturally aligned accesses of 4 bytes, and of 8 bytes to two neighbours at once.
//! A 64-bit register may be accessed by halves: of a LUT entry write the upper half first, because
//! the lower one has the valid bit. Other offsets read as zero and ignore writes.
//!
//! | offset | name | bits | access | reset | meaning |
//! | --- | --- | --- | --- | --- | --- |
//! | 0x00 | `ID` | 32 | RO | | "FSNT" |
//! | 0x04 | `VERSION` | 32 | RO | | 1 |
//! | 0x08 | `CAPS` | 32 | RO | | log2 of: window BAR bytes 7:0, LUT entries 15:8, peer address alignment 23:16 |
//! | 0x0c | `COUNTS` | 32 | RO | | doorbells 7:0, scratchpads 15:8, requester entries 31:16 |
//! | 0x10 | `PEER_CAPS` | 32 | RO | | `CAPS` of the peer port |
//! | 0x14 | `PORT` | 32 | RO | | 0 or 1 |
//! | 0x18 | `LINK_CONTROL` | 32 | RW | 0 | 0: enable |
//! | 0x1c | `LINK_STATUS` | 32 | RO | | 0: up; 1: peer present; 2: peer enabled; 3: peer is bus master |
//! | 0x20 | `DOORBELL_SET_PEER` | 32 | W1S | | raises doorbells at the peer |
//! | 0x24 | `DOORBELL_STATUS` | 32 | RW1C | 0 | doorbells raised by the peer; each time one is raised its vector is, too |
//! | 0x28 | `DOORBELL_MASK` | 32 | RW | ones | doorbells that raise no vector until unmasked |
//! | 0x30 | `EVENT_STATUS` | 32 | RW1C | 0 | 0: link status changed; 1: access refused; a bit raises the vector when it goes from 0 to 1 |
//! | 0x34 | `EVENT_MASK` | 32 | RW | ones | events that raise no vector until unmasked |
//! | 0x38 | `ERROR_COUNT` | 32 | RO, write clears | 0 | accesses through this window refused |
//! | 0x3c | `ERROR_INFO` | 32 | RO | 0 | the last one: reason 7:0, write 8 |
//! | 0x40 | `ERROR_OFFSET` | 64 | RO | 0 | its offset in the window BAR |
//! | 0x48 | `ERROR_ADDRESS` | 64 | RO | 0 | its peer address, 0 if not translated |
//! | 0x50 | `WINDOW_WRITES` | 64 | RO | 0 | writes passed on |
//! | 0x58 | `WINDOW_READS` | 64 | RO | 0 | reads passed on |
//! | 0x80 | `SCRATCHPAD` | 16 × 32 | RW | 0 | own scratchpads, which the peer also writes |
//! | 0xc0 | `PEER_SCRATCHPAD` | 16 × 32 | RW | | the peer's; all ones while the link is down |
//!
//! # BAR 2: the window, 64-bit prefetchable
//!
//! As many segments of equal size as the LUT has entries. An access at offset
//! `o` of segment `i` becomes an access by the *peer* port, in the address
//! space in which the peer's DMA is translated (behind its host's IOMMU, if it
//! has one), at the address in LUT entry `i` plus `o`. This is *outbound*
//! translation: each port's LUT is for its own window.
//!
//! An access is refused, which means that reads return all ones and writes are dropped, unless: the
//! link is up; the LUT entry is valid; at least one entry of this port's requester table is valid;
//! the peer is bus master; the peer address is mapped. Refusals are counted and are an event at
//! this port.

/// PCI vendor id: unassigned.
pub const VENDOR_ID: u16 = 0xfa5d;
/// PCI device id.
pub const DEVICE_ID: u16 = 0xb41d;
/// PCI class code: bridge, other; as of other vendors' NTB endpoints. The header is of type 0.
pub const CLASS: u32 = 0x06_80_00;

/// Number of the BAR with registers, tables and MSI-X: 32-bit memory.
pub const REGISTERS_BAR: u8 = 0;
/// Bytes of that BAR.
pub const REGISTERS_SIZE: u64 = 64 << 10;
/// Number of the BAR with the windows: 64-bit prefetchable memory.
pub const WINDOW_BAR: u8 = 2;
/// Smallest window BAR, bytes.
pub const MIN_WINDOW_SIZE: u64 = 1 << 20;
/// Largest window BAR, bytes.
pub const MAX_WINDOW_SIZE: u64 = 1 << 40;
/// Bytes of the window BAR unless noted otherwise.
pub const DEFAULT_WINDOW_SIZE: u64 = 1 << 30;

/// Contents of [`reg::ID`]: "FSNT", first letter first.
pub const ID: u32 = u32::from_le_bytes(*b"FSNT");
/// Contents of [`reg::VERSION`].
pub const VERSION: u32 = 1;

/// Most LUT entries of a port.
pub const MAX_LUT_ENTRIES: u32 = 4096;
/// LUT entries of a port unless noted otherwise.
pub const DEFAULT_LUT_ENTRIES: u32 = 512;
/// log2 of the alignment of peer addresses in LUT entries: 4 KiB.
pub const ADDRESS_ALIGN_SHIFT: u32 = 12;
/// Doorbells of a port.
pub const DOORBELLS: u32 = 32;
/// Scratchpads of a port, of 32 bits each.
pub const SCRATCHPADS: u32 = 16;
/// Entries of a port's requester table.
pub const REQUESTERS: u32 = 32;

/// MSI-X vectors: one for each doorbell, by number, and [`EVENT_VECTOR`].
pub const VECTORS: u16 = DOORBELLS as u16 + 1;
/// The vector of the events in [`reg::EVENT_STATUS`].
pub const EVENT_VECTOR: u16 = DOORBELLS as u16;

/// Offset of the requester table in BAR 0: [`REQUESTERS`] entries of 32 bits.
pub const REQUESTER_TABLE: u64 = 0x1000;
/// Offset of the MSI-X table in BAR 0.
pub const MSIX_TABLE: u64 = 0x4000;
/// Offset of the MSI-X pending bits in BAR 0.
pub const MSIX_PBA: u64 = 0x5000;
/// Offset of the LUT in BAR 0: up to [`MAX_LUT_ENTRIES`] entries of 64 bits.
pub const LUT: u64 = 0x8000;

/// Offset in BAR 0 of LUT entry `index`.
pub const fn lut_entry(index: u32) -> u64 {
    LUT + 8 * index as u64
}

/// Offset in BAR 0 of requester entry `index`.
pub const fn requester_entry(index: u32) -> u64 {
    REQUESTER_TABLE + 4 * index as u64
}

/// Offset in BAR 0 of this port's scratchpad `index`.
pub const fn scratchpad(index: u32) -> u64 {
    reg::SCRATCHPAD + 4 * index as u64
}

/// Offset in BAR 0 of the peer port's scratchpad `index`.
pub const fn peer_scratchpad(index: u32) -> u64 {
    reg::PEER_SCRATCHPAD + 4 * index as u64
}

/// Offsets in BAR 0 of the control registers; of 32 bits unless noted otherwise.
pub mod reg {
    /// RO: [`ID`](super::ID).
    pub const ID: u64 = 0x00;
    /// RO: [`VERSION`](super::VERSION).
    pub const VERSION: u64 = 0x04;
    /// RO: sizes of this port, see [`caps`](super::caps).
    pub const CAPS: u64 = 0x08;
    /// RO: counts of this port, see [`counts`](super::counts).
    pub const COUNTS: u64 = 0x0c;
    /// RO: `CAPS` of the peer port, so that a driver can refuse a pair that
    /// differs.
    pub const PEER_CAPS: u64 = 0x10;
    /// RO: number of this port, 0 or 1.
    pub const PORT: u64 = 0x14;
    /// RW: see [`link_control`](super::link_control). 0 after a reset.
    pub const LINK_CONTROL: u64 = 0x18;
    /// RO: see [`link_status`](super::link_status).
    pub const LINK_STATUS: u64 = 0x1c;
    /// W1S, reads as 0: raises doorbells at the peer. Nothing happens while the
    /// link is down.
    pub const DOORBELL_SET_PEER: u64 = 0x20;
    /// RW1C: doorbells that the peer raised.
    pub const DOORBELL_STATUS: u64 = 0x24;
    /// RW: doorbells that raise no vector. All ones after a reset. A doorbell
    /// that is set while its mask is cleared raises its vector then.
    pub const DOORBELL_MASK: u64 = 0x28;
    /// RW1C: see [`event`](super::event).
    pub const EVENT_STATUS: u64 = 0x30;
    /// RW: events that raise no vector. All ones after a reset; works as
    /// `DOORBELL_MASK` does.
    pub const EVENT_MASK: u64 = 0x34;
    /// RO, a write of any value clears it: accesses through this port's window
    /// that were refused. Stays at all ones.
    pub const ERROR_COUNT: u64 = 0x38;
    /// RO: the last refused access, see [`error`](super::error).
    pub const ERROR_INFO: u64 = 0x3c;
    /// RO, 64 bits: its offset in this port's window BAR.
    pub const ERROR_OFFSET: u64 = 0x40;
    /// RO, 64 bits: its peer address; 0 when it was not translated.
    pub const ERROR_ADDRESS: u64 = 0x48;
    /// RO, 64 bits: writes through this port's window that were passed on,
    /// since its reset.
    pub const WINDOW_WRITES: u64 = 0x50;
    /// RO, 64 bits: reads likewise.
    pub const WINDOW_READS: u64 = 0x58;
    /// RW: this port's scratchpads, which the peer reads and writes too. 0 after
    /// a reset of this port.
    pub const SCRATCHPAD: u64 = 0x80;
    /// RW: the peer's scratchpads. All ones, and not writable, while the link is
    /// down.
    pub const PEER_SCRATCHPAD: u64 = 0xc0;
}

/// Fields of [`reg::CAPS`] and [`reg::PEER_CAPS`].
pub mod caps {
    /// log2 of the bytes of the window BAR.
    pub const fn window_shift(caps: u32) -> u32 {
        caps & 0xff
    }

    /// log2 of the number of LUT entries, which is the number of segments of
    /// the window BAR.
    pub const fn lut_shift(caps: u32) -> u32 {
        caps >> 8 & 0xff
    }

    /// log2 of the alignment, in bytes, of the peer address of a LUT entry.
    pub const fn address_align_shift(caps: u32) -> u32 {
        caps >> 16 & 0xff
    }

    /// The register's value. All three are log2.
    pub const fn pack(window_shift: u32, lut_shift: u32, address_align_shift: u32) -> u32 {
        window_shift | lut_shift << 8 | address_align_shift << 16
    }
}

/// Fields of [`reg::COUNTS`].
pub mod counts {
    /// Doorbells.
    pub const fn doorbells(counts: u32) -> u32 {
        counts & 0xff
    }

    /// Scratchpads.
    pub const fn scratchpads(counts: u32) -> u32 {
        counts >> 8 & 0xff
    }

    /// Entries of the requester table.
    pub const fn requesters(counts: u32) -> u32 {
        counts >> 16
    }

    /// The register's value.
    pub const fn pack(doorbells: u32, scratchpads: u32, requesters: u32) -> u32 {
        doorbells | scratchpads << 8 | requesters << 16
    }
}

/// Bits of [`reg::LINK_CONTROL`].
pub mod link_control {
    /// Enables the link at this port.
    pub const ENABLE: u32 = 1 << 0;
}

/// Bits of [`reg::LINK_STATUS`].
pub mod link_status {
    /// Both ports are present and both enable the link.
    pub const UP: u32 = 1 << 0;
    /// The peer port has a host (a VM is connected to it).
    pub const PEER_PRESENT: u32 = 1 << 1;
    /// The peer enables the link.
    pub const PEER_ENABLED: u32 = 1 << 2;
    /// The peer port may master its bus: bus-master enable is set in its
    /// command register. While it is not, accesses through this port's window
    /// are refused.
    pub const PEER_BUS_MASTER: u32 = 1 << 3;
}

/// Bits of [`reg::EVENT_STATUS`] and [`reg::EVENT_MASK`].
pub mod event {
    /// A bit of `LINK_STATUS` changed.
    pub const LINK: u32 = 1 << 0;
    /// An access through this port's window was refused.
    pub const ERROR: u32 = 1 << 1;
    /// All events.
    pub const ALL: u32 = LINK | ERROR;
}

/// Fields of [`reg::ERROR_INFO`].
pub mod error {
    /// Reason for the refusal: bits 7:0.
    pub const REASON: u32 = 0xff;
    /// It was a write.
    pub const WRITE: u32 = 1 << 8;

    /// The link is down.
    pub const LINK_DOWN: u32 = 1;
    /// The segment's LUT entry is not valid.
    pub const LUT_INVALID: u32 = 2;
    /// No entry of this port's requester table is valid.
    pub const NO_REQUESTER: u32 = 3;
    /// The peer port may not master its bus.
    pub const NOT_BUS_MASTER: u32 = 4;
    /// The peer address wraps around the end of the address space.
    pub const ADDRESS: u32 = 5;
    /// The peer address is unmapped, or its target refused the access.
    pub const PEER_REFUSED: u32 = 6;
    /// The target at the peer address did not answer in time.
    pub const TIMEOUT: u32 = 7;
    /// Too many accesses to devices at the peer are in flight.
    pub const BUSY: u32 = 8;
}

/// Fields of a LUT entry.
pub mod lut {
    /// The entry translates.
    pub const VALID: u64 = 1 << 0;
    /// Peer address of the segment's first byte. Bits 11:1 read as 0.
    pub const ADDRESS: u64 = !0xfff;
}

/// Fields of a requester table entry.
pub mod requester {
    /// The entry is valid.
    pub const VALID: u32 = 1 << 31;
    /// Requester id: bus, device, function. Bits 30:16 read as 0.
    pub const RID: u32 = 0xffff;
}
