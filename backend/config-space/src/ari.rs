//! Alternative routing id interpretation (PCIe 7.8.8).

use super::builder::Builder;

/// Functions are lent individually: no next function, no function groups.
pub fn build(builder: &mut Builder, at: usize) {
    builder.image.set_u32(at + 4, 0);
}
