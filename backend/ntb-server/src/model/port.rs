//! State of one port.

use super::{
    config::PortConfig,
    pci,
    regs::{
        REQUESTERS, SCRATCHPADS, VECTORS, error, event, link_control, lut as lut_bits, requester,
    },
    window::PendingRead,
};
use farside_fabric::PeerAddress;
use farside_pci::Description;

/// Bytes of the MSI-X table.
pub(super) const MSIX_TABLE_SIZE: usize = VECTORS as usize * 16;

/// State of a port: sizes, inputs, registers.
#[derive(Debug)]
pub(super) struct PortState {
    pub(super) config: PortConfig,
    pub(super) description: Description,
    /// Whether a host is connected.
    pub(super) present: bool,
    /// Bus-master enable of this port's command register.
    pub(super) bus_master: bool,
    /// The reason to refuse all accesses through this window, or 0. Derived from the
    /// state of both ports.
    pub(super) closed: u32,
    /// The current `LINK_STATUS`. Derived from the state of both ports.
    pub(super) link_status: u32,
    pub(super) registers: Registers,
    /// Peer addresses by segment.
    pub(super) lut: Box<[u64]>,
    pub(super) msix_table: Box<[u8]>,
    /// A read through this window that waits for the peer.
    pub(super) pending: Option<PendingRead>,
    /// Data of the last such read.
    pub(super) finished: Vec<u8>,
}

/// The registers that a reset initializes, without the tables.
#[derive(Debug)]
pub(super) struct Registers {
    pub(super) link_control: u32,
    pub(super) doorbell_status: u32,
    pub(super) doorbell_mask: u32,
    pub(super) event_status: u32,
    pub(super) event_mask: u32,
    pub(super) error_count: u32,
    pub(super) error_info: u32,
    pub(super) error_offset: u64,
    pub(super) error_address: u64,
    pub(super) window_writes: u64,
    pub(super) window_reads: u64,
    pub(super) scratchpads: [u32; SCRATCHPADS as usize],
    pub(super) requesters: [u32; REQUESTERS as usize],
}

impl Default for Registers {
    fn default() -> Self {
        Self {
            link_control: 0,
            doorbell_status: 0,
            doorbell_mask: !0,
            event_status: 0,
            event_mask: event::ALL,
            error_count: 0,
            error_info: 0,
            error_offset: 0,
            error_address: 0,
            window_writes: 0,
            window_reads: 0,
            scratchpads: [0; SCRATCHPADS as usize],
            requesters: [0; REQUESTERS as usize],
        }
    }
}

impl PortState {
    pub(super) fn new(number: u32, config: PortConfig) -> Self {
        let mut port = Self {
            description: pci::description(number, &config),
            present: false,
            bus_master: false,
            closed: 0,
            link_status: 0,
            registers: Registers::default(),
            lut: vec![0; config.lut_entries as usize].into(),
            msix_table: vec![0; MSIX_TABLE_SIZE].into(),
            pending: None,
            finished: Vec::new(),
            config,
        };
        port.reset();
        port
    }

    /// Restores the power-on state, except for inputs: `present` and `bus_master`.
    pub(super) fn reset(&mut self) {
        self.registers = Registers::default();
        self.lut.fill(0);
        self.pending = None;
        // Vectors are masked after a reset (PCIe 7.7.2.8): bit 0 of the last
        // word of each entry.
        self.msix_table.fill(0);
        for entry in self.msix_table.chunks_exact_mut(16) {
            entry[12] = 1;
        }
    }

    pub(super) fn link_enabled(&self) -> bool {
        self.registers.link_control & link_control::ENABLE != 0
    }

    pub(super) fn has_requester(&self) -> bool {
        let entries = self.registers.requesters.iter();
        entries.copied().any(|entry| entry & requester::VALID != 0)
    }

    /// Translates an offset in the window to the peer address. The error is the reason
    /// code.
    pub(super) fn translate(&self, offset: u64) -> Result<PeerAddress, u32> {
        let shift = self.config.segment_shift();
        let entry = self.lut.get((offset >> shift) as usize).copied();
        let entry = entry
            .filter(|entry| entry & lut_bits::VALID != 0)
            .ok_or(error::LUT_INVALID)?;
        let inside = offset & ((1 << shift) - 1);
        PeerAddress::new(entry & lut_bits::ADDRESS)
            .checked_add(inside)
            .ok_or(error::ADDRESS)
    }
}
