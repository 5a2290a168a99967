//! Advanced error reporting (PCIe 7.8.4).
//!
//! Masks and severities are writable storage. No error is ever logged: the lender
//! handles errors on its bus. ECRC is the lender's, too.

use super::builder::Builder;

const LENGTH: usize = 0x2c;

const UNCORRECTABLE_STATUS: usize = 0x04;
const UNCORRECTABLE_MASK: usize = 0x08;
const UNCORRECTABLE_SEVERITY: usize = 0x0c;
const CORRECTABLE_STATUS: usize = 0x10;
const CORRECTABLE_MASK: usize = 0x14;
const CONTROL: usize = 0x18;

/// Bits 4, 5 and 12 to 26.
const UNCORRECTABLE: u32 = 0x07ff_f030;
/// Internal errors.
const UNCORRECTABLE_MASK_POWER_ON: u32 = 1 << 22;
/// Data link protocol, surprise down, flow control, overflow, malformed,
/// internal.
const UNCORRECTABLE_SEVERITY_POWER_ON: u32 = 0x0046_2030;
/// Bits 0, 6 to 8 and 12 to 15.
const CORRECTABLE: u32 = 0xf1c1;
/// Advisory, internal, header log overflow.
const CORRECTABLE_MASK_POWER_ON: u32 = 0xe000;

pub fn build(builder: &mut Builder, at: usize) {
    builder
        .image
        .set_u32(at + UNCORRECTABLE_STATUS, 0)
        .set_u32(at + UNCORRECTABLE_MASK, UNCORRECTABLE_MASK_POWER_ON)
        .set_u32(at + UNCORRECTABLE_SEVERITY, UNCORRECTABLE_SEVERITY_POWER_ON)
        .set_u32(at + CORRECTABLE_STATUS, 0)
        .set_u32(at + CORRECTABLE_MASK, CORRECTABLE_MASK_POWER_ON);
    // Control and header log.
    builder.image[at + CONTROL..at + LENGTH].fill(0);
    builder
        .clearable
        .set_u32(at + UNCORRECTABLE_STATUS, UNCORRECTABLE)
        .set_u32(at + CORRECTABLE_STATUS, CORRECTABLE);
    builder
        .writable
        .set_u32(at + UNCORRECTABLE_MASK, UNCORRECTABLE)
        .set_u32(at + UNCORRECTABLE_SEVERITY, UNCORRECTABLE)
        .set_u32(at + CORRECTABLE_MASK, CORRECTABLE);
}
