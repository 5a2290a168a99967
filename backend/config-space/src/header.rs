//! The type 0 header (PCIe 7.5.1.1 and 7.5.1.2).

use farside_pci::regs::*;
use farside_pci::{BarKind, Description};

use super::ConfigSpaceError;
use super::builder::Builder;

const RESERVED: std::ops::Range<usize> = 0x35..0x3c;

/// 66 MHz capable, fast back-to-back, DEVSEL timing: the constant bits.
const STATUS_CONSTANT: u16 = 0x06a0;
/// Parity, aborts and system errors: bits 8 and 11 to 15.
const STATUS_EVENTS: u16 = 0xf900;

pub fn build(builder: &mut Builder, description: &Description) -> Result<(), ConfigSpaceError> {
    let vendor = builder.image.u16(VENDOR_ID);
    if vendor == 0xffff || vendor == 0 {
        return Err(ConfigSpaceError::NotPresent(vendor));
    }
    let header_type = builder.image.u8(HEADER_TYPE) & HEADER_TYPE_MASK;
    if header_type != 0 {
        return Err(ConfigSpaceError::HeaderType(header_type));
    }

    // Decoding of a space in which the function has no BAR cannot be enabled.
    let mut command = COMMAND_MASTER | COMMAND_PARITY | COMMAND_SERR | COMMAND_INTX_DISABLE;
    for bar in description.bars.iter().flatten() {
        command |= match bar.kind {
            BarKind::Io => COMMAND_IO,
            BarKind::Memory32 { .. } | BarKind::Memory64 { .. } => COMMAND_MEMORY,
        };
    }
    let status = builder.image.u16(STATUS) & STATUS_CONSTANT;
    let pin = match (description.intx, builder.image.u8(INTERRUPT_PIN)) {
        (false, _) => 0,
        (true, pin @ 1..=4) => pin,
        (true, _) => 1,
    };
    builder
        .image
        .set_u16(COMMAND, 0)
        // `walk` sets the capability list bit.
        .set_u16(STATUS, status)
        .set_u8(LATENCY_TIMER, 0)
        // Not multi-function: functions are lent individually, each as function 0.
        .set_u8(HEADER_TYPE, 0)
        .set_u8(BIST, 0)
        .set_u32(CARDBUS_CIS, 0)
        // Without `add_rom`, sizing reads 0.
        .set_u32(ROM_ADDRESS, 0)
        .set_u8(INTERRUPT_PIN, pin);
    builder.image[RESERVED].fill(0);
    builder
        .writable
        .set_u16(COMMAND, command)
        .set_u8(CACHE_LINE_SIZE, 0xff)
        .set_u8(INTERRUPT_LINE, 0xff);
    builder.clearable.set_u16(STATUS, STATUS_EVENTS);
    Ok(())
}
