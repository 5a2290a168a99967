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
//! | 0x24 | `DOORBELL_STATUS` | 32 | RW1C | 0 | doorbells raised by the peer; each time one is raised its vector is, too |
//! | 0x28 | `DOORBELL_MASK` | 32 | RW | ones | doorbells that raise no vector until unmasked |
//! | 0x30 | `EVENT_STATUS` | 32 | RW1C | 0 | 0: link status changed; 1: access refused; a bit raises the vector when it goes from 0 to 1 |
//! | 0x34 | `EVENT_MASK` | 32 | RW | ones | events that raise no vector until unmasked |
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

mod bar0;
mod config;
mod far;
mod pci;
mod port;
pub mod registers;
#[cfg(test)]
mod tests;
mod window;

use std::ops::{Index, IndexMut};

pub use config::{ConfigError, PortConfig};
pub use far::{Far, FarError, FarRead, Target};
use farside_pci::Description;
use port::PortState;
use registers::{REGISTERS_BAR, REGISTERS_SIZE, WINDOW_BAR};

/// One of the two ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Port {
    /// Number 0.
    A,
    /// Number 1.
    B,
}

impl Port {
    /// Both, by number.
    pub const BOTH: [Self; 2] = [Self::A, Self::B];

    /// The other one.
    pub fn peer(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    /// 0 or 1.
    pub fn number(self) -> u32 {
        self as u32
    }
}

/// How far a read has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "data that is not there yet must be waited for"]
pub enum Read {
    /// The data is there.
    Done,
    /// [`Ntb::complete_read`] will have it. Until then the port takes no
    /// other read.
    Later,
}

/// An NTB: both ports. Pure state; its owner gives it accesses to BARs and
/// what happens to each port, and does what it asks for through [`Far`].
#[derive(Debug)]
pub struct Ntb {
    ports: Ports,
}

impl Ntb {
    /// An NTB after power-on, with nobody at either port.
    ///
    /// # Errors
    ///
    /// When a port cannot have such sizes.
    pub fn new(config: [PortConfig; 2]) -> Result<Self, ConfigError> {
        for port in &config {
            port.check()?;
        }
        let [a, b] = config;
        let mut ntb = Self {
            ports: Ports([PortState::new(0, a), PortState::new(1, b)]),
        };
        for port in Port::BOTH {
            ntb.ports[port].closed = ntb.closed(port);
        }
        Ok(ntb)
    }

    /// What a port looks like from outside.
    pub fn description(&self, port: Port) -> &Description {
        &self.ports[port].description
    }

    /// Reads `data.len()` bytes at `offset` of a BAR; any length and alignment.
    /// What is not in a BAR reads as all ones.
    pub fn read(
        &mut self,
        port: Port,
        bar: u8,
        offset: u64,
        data: &mut [u8],
        far: &mut dyn Far,
    ) -> Read {
        if !self.is_inside(port, bar, offset, data.len()) {
            data.fill(0xff);
            return Read::Done;
        }
        if bar == WINDOW_BAR {
            return self.window_read(port, offset, data, far);
        }
        self.registers_read(port, offset, data, far);
        Read::Done
    }

    /// Writes `data` at `offset` of a BAR; any length and alignment. What is
    /// not in a BAR ignores it.
    pub fn write(&mut self, port: Port, bar: u8, offset: u64, data: &[u8], far: &mut dyn Far) {
        if !self.is_inside(port, bar, offset, data.len()) {
            return;
        }
        if bar == WINDOW_BAR {
            self.window_write(port, offset, data, far);
        } else {
            self.registers_write(port, offset, data, far);
        }
    }

    /// A host came to a port, or went.
    pub fn set_present(&mut self, port: Port, present: bool, far: &mut dyn Far) {
        self.ports[port].present = present;
        self.settle(far);
    }

    /// Bus-master enable of a port's command register changed.
    pub fn set_bus_master(&mut self, port: Port, enabled: bool, far: &mut dyn Far) {
        if self.ports[port].bus_master != enabled {
            self.ports[port].bus_master = enabled;
            self.settle(far);
        }
    }

    /// Puts a port in its state after power-on: conventional or function-level
    /// reset. Its host stays; bus-master enable is the owner's to clear.
    pub fn reset(&mut self, port: Port, far: &mut dyn Far) {
        self.ports[port].reset();
        self.settle(far);
        // That its own registers changed is no news to a port that was reset.
        self.ports[port].registers.event_status = 0;
    }

    /// Counters for people, by name.
    pub fn stats(&self, port: Port) -> [(&'static str, u64); 3] {
        let r = &self.ports[port].registers;
        [
            ("window writes", r.window_writes),
            ("window reads", r.window_reads),
            ("refused", r.error_count.into()),
        ]
    }

    fn is_inside(&self, port: Port, bar: u8, offset: u64, len: usize) -> bool {
        let size = match bar {
            REGISTERS_BAR => REGISTERS_SIZE,
            WINDOW_BAR => self.ports[port].config.window_size,
            _ => 0,
        };
        let end = offset.checked_add(len as u64);
        end.is_some_and(|end| end <= size)
    }
}

/// Both ports, by name.
#[derive(Debug)]
struct Ports([PortState; 2]);

impl Index<Port> for Ports {
    type Output = PortState;

    fn index(&self, port: Port) -> &PortState {
        &self.0[port as usize]
    }
}

impl IndexMut<Port> for Ports {
    fn index_mut(&mut self, port: Port) -> &mut PortState {
        &mut self.0[port as usize]
    }
}
