//! Power management (PCIe 7.5.2; states in 5.3).
//!
//! D0 and D3hot only: D1 and D2 are optional and gain nothing here. No PME:
//! there is no path for its message from the lender to the guest.

use super::builder::{Builder, get_u16};

pub const LENGTH: usize = 8;

const CAPABILITIES: usize = 2;
const CONTROL: usize = 4;

/// Of the capabilities register: version, immediate readiness and
/// device-specific initialization stay; PME, D1 and D2 go.
const KEPT: u16 = 0b0011_0111;

const STATE: u16 = 0b11;
const NO_SOFT_RESET: u16 = 1 << 3;

/// A function's power state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerState {
    /// Works.
    D0,
    /// Answers configuration accesses only, and does not master the bus.
    D3hot,
}

#[derive(Clone, Debug)]
pub struct Registers {
    at: usize,
}

impl Registers {
    pub fn build(builder: &mut Builder, at: usize) -> Self {
        let capabilities = builder.u16(at + CAPABILITIES) & KEPT;
        let control = builder.u16(at + CONTROL) & NO_SOFT_RESET;
        builder
            .set_u16(at + CAPABILITIES, capabilities)
            .set_u16(at + CONTROL, control)
            .writable_u16(at + CONTROL, STATE)
            // Bridge extensions and data register.
            .set_u16(at + CONTROL + 2, 0);
        Self { at }
    }

    pub fn state(&self, bytes: &[u8]) -> PowerState {
        match get_u16(bytes, self.at + CONTROL) & STATE {
            0b11 => PowerState::D3hot,
            // 1 and 2 cannot be written.
            _ => PowerState::D0,
        }
    }

    /// "If software attempts to write an unsupported state, the write
    /// operation completes normally but the data is discarded" (7.5.2.2).
    pub fn settle(&self, before: &[u8], after: &mut [u8]) {
        let at = self.at + CONTROL;
        let state = STATE as u8;
        if matches!(after[at] & state, 1 | 2) {
            after[at] = (after[at] & !state) | (before[at] & state);
        }
    }

    /// Whether the function loses its state between these two.
    pub fn resets(&self, before: &[u8], after: &[u8]) -> bool {
        self.state(before) == PowerState::D3hot
            && self.state(after) == PowerState::D0
            && get_u16(after, self.at + CONTROL) & NO_SOFT_RESET == 0
    }
}
