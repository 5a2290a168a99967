//! Advanced features of conventional PCI (PCI-SIG ECN "Advanced Capabilities
//! for Conventional PCI"): function level reset without PCI Express.

use super::builder::Builder;

const CAPABILITIES: usize = 3;
const CONTROL: usize = 4;

const TRANSACTIONS_PENDING: u8 = 1 << 0;
const FUNCTION_LEVEL_RESET: u8 = 1 << 1;
const INITIATE: u8 = 1 << 0;

#[derive(Clone, Debug)]
pub struct Registers {
    at: usize,
    flr: bool,
}

impl Registers {
    pub fn build(builder: &mut Builder, at: usize) -> Self {
        let capabilities =
            builder.image.u8(at + CAPABILITIES) & (TRANSACTIONS_PENDING | FUNCTION_LEVEL_RESET);
        builder
            .image
            .set_u8(at + CAPABILITIES, capabilities)
            .set_u16(at + CONTROL, 0);
        Self {
            at,
            flr: capabilities & FUNCTION_LEVEL_RESET != 0,
        }
    }

    /// Offset and mask of the Initiate FLR bit, if the device supports FLR.
    pub fn flr_bit(&self) -> Option<(usize, u8)> {
        self.flr.then_some((self.at + CONTROL, INITIATE))
    }
}
