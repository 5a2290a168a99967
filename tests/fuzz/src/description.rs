//! A lender's description of a device.
//!
//! Input: a byte with the number of changes to a valid description's encoding, each change as two
//! bytes of offset and a value; then accesses to the configuration space that a guest gets.

use farside_config_space::ConfigSpace;
use farside_lender_protocol::{BarOwner, Described, irq_counts};
use farside_migration::Identity;

use crate::{image::Image, input::Input};

/// Decodes the description, and makes of it what a backend and a migration make.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let described = Described {
        description: Image::nvme().0,
        bars: BarOwner::Borrower,
        rom: 0,
        state: 0,
    };
    let mut bytes = postcard::to_stdvec(&described).expect("it can be encoded");
    for _ in 0..input.u8() {
        let at = usize::from(input.u16());
        // The fields behind the configuration space, at the end, as often as that itself.
        let at = match at & 1 {
            0 => at / 2 % bytes.len(),
            _ => bytes.len() - 1 - at / 2 % 96.min(bytes.len()),
        };
        bytes[at] = input.u8();
    }
    let Ok(described) = postcard::from_bytes::<Described>(&bytes) else {
        return;
    };
    let _ = Identity::of(&described);
    let _ = irq_counts(&described.description);
    let Ok(mut space) = ConfigSpace::new(&described.description) else {
        return;
    };
    assert!([256, 4096].contains(&space.size()), "of an invalid size");
    while !input.is_empty() {
        let (offset, data) = (input.u16().into(), input.u32().to_le_bytes());
        let mut staged = space.stage(offset, &data);
        if input.u8() & 1 != 0 && staged.dma() == farside_config_space::Edge::Rising {
            staged.refuse_bus_master();
        }
        space.commit(staged);
        space.read(offset, &mut [0; 8]);
    }
    space.reset();
    assert!(!space.may_dma());
}
