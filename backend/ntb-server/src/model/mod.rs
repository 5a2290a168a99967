//! A PCIe non-transparent bridge (NTB): two endpoints, the ports, each in a host of its
//! own. A store to the window BAR of one port becomes a store by the other port, at the
//! address in the translation table.
//!
//! Registers: [`farside_ntb::regs`].
//!
//! Requester ids are not modelled: hardware uses the requester id of each access to
//! route its completion back, so each requester needs a table entry. In the model an
//! access has no requester id, and any valid entry suffices.

mod bar0;
mod config;
mod host_access;
mod pci;
mod port;
#[cfg(test)]
mod tests;
mod window;

use std::ops::{Index, IndexMut};

pub use config::{ConfigError, PortConfig};
use farside_ntb::regs::{self, REGISTERS_BAR, REGISTERS_SIZE, WINDOW_BAR};
use farside_pci::Description;
pub use host_access::{HostAccess, PeerError, Target};
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

/// Progress of a read, through a window or at the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a read that is not done must be completed later"]
pub enum Read {
    /// The data is complete.
    Done,
    /// The peer's data is passed to [`Ntb::complete_read`], which returns that of the
    /// whole read. Until then the port accepts no other read.
    Later,
}

/// An NTB: both ports. Pure state; its owner calls it for BAR accesses and events at
/// the ports, and implements [`Far`].
#[derive(Debug)]
pub struct Ntb {
    ports: Ports,
}

impl Ntb {
    /// An NTB after power-on, with no host at either port.
    ///
    /// # Errors
    ///
    /// Fails if the sizes of a port are invalid.
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

    /// The PCI function that a port presents.
    pub fn description(&self, port: Port) -> &Description {
        &self.ports[port].description
    }

    /// Reads `data.len()` bytes at `offset` of a BAR; any length and alignment.
    /// A read outside the BAR returns all ones.
    pub fn read(
        &mut self,
        port: Port,
        bar: u8,
        offset: u64,
        data: &mut [u8],
        hosts: &mut dyn HostAccess,
    ) -> Read {
        if !self.is_inside(port, bar, offset, data.len()) {
            data.fill(0xff);
            return Read::Done;
        }
        if bar == WINDOW_BAR {
            return self.window_read(port, offset, data, hosts);
        }
        self.registers_read(port, offset, data, hosts);
        Read::Done
    }

    /// Writes `data` at `offset` of a BAR; any length and alignment. A write outside
    /// the BAR is ignored.
    pub fn write(
        &mut self,
        port: Port,
        bar: u8,
        offset: u64,
        data: &[u8],
        hosts: &mut dyn HostAccess,
    ) {
        if !self.is_inside(port, bar, offset, data.len()) {
            return;
        }
        if bar == WINDOW_BAR {
            self.window_write(port, offset, data, hosts);
        } else {
            self.registers_write(port, offset, data, hosts);
        }
    }

    /// A host was connected to a port, or disconnected.
    pub fn set_present(&mut self, port: Port, present: bool, hosts: &mut dyn HostAccess) {
        self.ports[port].present = present;
        self.update_link(hosts);
    }

    /// Bus-master enable of a port's command register changed.
    pub fn set_bus_master(&mut self, port: Port, enabled: bool, hosts: &mut dyn HostAccess) {
        if self.ports[port].bus_master != enabled {
            self.ports[port].bus_master = enabled;
            self.update_link(hosts);
        }
    }

    /// Resets a port (conventional or function-level reset). Its host stays connected;
    /// the owner clears bus-master enable.
    pub fn reset(&mut self, port: Port, hosts: &mut dyn HostAccess) {
        self.ports[port].reset();
        self.update_link(hosts);
        // A port gets no event for its own reset.
        self.ports[port].registers.event_status = 0;
    }

    /// Counters for log lines, by name.
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

/// Both ports, indexed by [`Port`].
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
