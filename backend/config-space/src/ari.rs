//! Alternative routing id interpretation (PCIe 7.8.8).

use super::builder::Builder;

pub const LENGTH: usize = 8;

/// A function is lent on its own: it has no next function and no function
/// groups.
pub fn build(builder: &mut Builder, at: usize) {
    builder.image.set_u32(at + 4, 0);
}
