//! Power-on values and masks, register by register.

use farside_pci::ConfigImage;
use farside_pci::regs::{CFG_SPACE_EXP_SIZE, CFG_SPACE_SIZE};

use super::ConfigSpaceError;

/// Builds a configuration space from the device's image, which is read-only except
/// for the bits in the masks.
///
/// Offsets must be inside: the callers have checked their structures.
pub struct Builder {
    /// Values after power-on.
    pub image: ConfigImage,
    /// Read-write bits.
    pub writable: ConfigImage,
    /// Write-1-to-clear bits.
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
