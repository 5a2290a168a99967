//! Resizable BAR (PCIe 7.8.6).
//!
//! Read-only: the size that a BAR has is the only one that it supports, so that drivers do not try another.

use super::builder::Builder;

const BAR_INDEX: u32 = 0b111;
const BARS_SHIFT: u32 = 5;
const SIZE_SHIFT: u32 = 8;
const SIZE: u32 = 0x3f;
/// Sizes in the capability register: 1 MiB in bit 4 to 128 TiB in bit 31. The control register has larger ones from bit 16.
const SIZES_LOW: u32 = 28;
const SIZES: u32 = SIZES_LOW + 16;

/// `at` has a capability of valid length.
pub fn build(builder: &mut Builder, at: usize) {
    let image = &mut builder.image;
    let bars = image.u32(at + 8) >> BARS_SHIFT & 0b111;
    for bar in 0..bars as usize {
        let at = at + 4 + 8 * bar;
        let control = image.u32(at + 4);
        let size = control >> SIZE_SHIFT & SIZE;
        let (low, high) = match size {
            0..SIZES_LOW => (1 << (size + 4), 0),
            SIZES_LOW..SIZES => (0, 1 << (size - SIZES_LOW + 16)),
            _ => (0, 0),
        };
        // Their number is in the first one.
        let number = if bar == 0 { bars << BARS_SHIFT } else { 0 };
        let kept = control & (BAR_INDEX | SIZE << SIZE_SHIFT);
        image.set_u32(at, low).set_u32(at + 4, kept | number | high);
    }
}
