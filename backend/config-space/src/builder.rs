//! Power-on values and masks, register by register.

use farside_pci::regs::{CFG_SPACE_EXP_SIZE, CFG_SPACE_SIZE};
use farside_pci::{ConfigImage, Forwarding};

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
    /// Of a physical function: the bits that are the device's.
    pub forwarding: Option<Forwarding>,
}

impl Builder {
    pub fn new(image: &[u8], forwarding: Option<Forwarding>) -> Result<Self, ConfigSpaceError> {
        let size = image.len();
        if size != CFG_SPACE_SIZE && size != CFG_SPACE_EXP_SIZE {
            return Err(ConfigSpaceError::Size(size));
        }
        Ok(Self {
            image: image.to_vec().into(),
            writable: vec![0; size].into(),
            clearable: vec![0; size].into(),
            forwarding,
        })
    }

    /// Takes bits out of the masks: they are the device's.
    pub fn leave(&mut self, forwarded: &ConfigImage) {
        for mask in [&mut self.writable, &mut self.clearable] {
            for (bits, forwarded) in mask.iter_mut().zip(&**forwarded) {
                *bits &= !forwarded;
            }
        }
    }
}
