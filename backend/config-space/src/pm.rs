//! Power management (PCIe 7.5.2; states in 5.3).
//!
//! D0 and D3hot only: D1 and D2 are optional and gain nothing here. No PME:
//! there is no path for its message from the lender to the guest.

use farside_pci::ConfigImage;
use farside_pci::regs::{PM_CTRL, PM_CTRL_NO_SOFT_RESET, PM_CTRL_STATE_MASK, PM_PMC};

use super::builder::Builder;

/// Mask of the capabilities register: keeps version, immediate readiness and
/// device-specific initialization; removes PME, D1 and D2.
const KEPT: u16 = 0b0011_0111;

/// A function's power state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerState {
    /// Fully on.
    D0,
    /// Responds to configuration accesses only, and does not master the bus.
    D3hot,
}

#[derive(Clone, Debug)]
pub struct Registers {
    at: usize,
}

impl Registers {
    pub fn build(builder: &mut Builder, at: usize) -> Self {
        let image = &mut builder.image;
        let capabilities = image.u16(at + PM_PMC) & KEPT;
        let control = image.u16(at + PM_CTRL) & PM_CTRL_NO_SOFT_RESET;
        image
            .set_u16(at + PM_PMC, capabilities)
            .set_u16(at + PM_CTRL, control)
            // Bridge extensions and data register.
            .set_u16(at + PM_CTRL + 2, 0);
        builder.writable.set_u16(at + PM_CTRL, PM_CTRL_STATE_MASK);
        Self { at }
    }

    pub fn state(&self, image: &ConfigImage) -> PowerState {
        match image.u16(self.at + PM_CTRL) & PM_CTRL_STATE_MASK {
            0b11 => PowerState::D3hot,
            // D1 and D2 cannot be written.
            _ => PowerState::D0,
        }
    }

    /// "If software attempts to write an unsupported state, the write
    /// operation completes normally but the data is discarded" (7.5.2.2).
    pub fn discard_unsupported(&self, before: &ConfigImage, after: &mut ConfigImage) {
        let at = self.at + PM_CTRL;
        let state = PM_CTRL_STATE_MASK as u8;
        if matches!(after[at] & state, 1 | 2) {
            after[at] = (after[at] & !state) | (before[at] & state);
        }
    }

    /// Whether this change resets the function: D3hot to D0 without No_Soft_Reset.
    pub fn resets(&self, before: &ConfigImage, after: &ConfigImage) -> bool {
        self.state(before) == PowerState::D3hot
            && self.state(after) == PowerState::D0
            && after.u16(self.at + PM_CTRL) & PM_CTRL_NO_SOFT_RESET == 0
    }
}
