//! Doorbells and scratchpads, which the fabric does not use.

use std::sync::Arc;

use farside_ntb::Registers;
use farside_ntb::regs::{peer_scratchpad, reg, scratchpad};

/// The registers of a port.
pub struct Messages(pub Arc<dyn Registers>);

#[allow(dead_code, reason = "the probe and the tests use different ones")]
impl Messages {
    /// Raises a doorbell at the peer.
    pub fn ring_doorbell(&self, doorbell: u32) {
        self.0.write32(reg::DOORBELL_SET_PEER, 1 << doorbell);
    }

    /// Doorbells that the peer raised since the last call, one bit each.
    pub fn take_doorbells(&self) -> u32 {
        let raised = self.0.read32(reg::DOORBELL_STATUS);
        self.0.write32(reg::DOORBELL_STATUS, raised);
        raised
    }

    /// Sets which doorbells of this port raise their vectors, one bit each.
    pub fn unmask_doorbells(&self, doorbells: u32) {
        self.0.write32(reg::DOORBELL_MASK, !doorbells);
    }

    /// This port's scratchpad.
    pub fn scratchpad(&self, index: u32) -> u32 {
        self.0.read32(scratchpad(index))
    }

    /// Writes this port's scratchpad.
    pub fn set_scratchpad(&self, index: u32, value: u32) {
        self.0.write32(scratchpad(index), value);
    }

    /// The peer's scratchpad; all ones while the link is down.
    pub fn peer_scratchpad(&self, index: u32) -> u32 {
        self.0.read32(peer_scratchpad(index))
    }

    /// Writes the peer's scratchpad, as far as the link is up.
    pub fn set_peer_scratchpad(&self, index: u32, value: u32) {
        self.0.write32(peer_scratchpad(index), value);
    }
}
