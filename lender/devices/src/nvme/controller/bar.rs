//! BAR 0: registers, doorbells, MSI-X table and pending bits (NVM Express 1.4,
//! 3.1).

use super::Nvme;
use crate::{
    Bus,
    nvme::{
        doorbells::Doorbell,
        registers::{CMB_SUPPORTED, DOORBELLS, MSIX_PBA, MSIX_TABLE, offset},
    },
};

impl Nvme {
    /// Reads the doubleword at `at`, a multiple of 4.
    pub(super) fn read_dword(&mut self, at: u64, bus: &mut Bus<'_>) -> u32 {
        match at {
            ..DOORBELLS => {
                let value = self.registers.read(at);
                match &self.cmb {
                    Some(_) if at == offset::CAP_HIGH => value | CMB_SUPPORTED,
                    Some(cmb) => cmb.register(at).unwrap_or(value),
                    None => value,
                }
            }
            // Reads of doorbells are vendor specific (3.1.24).
            DOORBELLS..MSIX_TABLE => 0,
            MSIX_TABLE..MSIX_PBA => self.table_dword(at - MSIX_TABLE),
            _ => self.pending_bits(at - MSIX_PBA, bus),
        }
    }

    fn table_dword(&self, at: u64) -> u32 {
        let at = at as usize;
        match self.msix_table.get(at..at + 4) {
            Some(bytes) => u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            None => 0,
        }
    }

    fn pending_bits(&self, at: u64, bus: &mut Bus<'_>) -> u32 {
        let first = at * 8;
        (0..32)
            .filter(|bit| {
                let vector = first + bit;
                vector < self.vectors().into() && bus.irq.is_pending(vector as u16)
            })
            .fold(0, |bits, bit| bits | 1 << bit)
    }

    /// Writes the doubleword at `at`, a multiple of 4.
    pub(super) fn write_dword(&mut self, at: u64, value: u32, bus: &mut Bus<'_>) {
        match at {
            offset::INTMS | offset::INTMC => {
                if at == offset::INTMS {
                    self.registers.interrupt_mask |= value;
                } else {
                    self.registers.interrupt_mask &= !value;
                }
                self.queues.state.mask(self.registers.interrupt_mask);
                let mask = self.registers.interrupt_mask;
                // Others are read when they may be: they need DMA.
                if self.queues.are_mapped()
                    && let Err(fault) = self.queues.refresh_asserting(bus.dma, mask)
                {
                    self.fatal(fault);
                }
                self.queues
                    .update_line(bus.irq, self.registers.interrupt_mask);
            }
            offset::CC => {
                self.write_configuration(value, bus);
                self.changed = true;
            }
            ..DOORBELLS => {
                let of_cmb = self.cmb.as_mut().map(|cmb| cmb.write_register(at, value));
                if of_cmb != Some(true) {
                    self.registers.write_plain(at, value);
                }
                self.changed = true;
            }
            DOORBELLS..MSIX_TABLE => {
                self.stats.doorbell_traps += 1;
                // Mapped ones are in memory, whoever writes them.
                if self.registers.csts.ready
                    && !self.queues.are_mapped()
                    && let Some(doorbell) = Doorbell::at(at - DOORBELLS)
                {
                    if let Err(fault) = self.queues.ring(bus.dma, doorbell, value) {
                        self.fatal(fault);
                    }
                    if let Doorbell::CompletionHead(_) = doorbell {
                        self.queues
                            .update_line(bus.irq, self.registers.interrupt_mask);
                    }
                }
            }
            MSIX_TABLE..MSIX_PBA => {
                let at = (at - MSIX_TABLE) as usize;
                if let Some(bytes) = self.msix_table.get_mut(at..at + 4) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                    self.changed = true;
                }
            }
            // The pending bit array is read-only.
            _ => {}
        }
    }
}
