//! Two hosts with little memory, and a record of accesses to them.

use std::collections::BTreeMap;

use super::super::{
    HostAccess, Ntb, PeerError, Port, PortConfig, Read, Target,
    regs::{
        REGISTERS_BAR, WINDOW_BAR, error, link_control, lut, lut_entry, reg, requester,
        requester_entry,
    },
};

/// A host's memory: whole pages, by address.
#[derive(Default)]
pub struct Hosts {
    memory: [BTreeMap<u64, Vec<u8>>; 2],
    /// Pages whose reads complete later.
    slow: Vec<(Port, u64)>,
    /// The outstanding read of such a page.
    pub asked: Option<(Target, usize)>,
    /// Vectors raised, in order.
    pub raised: Vec<(Port, u16)>,
    pub pending: Vec<(Port, u16)>,
}

const PAGE: u64 = 4096;

impl Hosts {
    pub fn add_page(&mut self, port: Port, address: u64) {
        assert_eq!(address % PAGE, 0);
        self.memory[port as usize].insert(address, vec![0; PAGE as usize]);
    }

    /// A page of device registers.
    pub fn add_slow_page(&mut self, port: Port, address: u64) {
        self.slow.push((port, address));
    }

    pub fn bytes(&mut self, port: Port, address: u64, len: usize) -> Option<&mut [u8]> {
        let page = self.memory[port as usize].get_mut(&(address & !(PAGE - 1)))?;
        let at = (address % PAGE) as usize;
        Some(&mut page[at..at + len])
    }

    /// Vectors raised since the last call.
    pub fn take_raised(&mut self) -> Vec<(Port, u16)> {
        std::mem::take(&mut self.raised)
    }
}

impl HostAccess for Hosts {
    fn memory_read(&mut self, at: Target, data: &mut [u8]) -> Result<Read, PeerError> {
        assert!(at.address.offset_in(PAGE) + data.len() as u64 <= PAGE);
        let port = at.from.peer();
        if self.slow.contains(&(port, at.address.get() & !(PAGE - 1))) {
            assert_eq!(self.asked.replace((at, data.len())), None);
            return Ok(Read::Later);
        }
        let bytes = self.bytes(port, at.address.get(), data.len());
        data.copy_from_slice(bytes.ok_or(PeerError::Refused)?);
        Ok(Read::Done)
    }

    fn memory_write(&mut self, at: Target, data: &[u8]) -> Result<(), PeerError> {
        assert!(at.address.offset_in(PAGE) + data.len() as u64 <= PAGE);
        let bytes = self.bytes(at.from.peer(), at.address.get(), data.len());
        bytes.ok_or(PeerError::Refused)?.copy_from_slice(data);
        Ok(())
    }

    fn raise(&mut self, port: Port, vector: u16) {
        self.raised.push((port, vector));
    }

    fn is_pending(&self, port: Port, vector: u16) -> bool {
        self.pending.contains(&(port, vector))
    }
}

/// An NTB between them.
pub struct World {
    pub ntb: Ntb,
    pub hosts: Hosts,
}

/// 1 MiB of 16 segments.
pub const SMALL: PortConfig = PortConfig {
    window_size: 1 << 20,
    lut_entries: 16,
};

/// Bytes of a segment of [`SMALL`].
pub const SEGMENT: u64 = 64 << 10;

impl World {
    /// No host connected.
    pub fn new() -> Self {
        Self {
            ntb: Ntb::new([SMALL; 2]).unwrap(),
            hosts: Hosts::default(),
        }
    }

    /// Both hosts connected; their drivers have set up all but the LUT.
    pub fn up() -> Self {
        let mut world = Self::new();
        for port in Port::BOTH {
            world.ntb.set_present(port, true, &mut world.hosts);
            world.ntb.set_bus_master(port, true, &mut world.hosts);
            world.set_up(port);
        }
        for port in Port::BOTH {
            world.put32(port, reg::EVENT_STATUS, !0);
        }
        world.hosts.take_raised();
        world
    }

    /// A driver's initialization.
    pub fn set_up(&mut self, port: Port) {
        self.put32(port, requester_entry(0), requester::VALID | 0x0100);
        self.put32(port, reg::LINK_CONTROL, link_control::ENABLE);
        self.put32(port, reg::EVENT_MASK, 0);
        self.put32(port, reg::DOORBELL_MASK, 0);
    }

    /// Translates a segment to `address`.
    pub fn lead(&mut self, port: Port, segment: u32, address: u64) {
        self.put64(port, lut_entry(segment), address | lut::VALID);
    }

    pub fn read_bar(&mut self, port: Port, bar: u8, offset: u64, len: usize) -> Option<Vec<u8>> {
        let mut data = vec![0xa5; len];
        match self.ntb.read(port, bar, offset, &mut data, &mut self.hosts) {
            Read::Done => Some(data),
            Read::Later => None,
        }
    }

    pub fn get32(&mut self, port: Port, offset: u64) -> u32 {
        let data = self.read_bar(port, REGISTERS_BAR, offset, 4).unwrap();
        u32::from_le_bytes(data.try_into().unwrap())
    }

    pub fn get64(&mut self, port: Port, offset: u64) -> u64 {
        let data = self.read_bar(port, REGISTERS_BAR, offset, 8).unwrap();
        u64::from_le_bytes(data.try_into().unwrap())
    }

    pub fn put(&mut self, port: Port, offset: u64, data: &[u8]) {
        self.ntb
            .write(port, REGISTERS_BAR, offset, data, &mut self.hosts);
    }

    pub fn put32(&mut self, port: Port, offset: u64, value: u32) {
        self.put(port, offset, &value.to_le_bytes());
    }

    pub fn put64(&mut self, port: Port, offset: u64, value: u64) {
        self.put(port, offset, &value.to_le_bytes());
    }

    pub fn store(&mut self, port: Port, offset: u64, data: &[u8]) {
        self.ntb
            .write(port, WINDOW_BAR, offset, data, &mut self.hosts);
    }

    /// `None` if the read is outstanding.
    pub fn load(&mut self, port: Port, offset: u64, len: usize) -> Option<Vec<u8>> {
        self.read_bar(port, WINDOW_BAR, offset, len)
    }

    /// The peer replies. Returns the data once the read is complete.
    pub fn answer(&mut self, port: Port, answer: Result<&[u8], PeerError>) -> Option<Vec<u8>> {
        let read = self.ntb.complete_read(port, answer, &mut self.hosts);
        read.map(<[u8]>::to_vec)
    }

    /// Checks that `count` accesses were refused, the last of them for this reason.
    #[track_caller]
    pub fn assert_refused(&mut self, port: Port, count: u32, reason: u32, write: bool) {
        assert_eq!(self.get32(port, reg::ERROR_COUNT), count);
        let info = reason | if write { error::WRITE } else { 0 };
        assert_eq!(self.get32(port, reg::ERROR_INFO), info);
    }
}
