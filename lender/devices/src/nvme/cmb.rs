//! The controller memory buffer (NVM Express 1.4, 3.1.11 and 4.7): memory at BAR 2 for data of commands, and lists of it, of
//! this controller and of other devices of the VM (peer to peer).
//!
//! Other devices reach it at the address of the BAR, as they reach RAM. For the controller itself the addresses are those that
//! CMBMSC names: such accesses do not leave it. CMBSZ offers no queues in it.

use farside_fabric::{Access, Fault, Iova, Size, memory::HostSlice};

use crate::Dma;

/// Its BAR: BAR 2 and 3, 64-bit and prefetchable.
pub const BAR: usize = 2;

/// The least size, in bytes. Linux cannot use less for peer to peer.
pub const LEAST: u64 = 2 << 20;
/// The largest size, in bytes: as much as a borrower backs with memory.
pub const MOST: u64 = 1 << 30;

/// Offsets of its registers (figure 68).
mod offset {
    pub const CMBLOC: u64 = 0x38;
    pub const CMBSZ: u64 = 0x3c;
    pub const CMBMSC: u64 = 0x50;
    pub const CMBMSC_HIGH: u64 = 0x54;
}

/// CMBMSC.CRE: the guest has asked for CMBLOC and CMBSZ.
const CAPABILITY_REGISTERS_ENABLED: u64 = 1;
/// CMBMSC.CMSE: its addresses are the controller's own.
const MEMORY_SPACE_ENABLED: u64 = 2;
/// Bits of CMBMSC that exist: CBA, CMSE and CRE.
const CONTROL: u64 = !0xffc;

/// Why a size is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cmb = {0}: it must be a power of two from {least} to {most}",
    least = Size(LEAST),
    most = Size(MOST)
)]
pub struct SizeError(u64);

/// Checks a size in bytes.
pub fn check_size(size: u64) -> Result<(), SizeError> {
    match size.is_power_of_two() && (LEAST..=MOST).contains(&size) {
        true => Ok(()),
        false => Err(SizeError(size)),
    }
}

/// The buffer of a controller.
pub struct Cmb {
    size: u64,
    /// Of a controller that is borrowed.
    memory: Option<HostSlice>,
    /// CMBMSC.
    pub control: u64,
}

impl Cmb {
    /// One of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self {
            size,
            memory: None,
            control: 0,
        }
    }

    pub fn set_memory(&mut self, memory: Option<HostSlice>) {
        self.memory = memory;
    }

    pub fn set_control(&mut self, control: u64) {
        self.control = control & CONTROL;
    }

    /// What the controller's own accesses reach of it, if the guest has enabled that.
    pub fn own(&self) -> Option<Own> {
        let enabled = self.control & MEMORY_SPACE_ENABLED != 0;
        Some(Own {
            start: Iova::new(self.control & !0xfff),
            memory: self.memory.clone().filter(|_| enabled)?,
        })
    }

    /// The register at `at`, if it is one of the buffer's.
    pub fn register(&self, at: u64) -> Option<u32> {
        // Data pointers and lists may be in it and elsewhere, of one command (CDPMLS, CDPCILS, CDMMMS).
        const LOCATION: u32 = BAR as u32 | 0b111 << 5;
        // In units of 4 KiB: data of reads and of writes, and lists of PRPs and SGLs.
        const SUPPORT: u32 = 0b1_1100;
        let enabled = self.control & CAPABILITY_REGISTERS_ENABLED != 0;
        let described = |value| if enabled { value } else { 0 };
        Some(match at {
            offset::CMBLOC => described(LOCATION),
            offset::CMBSZ => described(SUPPORT | ((self.size >> 12) as u32) << 12),
            offset::CMBMSC => self.control as u32,
            offset::CMBMSC_HIGH => (self.control >> 32) as u32,
            _ => return None,
        })
    }

    /// Writes the register at `at`, if it is one of the buffer's. Returns whether it is.
    pub fn write_register(&mut self, at: u64, value: u32) -> bool {
        let value = u64::from(value);
        match at {
            offset::CMBMSC => self.set_control(self.control & !0xffff_ffff | value),
            offset::CMBMSC_HIGH => self.set_control(self.control & 0xffff_ffff | value << 32),
            _ => return false,
        }
        true
    }
}

/// The buffer, at the addresses by which commands name it.
pub struct Own {
    start: Iova,
    memory: HostSlice,
}

impl Own {
    /// The longest prefix of `[iova, iova + len)` that is in the buffer.
    fn find(&self, iova: Iova, len: usize) -> Option<HostSlice> {
        let offset = usize::try_from(iova.offset_from(self.start)?).ok()?;
        let rest = self.memory.len().checked_sub(offset)?;
        self.memory
            .slice(offset, len.min(rest))
            .filter(|_| rest > 0)
    }
}

/// The bus, and before it the buffer.
pub struct OwnFirst<'a> {
    pub own: Own,
    pub bus: &'a mut dyn Dma,
}

impl Dma for OwnFirst<'_> {
    fn is_bus_master(&self) -> bool {
        self.bus.is_bus_master()
    }

    fn translate(&mut self, iova: Iova, len: usize, access: Access) -> Result<HostSlice, Fault> {
        match self.own.find(iova, len) {
            Some(own) => Ok(own),
            None => self.bus.translate(iova, len, access),
        }
    }

    fn reaches(&mut self, iova: Iova, len: usize, access: Access) -> bool {
        let own = self.own.find(iova, len).map_or(0, |own| own.len());
        if own == len {
            return true;
        }
        let rest = iova.wrapping_add(own as u64);
        self.bus.reaches(rest, len - own, access)
    }
}
