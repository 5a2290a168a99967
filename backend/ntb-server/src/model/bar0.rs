//! Registers and tables: BAR 0.

use super::{
    HostAccess, Ntb, Port,
    port::MSIX_TABLE_SIZE,
    regs::{
        DOORBELLS, EVENT_VECTOR, ID, LUT, MAX_LUT_ENTRIES, MSIX_PBA, MSIX_TABLE, REQUESTER_TABLE,
        REQUESTERS, SCRATCHPADS, VECTORS, VERSION, counts, event, link_control, link_status, lut,
        reg, requester,
    },
};

const MSIX_TABLE_END: u64 = MSIX_TABLE + MSIX_TABLE_SIZE as u64;
const MSIX_PBA_END: u64 = MSIX_PBA + (VECTORS as u64).div_ceil(64) * 8;
const REQUESTER_END: u64 = REQUESTER_TABLE + 4 * REQUESTERS as u64;
const LUT_END: u64 = LUT + 8 * MAX_LUT_ENTRIES as u64;
const SCRATCHPAD_END: u64 = reg::SCRATCHPAD + 4 * SCRATCHPADS as u64;
const PEER_SCRATCHPAD_END: u64 = reg::PEER_SCRATCHPAD + 4 * SCRATCHPADS as u64;

/// Splits an access of any alignment into words: index of the part's first byte, bytes,
/// offset of the word, first byte in the word.
fn words(offset: u64, len: usize) -> impl Iterator<Item = (usize, usize, u64, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        let first = (at % 4) as usize;
        let count = (4 - first).min(len - done);
        let word = (done, count, at - first as u64, first);
        done += count;
        (count != 0).then_some(word)
    })
}

/// Half of a 64-bit register: the word at `offset`.
fn half(value: u64, offset: u64) -> u32 {
    (value >> (8 * (offset & 4))) as u32
}

/// Replaces the bits of `mask`.
fn merge(old: u32, value: u32, mask: u32) -> u32 {
    old & !mask | value & mask
}

impl Ntb {
    pub(super) fn registers_read(
        &self,
        port: Port,
        offset: u64,
        data: &mut [u8],
        hosts: &mut dyn HostAccess,
    ) {
        for (done, count, at, first) in words(offset, data.len()) {
            let word = self.read_word(port, at, hosts).to_le_bytes();
            data[done..done + count].copy_from_slice(&word[first..first + count]);
        }
    }

    /// Words take effect one after another, the lowest first.
    pub(super) fn registers_write(
        &mut self,
        port: Port,
        offset: u64,
        data: &[u8],
        hosts: &mut dyn HostAccess,
    ) {
        for (done, count, at, first) in words(offset, data.len()) {
            let (mut value, mut mask) = ([0; 4], [0; 4]);
            value[first..first + count].copy_from_slice(&data[done..done + count]);
            mask[first..first + count].fill(0xff);
            let (value, mask) = (u32::from_le_bytes(value), u32::from_le_bytes(mask));
            self.write_word(port, at, value, mask, hosts);
        }
    }

    fn read_word(&self, port: Port, at: u64, hosts: &mut dyn HostAccess) -> u32 {
        let (own, peer) = (&self.ports[port], &self.ports[port.peer()]);
        let r = &own.registers;
        match at {
            reg::ID => ID,
            reg::VERSION => VERSION,
            reg::CAPS => own.config.caps(),
            reg::COUNTS => counts::pack(DOORBELLS, SCRATCHPADS, REQUESTERS),
            reg::PEER_CAPS => peer.config.caps(),
            reg::PORT => port.number(),
            reg::LINK_CONTROL => r.link_control,
            reg::LINK_STATUS => own.link_status,
            reg::DOORBELL_STATUS => r.doorbell_status,
            reg::DOORBELL_MASK => r.doorbell_mask,
            reg::EVENT_STATUS => r.event_status,
            reg::EVENT_MASK => r.event_mask,
            reg::ERROR_COUNT => r.error_count,
            reg::ERROR_INFO => r.error_info,
            reg::SCRATCHPAD..SCRATCHPAD_END => r.scratchpads[index(at, reg::SCRATCHPAD)],
            reg::PEER_SCRATCHPAD..PEER_SCRATCHPAD_END => match self.link_is_up() {
                true => peer.registers.scratchpads[index(at, reg::PEER_SCRATCHPAD)],
                false => !0,
            },
            REQUESTER_TABLE..REQUESTER_END => r.requesters[index(at, REQUESTER_TABLE)],
            MSIX_TABLE..MSIX_TABLE_END => {
                let at = (at - MSIX_TABLE) as usize;
                let entry = own.msix_table[at..].first_chunk();
                entry.copied().map_or(0, u32::from_le_bytes)
            }
            MSIX_PBA..MSIX_PBA_END => {
                let first = ((at - MSIX_PBA) * 8) as u16;
                (first..VECTORS.min(first + 32))
                    .filter(|vector| hosts.is_pending(port, *vector))
                    .fold(0, |word, vector| word | 1 << (vector - first))
            }
            LUT..LUT_END => {
                let entry = own.lut.get(((at - LUT) / 8) as usize);
                entry.map_or(0, |entry| half(*entry, at))
            }
            _ => match at & !7 {
                reg::ERROR_OFFSET => half(r.error_offset, at),
                reg::ERROR_ADDRESS => half(r.error_address, at),
                reg::WINDOW_WRITES => half(r.window_writes, at),
                reg::WINDOW_READS => half(r.window_reads, at),
                _ => 0,
            },
        }
    }

    /// Writes the bytes of a word that `mask` selects.
    fn write_word(
        &mut self,
        port: Port,
        at: u64,
        value: u32,
        mask: u32,
        hosts: &mut dyn HostAccess,
    ) {
        let link_up = self.link_is_up();
        let r = &mut self.ports[port].registers;
        match at {
            reg::LINK_CONTROL => {
                r.link_control = merge(r.link_control, value, mask) & link_control::ENABLE;
                self.update_link(hosts);
            }
            reg::DOORBELL_SET_PEER if link_up => {
                self.ring(port.peer(), value & mask, hosts);
            }
            reg::DOORBELL_STATUS => r.doorbell_status &= !(value & mask),
            reg::DOORBELL_MASK => {
                let before = r.doorbell_mask;
                r.doorbell_mask = merge(before, value, mask);
                let released = r.doorbell_status & before & !r.doorbell_mask;
                raise(port, released, hosts);
            }
            reg::EVENT_STATUS => r.event_status &= !(value & mask),
            reg::EVENT_MASK => {
                let before = r.event_mask;
                r.event_mask = merge(before, value, mask) & event::ALL;
                if r.event_status & before & !r.event_mask != 0 {
                    hosts.raise(port, EVENT_VECTOR);
                }
            }
            reg::ERROR_COUNT => r.error_count = 0,
            reg::SCRATCHPAD..SCRATCHPAD_END => {
                let pad = &mut r.scratchpads[index(at, reg::SCRATCHPAD)];
                *pad = merge(*pad, value, mask);
            }
            reg::PEER_SCRATCHPAD..PEER_SCRATCHPAD_END if link_up => {
                let peer = &mut self.ports[port.peer()].registers;
                let pad = &mut peer.scratchpads[index(at, reg::PEER_SCRATCHPAD)];
                *pad = merge(*pad, value, mask);
            }
            REQUESTER_TABLE..REQUESTER_END => {
                let entry = &mut r.requesters[index(at, REQUESTER_TABLE)];
                *entry = merge(*entry, value, mask) & (requester::VALID | requester::RID);
                self.update_link(hosts);
            }
            MSIX_TABLE..MSIX_TABLE_END => {
                let at = (at - MSIX_TABLE) as usize;
                if let Some(entry) = self.ports[port].msix_table[at..].first_chunk_mut() {
                    let old = u32::from_le_bytes(*entry);
                    *entry = merge(old, value, mask).to_le_bytes();
                }
            }
            LUT..LUT_END => {
                if let Some(entry) = self.ports[port].lut.get_mut(((at - LUT) / 8) as usize) {
                    let shift = 8 * (at & 4);
                    let (value, mask) = (u64::from(value) << shift, u64::from(mask) << shift);
                    *entry = (*entry & !mask | value & mask) & (lut::ADDRESS | lut::VALID);
                }
            }
            _ => {}
        }
    }

    /// Raises doorbells at a port.
    fn ring(&mut self, port: Port, bells: u32, hosts: &mut dyn HostAccess) {
        let r = &mut self.ports[port].registers;
        r.doorbell_status |= bells;
        raise(port, bells & !r.doorbell_mask, hosts);
    }

    /// Sets event bits of a port. Raises the interrupt only for bits that were clear.
    pub(super) fn event(&mut self, port: Port, events: u32, hosts: &mut dyn HostAccess) {
        let r = &mut self.ports[port].registers;
        let new = events & !r.event_status;
        r.event_status |= events;
        if new & !r.event_mask != 0 {
            hosts.raise(port, EVENT_VECTOR);
        }
    }

    pub(super) fn link_is_up(&self) -> bool {
        Port::BOTH
            .iter()
            .all(|port| self.ports[*port].present && self.ports[*port].link_enabled())
    }

    /// Derives link status and window state from the state of both ports, and raises
    /// link events.
    pub(super) fn update_link(&mut self, hosts: &mut dyn HostAccess) {
        for port in Port::BOTH {
            let peer = &self.ports[port.peer()];
            let bits = [
                (self.link_is_up(), link_status::UP),
                (peer.present, link_status::PEER_PRESENT),
                (
                    peer.present && peer.link_enabled(),
                    link_status::PEER_ENABLED,
                ),
                (
                    peer.present && peer.bus_master,
                    link_status::PEER_BUS_MASTER,
                ),
            ];
            let set = bits.iter().filter(|(is_set, _)| *is_set);
            let status = set.fold(0, |status, (_, bit)| status | bit);
            self.ports[port].closed = self.closed(port);
            if std::mem::replace(&mut self.ports[port].link_status, status) != status {
                self.event(port, event::LINK, hosts);
            }
        }
    }
}

/// Raises the vectors of doorbells.
fn raise(port: Port, mut bells: u32, hosts: &mut dyn HostAccess) {
    while bells != 0 {
        hosts.raise(port, bells.trailing_zeros() as u16);
        bells &= bells - 1;
    }
}

/// Number of the 32-bit register at `at` in a table that starts at `start`.
fn index(at: u64, start: u64) -> usize {
    ((at - start) / 4) as usize
}
