//! Message signalled interrupts (PCIe 7.7.1).

use super::ConfigSpaceError;
use super::builder::{Builder, get_u16, get_u32};

const CONTROL: usize = 2;
const ADDRESS: usize = 4;
const ADDRESS_HIGH: usize = 8;

const ENABLE: u16 = 1 << 0;
const MULTIPLE_CAPABLE: u16 = 0b111 << 1;
const MULTIPLE_ENABLE: u16 = 0b111 << 4;
const WIDE: u16 = 1 << 7;
const MASKABLE: u16 = 1 << 8;

/// The state of MSI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Msi {
    /// Whether it is used.
    pub enabled: bool,
    /// Vectors that the guest allows: a power of two, at most those that the
    /// device has.
    pub vectors: u8,
    /// Where messages go, a guest-physical address.
    pub address: u64,
    /// What they say; the vector is in the lowest bits.
    pub data: u16,
    /// Bit n: vector n is masked. 0 for a function without masks.
    pub mask: u32,
}

#[derive(Clone, Debug)]
pub struct Registers {
    at: usize,
    control: u16,
}

/// Bytes of the structure with this control register.
pub fn length(control: u16) -> usize {
    match (control & WIDE != 0, control & MASKABLE != 0) {
        (false, false) => 0x0a,
        (true, false) => 0x0e,
        (false, true) => 0x14,
        (true, true) => 0x18,
    }
}

impl Registers {
    /// `described` is the number of vectors in the description.
    pub fn build(
        builder: &mut Builder,
        at: usize,
        described: u16,
    ) -> Result<Self, ConfigSpaceError> {
        // What is kept has no enable bits, and not the extended message data
        // of PCIe 4: they stay off.
        let control = builder.u16(at + CONTROL) & (MULTIPLE_CAPABLE | WIDE | MASKABLE);
        let in_config = 1 << log2_capable(control).min(15);
        if in_config != described {
            return Err(ConfigSpaceError::Vectors {
                name: "MSI",
                in_config,
                described,
            });
        }
        let registers = Self { at, control };
        builder
            .zero(at + CONTROL..at + length(control))
            .set_u16(at + CONTROL, control)
            .writable_u16(at + CONTROL, ENABLE | MULTIPLE_ENABLE)
            .writable_u32(at + ADDRESS, !0b11)
            .writable_u16(registers.data(), 0xffff);
        if control & WIDE != 0 {
            builder.writable_u32(at + ADDRESS_HIGH, !0);
        }
        if let Some(mask) = registers.mask() {
            // As many mask bits as vectors, of which there are at most 32.
            builder.writable_u32(mask, !0 >> (32 - described));
        }
        Ok(registers)
    }

    pub fn state(&self, bytes: &[u8]) -> Msi {
        let control = get_u16(bytes, self.at + CONTROL);
        let enabled_log2 = (control & MULTIPLE_ENABLE) >> 4;
        // A guest that allows more than there are gets what there are.
        let log2 = enabled_log2.min(log2_capable(self.control));
        let high = if self.control & WIDE != 0 {
            get_u32(bytes, self.at + ADDRESS_HIGH)
        } else {
            0
        };
        Msi {
            enabled: control & ENABLE != 0,
            vectors: 1 << log2,
            address: u64::from(high) << 32 | u64::from(get_u32(bytes, self.at + ADDRESS)),
            data: get_u16(bytes, self.data()),
            mask: self.mask().map_or(0, |at| get_u32(bytes, at)),
        }
    }

    fn data(&self) -> usize {
        self.at + if self.control & WIDE != 0 { 0x0c } else { 0x08 }
    }

    fn mask(&self) -> Option<usize> {
        (self.control & MASKABLE != 0).then(|| self.data() + 4)
    }
}

fn log2_capable(control: u16) -> u16 {
    (control & MULTIPLE_CAPABLE) >> 1
}
