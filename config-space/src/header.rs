//! The type 0 header (PCIe 7.5.1.1 and 7.5.1.2).

use farside_pci::{BarKind, Description};

use super::builder::Builder;
use super::{
    COMMAND, COMMAND_BUS_MASTER, COMMAND_INTX_DISABLE, COMMAND_IO, COMMAND_MEMORY,
    ConfigSpaceError, STATUS,
};

const CACHE_LINE_SIZE: usize = 0x0c;
const LATENCY_TIMER: usize = 0x0d;
const HEADER_TYPE: usize = 0x0e;
const BIST: usize = 0x0f;
const CARDBUS_CIS: usize = 0x28;
const EXPANSION_ROM: usize = 0x30;
const RESERVED: std::ops::Range<usize> = 0x35..0x3c;
const INTERRUPT_LINE: usize = 0x3c;
pub const INTERRUPT_PIN: usize = 0x3d;

const COMMAND_PARITY: u16 = 1 << 6;
const COMMAND_SERR: u16 = 1 << 8;

/// Speeds and timings of conventional PCI, and nothing that reports an event.
const STATUS_CONSTANT: u16 = 0x06a0;
/// Parity, aborts and system errors: bits 8 and 11 to 15.
const STATUS_EVENTS: u16 = 0xf900;

/// In the header type: the device has further functions.
const MULTI_FUNCTION: u8 = 1 << 7;

pub fn build(builder: &mut Builder, description: &Description) -> Result<(), ConfigSpaceError> {
    let vendor = builder.u16(0);
    if vendor == 0xffff || vendor == 0 {
        return Err(ConfigSpaceError::NotPresent(vendor));
    }
    let header_type = builder.u8(HEADER_TYPE) & !MULTI_FUNCTION;
    if header_type != 0 {
        return Err(ConfigSpaceError::HeaderType(header_type));
    }

    // Decoding of a space that the function has nothing in cannot be enabled.
    let mut command = COMMAND_BUS_MASTER | COMMAND_PARITY | COMMAND_SERR | COMMAND_INTX_DISABLE;
    for bar in description.bars.iter().flatten() {
        command |= match bar.kind {
            BarKind::Io => COMMAND_IO,
            BarKind::Memory32 { .. } | BarKind::Memory64 { .. } => COMMAND_MEMORY,
        };
    }
    let status = builder.u16(STATUS) & STATUS_CONSTANT;
    let pin = match (description.intx, builder.u8(INTERRUPT_PIN)) {
        (false, _) => 0,
        (true, pin @ 1..=4) => pin,
        (true, _) => 1,
    };
    builder
        .set_u16(COMMAND, 0)
        .writable_u16(COMMAND, command)
        // The capability list bit is set when the list is made.
        .set_u16(STATUS, status)
        .clearable_u16(STATUS, STATUS_EVENTS)
        .writable_u8(CACHE_LINE_SIZE, 0xff)
        .set_u8(LATENCY_TIMER, 0)
        // Functions are lent one by one, each as function 0.
        .set_u8(HEADER_TYPE, 0)
        .set_u8(BIST, 0)
        .set_u32(CARDBUS_CIS, 0)
        // There is none: a guest that sizes it reads 0.
        .set_u32(EXPANSION_ROM, 0)
        .zero(RESERVED)
        .writable_u8(INTERRUPT_LINE, 0xff)
        .set_u8(INTERRUPT_PIN, pin);
    Ok(())
}
