//! Registers of physical functions, which go to the device.

use proptest::prelude::*;

use farside_pci::Piece;

use super::image::{AER, Image, MSI, PCIE, PM, VENDOR, VPD};
use super::*;

fn function() -> ConfigSpace {
    ConfigSpace::of_function(&Image::nvme().0).unwrap()
}

fn piece(offset: u64, len: u8) -> Piece {
    Piece::new(offset as u16, len).unwrap()
}

/// What the device is asked for.
fn reads(space: &ConfigSpace, offset: u64, len: usize) -> Vec<Piece> {
    space.reads(offset, len).collect()
}

/// What the device is written.
fn forwarded(space: &ConfigSpace, offset: u64, data: &[u8]) -> Vec<(Piece, u32)> {
    space.stage(offset, data).forwarded().to_vec()
}

#[test]
fn a_model_is_asked_for_nothing() {
    let space = ConfigSpace::new(&Image::nvme().0).unwrap();
    for offset in (0..4096).step_by(4) {
        assert_eq!(reads(&space, offset, 4), []);
        assert_eq!(forwarded(&space, offset, &[0xff; 4]), []);
    }
    let names: Vec<_> = space.hidden().iter().map(|it| it.name).collect();
    assert!(names.contains(&"vital product data"), "{names:?}");
}

#[test]
fn a_read_is_the_devices_where_the_bits_are_its_own() {
    let space = function();
    assert_eq!(reads(&space, 0, 4), [], "ids");
    assert_eq!(reads(&space, PCIE + 0x12, 2), [piece(PCIE + 0x12, 2)]);
    let mut data = [0; 4];
    space.read(PCIE + 0x10, &mut data);
    assert_eq!(data, [0, 0, 0x43, 0x10], "as the lender has read it");
    // The link has become slower, and reports that in an event bit.
    space.merge(piece(PCIE + 0x12, 2), 0xd041, PCIE + 0x10, &mut data);
    assert_eq!(data, [0, 0, 0x41, 0x10]);
}

#[test]
fn a_write_goes_to_the_device_in_the_bits_that_are_forwarded() {
    let mut space = function();
    let at = PCIE + 8;
    // All of device control but for the reset, and status.
    let control = piece(at, 2);
    assert_eq!(
        forwarded(&space, at, &[0xff, 0x7f, 0xff, 0xff]),
        [(control, 0x7010)]
    );
    write_u16(&mut space, at, 0x50e7);
    assert_eq!(
        read_u16(&space, at),
        0x28f7 & !0x7010 & !0x0800 | 0x2010,
        "MRRS is the device's"
    );
    for (offset, data) in [
        (4, &[0xff; 2][..]),
        (0x10, &[0xff; 4]),
        (PM + 4, &[3]),
        (MSI + 4, &[0xff; 8]),
    ] {
        assert_eq!(forwarded(&space, offset, data), [], "{offset:#x}");
    }
    assert_eq!(forwarded(&space, AER + 8, &[0xff; 4]), []);
    assert_eq!(
        forwarded(&space, VENDOR + 4, &[1, 2, 3, 4]),
        [(piece(VENDOR + 4, 4), 0x0403_0201)]
    );
}

#[test]
fn a_write_that_resets_goes_nowhere_else() {
    let staged = function().stage(PCIE + 8, &[0xff, 0xff]);
    assert!(staged.effects().reset().is_some());
    assert_eq!(staged.forwarded(), []);
}

#[test]
fn vital_product_data_is_read_and_not_written() {
    let space = function();
    assert!(standard(&space).contains(&(0x03, VPD)));
    // A read of the third dword.
    assert_eq!(
        forwarded(&space, VPD + 2, &[8, 0]),
        [(piece(VPD + 2, 2), 8)]
    );
    // A write of it: without flag, so the device reads.
    assert_eq!(forwarded(&space, VPD + 4, &[1; 4]), []);
    assert_eq!(
        forwarded(&space, VPD + 2, &[8, 0x80]),
        [(piece(VPD + 2, 2), 8)]
    );
    assert_eq!(
        reads(&space, VPD, 8),
        [piece(VPD + 2, 2), piece(VPD + 4, 4)]
    );
    let mut data = [0; 8];
    space.merge(piece(VPD + 4, 4), 0x6463_6261, VPD, &mut data);
    assert_eq!(&data, b"\0\0\0\0abcd");
}

#[test]
fn sizes_of_a_resizable_bar_are_the_one_it_has() {
    let mut image = Image::nvme();
    image
        .extended(0x300, 0x15, 0)
        // Two BARs: 0 of 8 GiB that could have more, 2 of 512 TiB.
        .put_u32(0x304, 0xffff_fff0)
        .put_u32(0x308, 0xffff_0000 | 13 << 8 | 2 << 5)
        .put_u32(0x30c, 0xffff_fff0)
        .put_u32(0x310, 29 << 8 | 2 << 5 | 2);
    let mut space = ConfigSpace::of_function(&image.0).unwrap();
    write_u32(&mut space, 0x308, !0);
    let registers = [0x304, 0x308, 0x30c, 0x310].map(|at| read_u32(&space, at));
    assert_eq!(
        registers,
        [1 << 17, 13 << 8 | 2 << 5, 0, 2 << 16 | 29 << 8 | 2]
    );
    image.put_u32(0x308, 7 << 5);
    assert!(ConfigSpace::new(&image.0).is_err(), "seven BARs");
}

#[test]
fn a_reset_returns_what_is_emulated() {
    let mut space = function();
    write_u16(&mut space, PCIE + 8, 0x00e0);
    space.reset();
    assert_eq!(space.bytes, function().bytes);
}

proptest! {
    /// The law: no write forwards a bit that is emulated or refused.
    #[test]
    fn no_write_forwards_a_bit_of_another_class(
        offset in 0..5000_u64, data in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let mut space = function();
        for (piece, value) in forwarded(&space, offset, &data) {
            for (n, at) in piece.range().enumerate() {
                let sent = value.to_le_bytes()[n];
                let theirs = space.forwarding.write_mask()[at];
                prop_assert_eq!(sent & !theirs, 0);
                prop_assert_eq!(sent & (space.writable[at] | space.clearable[at]), 0);
                prop_assert_eq!(sent, data[at - offset as usize] & theirs);
            }
        }
        let before = space.bytes.clone();
        space.write(offset, &data);
        for at in 0..space.bytes.len() {
            let theirs = space.forwarding.read_mask()[at];
            prop_assert_eq!(before[at] & theirs, space.bytes[at] & theirs);
        }
    }
}
