//! Power-on values and masks, register by register.

use farside_pci::ConfigImage;
use farside_pci::regs::{CFG_SPACE_EXP_SIZE, CFG_SPACE_SIZE};

use super::ConfigSpaceError;

/// A configuration space in the making: the device's image, all of it
/// read-only until a mask says otherwise.
///
/// Offsets come from structures that have been checked to lie inside.
pub struct Builder {
    /// Values after power-on.
    pub image: ConfigImage,
    /// Bits that take what is written.
    pub writable: ConfigImage,
    /// Bits that a written 1 clears.
    pub clearable: ConfigImage,
}

impl Builder {
    pub fn new(image: &[u8]) -> Result<Self, ConfigSpaceError> {
        let size = image.len();
        if size != CFG_SPACE_SIZE && size != CFG_SPACE_EXP_SIZE {
            return Err(ConfigSpaceError::Size(size));
        }
        Ok(Self {
            image: image.to_vec().into(),
            writable: vec![0; size].into(),
            clearable: vec![0; size].into(),
        })
    }
}
