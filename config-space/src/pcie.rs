//! The PCI Express capability (PCIe 7.5.3).
//!
//! Controls of the device side (payload size, error reporting, relaxed
//! ordering) take what the guest writes, so that it reads back what it set;
//! the link is the lender's, and its status is what the lender saw.

use super::ConfigSpaceError;
use super::builder::{Builder, get_u16};

const FLAGS: usize = 0x02;
const DEVICE_CAPABILITIES: usize = 0x04;
const DEVICE_CONTROL: usize = 0x08;
const DEVICE_STATUS: usize = 0x0a;
const LINK_CONTROL: usize = 0x10;
const LINK_STATUS: usize = 0x12;
const DEVICE_CAPABILITIES_2: usize = 0x24;
const DEVICE_CONTROL_2: usize = 0x28;
const DEVICE_STATUS_2: usize = 0x2a;

const VERSION: u16 = 0xf;
const SLOT_IMPLEMENTED: u16 = 1 << 8;

const TYPE_ENDPOINT: u8 = 0;
const TYPE_LEGACY_ENDPOINT: u8 = 1;
const TYPE_ROOT_COMPLEX_ENDPOINT: u8 = 9;

/// Phantom functions and slot power limit: neither exists behind the guest's
/// port.
const DEVICE_CAPABILITIES_GONE: u32 = 0b11 << 3 | 0x3ff << 18;
const EXTENDED_TAG: u32 = 1 << 5;
const FUNCTION_LEVEL_RESET: u32 = 1 << 28;

/// Error reporting enables, relaxed ordering, payload size, no snoop, read
/// request size.
const CONTROL_WRITABLE: u16 = 0x78ff;
const CONTROL_EXTENDED_TAG: u16 = 1 << 8;
/// Defaults of 7.5.3.4: relaxed ordering, no snoop, 512-byte read requests.
const CONTROL_POWER_ON: u16 = 0x2810;
/// In the high byte of the control register.
const CONTROL_FLR_HIGH: u8 = 1 << 7;

/// Errors detected.
const STATUS_EVENTS: u16 = 0xf;

/// ASPM, read completion boundary, common clock, extended synch.
const LINK_WRITABLE: u16 = 0x00cb;
/// Events of the link status register, which tell of the lender's link.
const LINK_EVENTS: u16 = 0xc000;

/// Completion timeouts and the extended format field. Gone: atomic operations
/// (an NTB does not carry them), LTR, OBFF, TPH, 10-bit tags and prefixes (they
/// need the guest's root complex to be the lender's).
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

/// Bytes of an endpoint's structure with this flags register. Version 1 ends
/// with the link registers; one without a link has none of the second set
/// either, but a place for the first.
pub fn length(flags: u16) -> usize {
    match (flags & VERSION, device_type(flags)) {
        (0 | 1, TYPE_ROOT_COMPLEX_ENDPOINT) => 0x0c,
        (0 | 1, _) => 0x14,
        (_, TYPE_ROOT_COMPLEX_ENDPOINT) => 0x2c,
        _ => 0x3c,
    }
}

impl Registers {
    pub fn build(builder: &mut Builder, at: usize) -> Result<Self, ConfigSpaceError> {
        let flags = builder.u16(at + FLAGS);
        let device_type = device_type(flags);
        let has_link = match device_type {
            TYPE_ENDPOINT | TYPE_LEGACY_ENDPOINT => true,
            TYPE_ROOT_COMPLEX_ENDPOINT => false,
            other => return Err(ConfigSpaceError::PortType(other)),
        };
        let capabilities = builder.u32(at + DEVICE_CAPABILITIES) & !DEVICE_CAPABILITIES_GONE;
        let tags = if capabilities & EXTENDED_TAG != 0 {
            CONTROL_EXTENDED_TAG
        } else {
            0
        };
        builder
            .set_u16(at + FLAGS, flags & !SLOT_IMPLEMENTED)
            .set_u32(at + DEVICE_CAPABILITIES, capabilities)
            .set_u16(at + DEVICE_CONTROL, CONTROL_POWER_ON)
            .writable_u16(at + DEVICE_CONTROL, CONTROL_WRITABLE | tags)
            .set_u16(at + DEVICE_STATUS, 0)
            .clearable_u16(at + DEVICE_STATUS, STATUS_EVENTS);
        if has_link {
            let status = builder.u16(at + LINK_STATUS) & !LINK_EVENTS;
            builder
                .set_u16(at + LINK_CONTROL, 0)
                .writable_u16(at + LINK_CONTROL, LINK_WRITABLE)
                .set_u16(at + LINK_STATUS, status);
        }
        if flags & VERSION >= 2 {
            let capabilities = builder.u32(at + DEVICE_CAPABILITIES_2) & CAPABILITIES_2_KEPT;
            let mut writable = CONTROL_2_WRITABLE;
            if capabilities & TIMEOUT_RANGES != 0 {
                writable |= 0xf;
            }
            if capabilities & TIMEOUT_DISABLE != 0 {
                writable |= 1 << 4;
            }
            builder
                .set_u32(at + DEVICE_CAPABILITIES_2, capabilities)
                .set_u16(at + DEVICE_CONTROL_2, 0)
                .writable_u16(at + DEVICE_CONTROL_2, writable)
                .set_u16(at + DEVICE_STATUS_2, 0);
        }
        Ok(Self {
            at,
            flr: capabilities & FUNCTION_LEVEL_RESET != 0,
        })
    }

    pub fn device_control(&self, bytes: &[u8]) -> u16 {
        get_u16(bytes, self.at + DEVICE_CONTROL)
    }

    /// The byte and the bit in it that initiate a function level reset
    /// (6.6.2), if the device can.
    pub fn flr_bit(&self) -> Option<(usize, u8)> {
        self.flr
            .then_some((self.at + DEVICE_CONTROL + 1, CONTROL_FLR_HIGH))
    }
}
