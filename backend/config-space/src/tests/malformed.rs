//! Images that a broken or hostile lender may send.

use proptest::prelude::*;

use super::image::{AER, Image, MSI, PCIE, PM};
use super::*;

fn error(image: &Image) -> ConfigSpaceError {
    ConfigSpace::new(&image.0).unwrap_err()
}

#[test]
fn sizes() {
    for size in [0, 64, 255, 257, 4095, 8192] {
        let mut image = Image::bare(256);
        image.0.config.resize(size, 0);
        assert_eq!(error(&image), ConfigSpaceError::Size(size));
    }
}

#[test]
fn nobody_there() {
    let mut image = Image::bare(256);
    image.0.config.fill(0xff);
    assert_eq!(error(&image), ConfigSpaceError::NotPresent(0xffff));
    image.0.config.fill(0);
    assert_eq!(error(&image), ConfigSpaceError::NotPresent(0));
}

#[test]
fn bridges() {
    let mut image = Image::bare(256);
    image.put(0x0e, &[0x81]);
    assert_eq!(error(&image), ConfigSpaceError::HeaderType(1));
}

#[test]
fn loops() {
    let mut image = Image::bare(256);
    image
        .link(0x34, 0x40)
        .standard(0x40, 0x09, 0x40)
        .put(0x42, &[3]);
    assert_eq!(error(&image), ConfigSpaceError::CapabilityLoop { at: 0x40 });

    let mut image = Image::nvme();
    image.standard(MSI, 0x05, PM);
    assert_eq!(
        error(&image),
        ConfigSpaceError::CapabilityLoop { at: PM as usize }
    );

    let mut image = Image::nvme();
    image.extended(0x300, 0x7777, 0x100);
    assert_eq!(
        error(&image),
        ConfigSpaceError::CapabilityLoop { at: 0x100 }
    );
}

#[test]
fn pointers_into_the_header() {
    let mut image = Image::bare(256);
    image.link(0x34, 0x3c);
    assert!(matches!(
        error(&image),
        ConfigSpaceError::CapabilityPointer { at: 0x3c, .. }
    ));

    let mut image = Image::nvme();
    image.extended(AER, 1, 0xfc);
    assert!(matches!(
        error(&image),
        ConfigSpaceError::CapabilityPointer { at: 0xfc, .. }
    ));
}

#[test]
fn reserved_bits_of_pointers_are_no_part_of_them() {
    let mut image = Image::bare(256);
    image.link(0x34, 0x43).standard(0x40, 0x01, 0x03);
    assert_eq!(standard(&ConfigSpace::new(&image.0).unwrap()), [(1, 0x40)]);
}

#[test]
fn structures_that_leave_the_space() {
    let mut image = Image::bare(256);
    image.link(0x34, 0xfc).standard(0xfc, 0x01, 0);
    assert!(matches!(
        error(&image),
        ConfigSpaceError::CapabilityOutside { at: 0xfc, .. }
    ));

    let mut image = Image::bare(256);
    image
        .link(0x34, 0xf0)
        .standard(0xf0, 0x09, 0)
        .put(0xf2, &[17]);
    assert!(matches!(
        error(&image),
        ConfigSpaceError::CapabilityOutside { length: 17, .. }
    ));

    for id in [0x01, 0x03, 0x0b] {
        let mut image = Image::nvme();
        image.extended(0x100, id, 0xffc).extended(0xffc, id, 0);
        // The first is long enough.
        image.put_u32(0x104, 8 << 20);
        assert!(matches!(
            error(&image),
            ConfigSpaceError::CapabilityOutside { at: 0xffc, .. }
        ));
    }
}

#[test]
fn structures_that_overlap() {
    let mut image = Image::nvme();
    image
        .standard(PM, 0x01, PM + 4)
        .standard(PM + 4, 0x09, 0)
        .put(PM as usize + 6, &[4]);
    assert!(matches!(
        error(&image),
        ConfigSpaceError::CapabilityOverlap { other: 0x44, .. }
    ));

    // A hidden one counts as well.
    let mut image = Image::nvme();
    image.standard(PCIE, 0x10, 0x84).standard(0x84, 0x03, 0);
    assert!(matches!(
        error(&image),
        ConfigSpaceError::CapabilityOverlap { other: 0x84, .. }
    ));

    let mut image = Image::nvme();
    image
        .extended(AER, 0x01, AER + 0x28)
        .extended(AER + 0x28, 0x1e, 0);
    assert!(matches!(
        error(&image),
        ConfigSpaceError::CapabilityOverlap { .. }
    ));
}

#[test]
fn structures_too_short_to_be() {
    let mut image = Image::bare(256);
    image
        .link(0x34, 0x40)
        .standard(0x40, 0x09, 0)
        .put(0x42, &[2]);
    assert!(matches!(
        error(&image),
        ConfigSpaceError::CapabilityTooShort { length: 2, .. }
    ));

    let mut image = Image::nvme();
    image.extended(0x100, 0x0b, 0).put_u32(0x104, 7 << 20);
    assert!(matches!(
        error(&image),
        ConfigSpaceError::CapabilityTooShort { length: 7, .. }
    ));
}

#[test]
fn twins() {
    let mut image = Image::bare(256);
    image
        .link(0x34, 0x40)
        .standard(0x40, 0x01, 0x50)
        .standard(0x50, 0x01, 0);
    assert!(matches!(
        error(&image),
        ConfigSpaceError::CapabilityTwice { at: 0x50, .. }
    ));
}

#[test]
fn messages_name_what_is_wrong() {
    let mut image = Image::bare(256);
    image.link(0x34, 0xfc).standard(0xfc, 0x01, 0);
    assert_eq!(
        error(&image).to_string(),
        "the power management capability at 0xfc has 8 bytes and extends past the configuration space"
    );
}

proptest! {
    /// For any corruption of a valid image, `new` returns, and a guest's walk of the
    /// resulting lists terminates.
    #[test]
    fn broken_images_never_panic_or_hang(
        edits in prop::collection::vec((0..0x400_usize, any::<u8>()), 1..40),
    ) {
        let mut image = Image::nvme();
        for (at, value) in edits {
            image.put(at, &[value]);
        }
        if let Ok(mut space) = ConfigSpace::new(&image.0) {
            standard(&space);
            extended(&space);
            space.write(0, &[0xff; 4096]);
            space.reset();
        }
    }

    #[test]
    fn noise_never_panics_or_hangs(mut noise in prop::collection::vec(any::<u8>(), 4096)) {
        let mut image = Image::nvme();
        noise[..0x34].copy_from_slice(&image.0.config[..0x34]);
        image.0.config = noise;
        if let Ok(space) = ConfigSpace::new(&image.0) {
            standard(&space);
            extended(&space);
        }
    }
}
