//! Message signalled interrupts (PCIe 7.7.1).

use farside_pci::ConfigImage;
use farside_pci::policy::msi_length;
use farside_pci::regs::*;

use super::ConfigSpaceError;
use super::builder::Builder;

/// Most vectors of a function.
const MAX_VECTORS: u16 = 32;

/// The state of MSI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Msi {
    /// MSI enable.
    pub enabled: bool,
    /// Number of enabled vectors: a power of two, at most the device's number.
    pub vectors: u8,
    /// Message address, a guest-physical address.
    pub address: u64,
    /// Message data; the lowest bits hold the vector.
    pub data: u16,
    /// Bit n: vector n is masked. 0 for a function without per-vector masking.
    pub mask: u32,
}

#[derive(Clone, Debug)]
pub struct Registers {
    at: usize,
    control: u16,
}

impl Registers {
    /// `described` is the description's number of vectors.
    pub fn build(
        builder: &mut Builder,
        at: usize,
        described: u16,
    ) -> Result<Self, ConfigSpaceError> {
        // Clears the enable bits, and removes extended message data (PCIe 4.0).
        let control = builder.image.u16(at + MSI_FLAGS)
            & (MSI_FLAGS_QMASK | MSI_FLAGS_64BIT | MSI_FLAGS_MASKBIT);
        let in_config = 1 << log2_capable(control).min(15);
        if in_config != described {
            return Err(ConfigSpaceError::Vectors {
                name: "MSI",
                in_config,
                described,
            });
        }
        // Two encodings are reserved (PCI 3.0, 6.8.1.3).
        if in_config > MAX_VECTORS {
            return Err(ConfigSpaceError::TooManyVectors {
                at,
                count: in_config,
            });
        }
        let registers = Self { at, control };
        builder.image[at + MSI_FLAGS..at + msi_length(control)].fill(0);
        builder.image.set_u16(at + MSI_FLAGS, control);
        let writable = &mut builder.writable;
        writable
            .set_u16(at + MSI_FLAGS, MSI_FLAGS_ENABLE | MSI_FLAGS_QSIZE)
            .set_u32(at + MSI_ADDRESS_LO, !0b11)
            .set_u16(registers.data(), 0xffff);
        if control & MSI_FLAGS_64BIT != 0 {
            writable.set_u32(at + MSI_ADDRESS_HI, !0);
        }
        if let Some(mask) = registers.mask() {
            // One mask bit for each vector.
            writable.set_u32(mask, !0 >> (MAX_VECTORS - described));
        }
        Ok(registers)
    }

    pub fn state(&self, image: &ConfigImage) -> Msi {
        let control = image.u16(self.at + MSI_FLAGS);
        let enabled_log2 = (control & MSI_FLAGS_QSIZE) >> 4;
        // Limited to the device's number.
        let log2 = enabled_log2.min(log2_capable(self.control));
        let high = if self.control & MSI_FLAGS_64BIT != 0 {
            image.u32(self.at + MSI_ADDRESS_HI)
        } else {
            0
        };
        Msi {
            enabled: control & MSI_FLAGS_ENABLE != 0,
            vectors: 1 << log2,
            address: u64::from(high) << 32 | u64::from(image.u32(self.at + MSI_ADDRESS_LO)),
            data: image.u16(self.data()),
            mask: self.mask().map_or(0, |at| image.u32(at)),
        }
    }

    fn data(&self) -> usize {
        self.at
            + if self.control & MSI_FLAGS_64BIT != 0 {
                0x0c
            } else {
                0x08
            }
    }

    fn mask(&self) -> Option<usize> {
        (self.control & MSI_FLAGS_MASKBIT != 0).then(|| self.data() + 4)
    }
}

fn log2_capable(control: u16) -> u16 {
    (control & MSI_FLAGS_QMASK) >> 1
}
