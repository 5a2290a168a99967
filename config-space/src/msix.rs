//! MSI-X (PCIe 7.7.2). The table and the pending bits are in a BAR and not
//! dealt with here, only that they are where they can be.

use super::ConfigSpaceError;
use super::bar::BarRegister;
use super::builder::{Builder, get_u16};

pub const LENGTH: usize = 12;

const CONTROL: usize = 2;
const TABLE: usize = 4;
const PENDING: usize = 8;

const TABLE_SIZE: u16 = 0x7ff;
const FUNCTION_MASK: u16 = 1 << 14;
const ENABLE: u16 = 1 << 15;

/// Bytes of a table entry.
const ENTRY: u64 = 16;

/// The state of MSI-X.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Msix {
    /// Whether it is used.
    pub enabled: bool,
    /// Whether all vectors are masked.
    pub function_mask: bool,
}

#[derive(Clone, Debug)]
pub struct Registers {
    at: usize,
}

impl Registers {
    /// `described` is the number of vectors in the description.
    pub fn build(
        builder: &mut Builder,
        at: usize,
        described: u16,
        bars: &[Option<BarRegister>; 6],
    ) -> Result<Self, ConfigSpaceError> {
        let size = builder.u16(at + CONTROL) & TABLE_SIZE;
        let in_config = size + 1;
        if in_config != described {
            return Err(ConfigSpaceError::Vectors {
                name: "MSI-X",
                in_config,
                described,
            });
        }
        let vectors = u64::from(in_config);
        let pending = vectors.div_ceil(64) * 8;
        for (part, register, length) in [
            ("table", TABLE, vectors * ENTRY),
            ("pending bit array", PENDING, pending),
        ] {
            let value = builder.u32(at + register);
            let (bar, offset) = ((value & 0b111) as u8, u64::from(value & !0b111));
            let inside = bars
                .get(usize::from(bar))
                .and_then(Option::as_ref)
                .is_some_and(|bar| bar.holds_memory(offset, length));
            if !inside {
                return Err(ConfigSpaceError::MsixOutside { part, bar, offset });
            }
        }
        builder
            .set_u16(at + CONTROL, size)
            .writable_u16(at + CONTROL, ENABLE | FUNCTION_MASK);
        Ok(Self { at })
    }

    pub fn state(&self, bytes: &[u8]) -> Msix {
        let control = get_u16(bytes, self.at + CONTROL);
        Msix {
            enabled: control & ENABLE != 0,
            function_mask: control & FUNCTION_MASK != 0,
        }
    }
}
