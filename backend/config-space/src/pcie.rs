//! The PCI Express capability (PCIe 7.5.3).
//!
//! Device controls (payload size, error reporting) are writable storage, so that the guest
//! reads back the values it has set. The link is the lender's. Of a physical function some
//! controls and status bits are [forwarded](farside_pci::policy) instead; of a model, the link status is
//! constant.

use farside_pci::ConfigImage;
use farside_pci::regs::*;

use super::ConfigSpaceError;
use super::builder::Builder;

const VERSION: u16 = 0xf;
const SLOT_IMPLEMENTED: u16 = 1 << 8;

const TYPE_ENDPOINT: u8 = 0;
const TYPE_LEGACY_ENDPOINT: u8 = 1;
const TYPE_ROOT_COMPLEX_ENDPOINT: u8 = 9;

/// Phantom functions and slot power limit: the guest's port supports neither.
const DEVICE_CAPABILITIES_REMOVED: u32 = 0b11 << 3 | 0x3ff << 18;
const EXTENDED_TAG: u32 = 1 << 5;

/// Error reporting enables, relaxed ordering, payload size, no snoop, read
/// request size.
const CONTROL_WRITABLE: u16 = 0x78ff;
const CONTROL_EXTENDED_TAG: u16 = 1 << 8;
/// In the high byte of the control register.
const CONTROL_FLR_HIGH: u8 = 1 << 7;

/// Errors detected.
const STATUS_EVENTS: u16 = 0xf;

/// ASPM, read completion boundary, common clock, extended synch.
const LINK_WRITABLE: u16 = 0x00cb;
/// Events of the link status register, which concern the lender's link.
const LINK_EVENTS: u16 = 0xc000;

/// Keeps completion timeouts and the extended format field. Removes atomic operations
/// (an NTB does not forward them), LTR, OBFF, TPH, 10-bit tags and prefixes (they
/// depend on the root complex, and the guest's is not the lender's).
const CAPABILITIES_2_KEPT: u32 = 0x0010_001f;
const TIMEOUT_RANGES: u32 = 0xf;
const TIMEOUT_DISABLE: u32 = 1 << 4;
/// ID-based ordering.
const CONTROL_2_WRITABLE: u16 = 0b11 << 8;

#[derive(Clone, Debug)]
pub struct Registers {
    at: usize,
    flr: bool,
}

fn device_type(flags: u16) -> u8 {
    (flags >> 4 & 0xf) as u8
}

impl Registers {
    pub fn build(builder: &mut Builder, at: usize) -> Result<Self, ConfigSpaceError> {
        let Builder {
            image,
            writable,
            clearable,
            ..
        } = builder;
        let flags = image.u16(at + EXP_FLAGS);
        let device_type = device_type(flags);
        let has_link = match device_type {
            TYPE_ENDPOINT | TYPE_LEGACY_ENDPOINT => true,
            TYPE_ROOT_COMPLEX_ENDPOINT => false,
            other => return Err(ConfigSpaceError::PortType(other)),
        };
        let capabilities = image.u32(at + EXP_DEVCAP) & !DEVICE_CAPABILITIES_REMOVED;
        let tags = if capabilities & EXTENDED_TAG != 0 {
            CONTROL_EXTENDED_TAG
        } else {
            0
        };
        image
            .set_u16(at + EXP_FLAGS, flags & !SLOT_IMPLEMENTED)
            .set_u32(at + EXP_DEVCAP, capabilities)
            .set_u16(at + EXP_DEVCTL, EXP_DEVCTL_DEFAULT)
            .set_u16(at + EXP_DEVSTA, 0);
        writable.set_u16(at + EXP_DEVCTL, CONTROL_WRITABLE | tags);
        clearable.set_u16(at + EXP_DEVSTA, STATUS_EVENTS);
        if has_link {
            let status = image.u16(at + EXP_LNKSTA) & !LINK_EVENTS;
            image
                .set_u16(at + EXP_LNKCTL, 0)
                .set_u16(at + EXP_LNKSTA, status);
            writable.set_u16(at + EXP_LNKCTL, LINK_WRITABLE);
        }
        if flags & VERSION >= 2 {
            let capabilities = image.u32(at + EXP_DEVCAP2) & CAPABILITIES_2_KEPT;
            let mut control = CONTROL_2_WRITABLE;
            if capabilities & TIMEOUT_RANGES != 0 {
                control |= 0xf;
            }
            if capabilities & TIMEOUT_DISABLE != 0 {
                control |= 1 << 4;
            }
            image
                .set_u32(at + EXP_DEVCAP2, capabilities)
                .set_u16(at + EXP_DEVCTL2, 0)
                .set_u16(at + EXP_DEVSTA2, 0);
            writable.set_u16(at + EXP_DEVCTL2, control);
        }
        Ok(Self {
            at,
            flr: capabilities & EXP_DEVCAP_FLR != 0,
        })
    }

    pub fn device_control(&self, image: &ConfigImage) -> u16 {
        image.u16(self.at + EXP_DEVCTL)
    }

    /// Offset and mask of the Initiate FLR bit (6.6.2), if the device supports FLR.
    pub fn flr_bit(&self) -> Option<(usize, u8)> {
        self.flr
            .then_some((self.at + EXP_DEVCTL + 1, CONTROL_FLR_HIGH))
    }
}
