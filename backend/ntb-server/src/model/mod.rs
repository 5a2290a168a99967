//! A PCIe non-transparent bridge (NTB): two endpoints, the ports, each in
//! another host. A store to the window BAR of one port becomes a store by the
//! other port, at an address that a table says.
//!
//! Registers and what they do: [`farside_ntb::regs`].
//!
//! Part of what hardware does is not modelled: an NTB takes the requester id of
//! each access to find the way of its completion back, so each requester needs
//! an entry. Here an access has no requester id, and any valid entry will do.

mod bar0;
mod config;
mod far;
mod pci;
mod port;
#[cfg(test)]
mod tests;
mod window;

use std::ops::{Index, IndexMut};

pub use config::{ConfigError, PortConfig};
pub use far::{Far, FarError, FarRead, Target};
use farside_ntb::regs::{self, REGISTERS_BAR, REGISTERS_SIZE, WINDOW_BAR};
use farside_pci::Description;
use port::PortState;

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
