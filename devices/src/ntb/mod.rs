//! A PCIe non-transparent bridge (NTB): two endpoints, the ports, each in
//! another host. A store to the window BAR of one port becomes a store by the
//! other port, at an address that a table says.
//!
//! PCI ids: vendor [`VENDOR_ID`](registers::VENDOR_ID), device
//! [`DEVICE_ID`](registers::DEVICE_ID) (not assigned by the PCI-SIG), class
//! 06 80 00, header type 0, PCIe endpoint with function-level reset, MSI-X with
//! 33 vectors. Offsets, bits and limits are constants of [`registers`].
//!
//! # BAR 0: 64 KiB, 32-bit, not prefetchable
//!
//! | offset | what |
//! | --- | --- |
//! | 0x0000 | control registers, below |
//! | 0x1000 | requester table: `COUNTS.requesters` entries of 32 bits: RID in 15:0, valid in 31 |
//! | 0x4000 | MSI-X table, 33 entries: doorbell n is vector n, events are vector 32 |
//! | 0x5000 | MSI-X pending bits |
//! | 0x8000 | LUT: 2^`CAPS.lut_shift` entries of 64 bits: far address in 63:12, valid in 0 |
//!
//! Little-endian; naturally aligned accesses of 4 bytes, and of 8 bytes to two
//! neighbours at once. A 64-bit register may be accessed by halves: of a LUT
//! entry write the upper half first, because the lower one has the valid bit.
//! What is not listed reads as zero and ignores writes.
//!
//! | offset | name | bits | access | reset | meaning |
//! | --- | --- | --- | --- | --- | --- |
//! | 0x00 | `ID` | 32 | RO | | "FSNT" |
//! | 0x04 | `VERSION` | 32 | RO | | 1 |
//! | 0x08 | `CAPS` | 32 | RO | | log2 of: window BAR bytes 7:0, LUT entries 15:8, far address alignment 23:16 |
//! | 0x0c | `COUNTS` | 32 | RO | | doorbells 7:0, scratchpads 15:8, requester entries 31:16 |
//! | 0x10 | `PEER_CAPS` | 32 | RO | | `CAPS` of the peer port |
//! | 0x14 | `PORT` | 32 | RO | | 0 or 1 |
//! | 0x18 | `LINK_CONTROL` | 32 | RW | 0 | 0: enable |
//! | 0x1c | `LINK_STATUS` | 32 | RO | | 0: up; 1: peer present; 2: peer enabled; 3: peer is bus master |
//! | 0x20 | `DOORBELL_SET_PEER` | 32 | W1S | | raises doorbells at the peer |
//! | 0x24 | `DOORBELL_STATUS` | 32 | RW1C | 0 | doorbells raised by the peer |
//! | 0x28 | `DOORBELL_MASK` | 32 | RW | ones | doorbells that raise no vector |
//! | 0x30 | `EVENT_STATUS` | 32 | RW1C | 0 | 0: link status changed; 1: access refused |
//! | 0x34 | `EVENT_MASK` | 32 | RW | ones | events that raise no vector |
//! | 0x38 | `ERROR_COUNT` | 32 | RO, write clears | 0 | accesses through this window refused |
//! | 0x3c | `ERROR_INFO` | 32 | RO | 0 | the last one: reason 7:0, write 8 |
//! | 0x40 | `ERROR_OFFSET` | 64 | RO | 0 | its offset in the window BAR |
//! | 0x48 | `ERROR_ADDRESS` | 64 | RO | 0 | its far address, 0 if not translated |
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
//! An access is refused, which is to say that reads return all ones and writes
//! are dropped, unless: the link is up; the LUT entry is valid; at least one
//! entry of this port's requester table is valid; the peer is bus master;
//! something is mapped at the far address. Refusals are counted and are an
//! event at this port.
//!
//! Part of what hardware does is not modelled: an NTB takes the requester id of
//! each access to find the way of its completion back, so each requester needs
//! an entry. Here an access has no requester id, and any valid entry will do.

pub mod registers;
