//! Controller registers (NVM Express 1.4, 3.1).

use anyhow::Result;

use crate::machine::Machine;

pub const CAP: u64 = 0x00;
pub const CC: u64 = 0x14;
pub const CSTS: u64 = 0x1c;
pub const AQA: u64 = 0x24;
pub const ASQ: u64 = 0x28;
pub const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;

/// CC: enable, the NVM command set, pages of 4 KiB, entries of 64 and 16
/// bytes.
pub const ENABLE: u32 = 1 | 6 << 16 | 4 << 20;
/// CC: a normal shutdown.
pub const SHUT_DOWN: u32 = 1 << 14;

pub const READY: u32 = 1 << 0;
pub const FATAL: u32 = 1 << 1;
const SHUTDOWN_STATUS: u32 = 0b11 << 2;
const SHUTDOWN_COMPLETE: u32 = 0b10 << 2;

/// Whether CSTS reports shutdown complete.
pub fn is_shut_down(csts: u32) -> bool {
    csts & SHUTDOWN_STATUS == SHUTDOWN_COMPLETE
}

/// The capabilities register.
#[derive(Clone, Copy, Debug)]
pub struct Capabilities(pub u64);

impl Capabilities {
    pub fn read(machine: &mut Machine) -> Result<Self> {
        let low = machine.device.load(0, CAP)?;
        let high = machine.device.load(0, CAP + 4)?;
        Ok(Self(u64::from(high) << 32 | u64::from(low)))
    }

    /// Entries of the largest queue (CAP.MQES).
    pub fn max_entries(self) -> u32 {
        (self.0 as u32 & 0xffff) + 1
    }

    /// Bytes of the smallest memory page (CAP.MPSMIN).
    pub fn min_page(self) -> u64 {
        4096 << (self.0 >> 48 & 0xf)
    }

    /// Offset of a queue's submission (tail) doorbell.
    pub fn tail_doorbell(self, queue: u16) -> u64 {
        DOORBELLS + u64::from(queue) * 2 * self.stride()
    }

    /// Offset of a queue's completion (head) doorbell.
    pub fn head_doorbell(self, queue: u16) -> u64 {
        self.tail_doorbell(queue) + self.stride()
    }

    fn stride(self) -> u64 {
        4 << (self.0 >> 32 & 0xf)
    }
}

/// Writes a 64-bit register as Linux does: the low half first.
pub fn store_u64(machine: &mut Machine, at: u64, value: u64) -> Result<()> {
    machine.device.store(0, at, value as u32)?;
    machine.device.store(0, at + 4, (value >> 32) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbells_stand_as_far_apart_as_the_drive_says() {
        let near = Capabilities(0);
        assert_eq!(
            (near.tail_doorbell(0), near.head_doorbell(0)),
            (0x1000, 0x1004)
        );
        assert_eq!(
            (near.tail_doorbell(3), near.head_doorbell(3)),
            (0x1018, 0x101c)
        );
        let peer_address = Capabilities(2 << 32);
        assert_eq!(
            (peer_address.tail_doorbell(1), peer_address.head_doorbell(1)),
            (0x1020, 0x1030)
        );
    }
}
