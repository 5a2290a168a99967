use std::convert::Infallible;

use proptest::prelude::*;

use super::*;
use crate::policy::{EXTENDED, EXTENDED_GAPS, HEADER, STANDARD};

/// Every visible capability, in a place of its own, with 16 bytes of body where the length varies.
fn full() -> ConfigImage {
    let mut image = ConfigImage::endpoint(0x1af4, 0x10f0, 0x01_08_02, &Default::default());
    image.add_power_management(0x40);
    image.add_capability(0x48, 0x03);
    image
        .add_capability(0x50, CAP_ID_VNDR)
        .set_u8(0x52, 12)
        // 0x5c to 0x5f are in no capability.
        .add_express(0x60, 4);
    image.add_capability(0xa0, 0x13);
    image.add_capability(0xa8, CAP_ID_MSI).set_u16(0xaa, 0x0180);
    // Hidden, and what follows it.
    image.add_capability(0xc0, 0x08);
    image.add_msix(0xe0, 4, 0, 0, 0x800);
    image.add_extended_capability(0x100, 0x01);
    image.add_extended_capability(0x140, 0x10);
    image
        .add_extended_capability(0x180, 0x0b)
        .set_u32(0x184, 24 << 20);
    image.add_extended_capability(0x1a0, 0x0f);
    image
}

/// What the device is asked for, and where.
fn pieces(found: impl Iterator<Item = Piece>) -> Vec<(u16, u8)> {
    found.map(|piece| (piece.offset, piece.len)).collect()
}

/// How often each bit of a structure is in a row.
fn rows(fields: &[Field], length: usize) -> Vec<[u8; 8]> {
    let mut rows = vec![[0; 8]; length];
    for field in fields {
        let (bytes, mask) = match field.extent {
            Extent::Bits(bytes, mask) => (bytes, mask.into()),
            Extent::Bytes(bytes) => (bytes, u64::MAX),
            Extent::Rest => (length - field.at, u64::MAX),
        };
        for n in 0..bytes {
            for (bit, count) in rows[field.at + n].iter_mut().enumerate() {
                let is_set = n >= 8 || mask >> (8 * n + bit) & 1 == 1 || mask == u64::MAX;
                *count += u8::from(is_set);
            }
        }
    }
    rows
}

#[test]
fn every_bit_is_in_one_row() {
    let shown = [STANDARD, EXTENDED].into_iter().flatten();
    let shown = shown.filter_map(|rule| match rule.treatment {
        Treatment::Show(shown) => Some((rule.name, shown)),
        Treatment::Hide(_) => None,
    });
    let mut all = vec![("header", HEADER, STD_HEADER_SIZEOF)];
    let image = full();
    for (name, shown) in shown {
        // Those of variable length have a rest, and are as long as in the image.
        let length = match shown {
            Shown::PciExpress => 0x3c,
            Shown::Msi => 0x18,
            Shown::VendorSpecific => 12,
            Shown::VendorSpecificExtended => 24,
            Shown::ResizableBar => 12,
            shown => shown.length(&image, 0x40).unwrap(),
        };
        all.push((name, shown.fields(), length));
    }
    for (name, fields, length) in all {
        for (at, row) in rows(fields, length).into_iter().enumerate() {
            assert_eq!(row, [1; 8], "{name}, byte {at:#x}: each bit in one row");
        }
        for field in fields {
            assert!(!field.reason.is_empty(), "{name}: {field:?}");
            if let Extent::Bits(bytes, mask) = field.extent {
                assert!(u64::from(mask) < 1 << (8 * bytes), "{name}: {field:?}");
            }
        }
    }
}

/// A write to a forwarded bit keeps the emulated and constant bits of its register as they are at the device, which must
/// not be an event: bits that a write of 1 clears or starts.
#[test]
fn registers_with_forwarded_bits_have_no_events_to_keep() {
    for rule in [STANDARD, EXTENDED].into_iter().flatten() {
        let Treatment::Show(shown) = rule.treatment else {
            continue;
        };
        let forwarded = |field: &&Field| field.class == Class::Forwarded;
        let places: Vec<usize> = shown
            .fields()
            .iter()
            .filter(forwarded)
            .map(|it| it.at)
            .collect();
        for field in shown.fields() {
            let kept = matches!(field.class, Class::Emulated | Class::Constant);
            if kept && places.contains(&field.at) {
                // Reads as 0 (PCIe 7.5.3.4).
                let is_known = shown == Shown::PciExpress && field.at == EXP_DEVCTL;
                assert!(is_known, "{}: {field:?}: is it an event?", rule.name);
            }
        }
    }
}

#[test]
fn registers_are_asked_for_as_the_guest_does() {
    let it = Forwarding::of(&full());
    assert_eq!(pieces(it.reads(0, 8)), [], "ids, command and status");
    assert_eq!(pieces(it.reads(0x10, 8)), [], "BARs");
    assert_eq!(
        pieces(it.reads(0x68, 4)),
        [(0x68, 4)],
        "device control and status"
    );
    assert_eq!(
        pieces(it.reads(0x6a, 2)),
        [(0x6a, 1)],
        "Transactions Pending"
    );
    assert_eq!(pieces(it.reads(0x72, 2)), [(0x72, 2)], "link status");
    assert_eq!(
        pieces(it.reads(0x70, 4)),
        [(0x72, 2)],
        "link control is emulated"
    );
    assert_eq!(pieces(it.reads(0x48, 8)), [(0x4a, 2), (0x4c, 4)], "VPD");
    assert_eq!(pieces(it.reads(0x51, 3)), [(0x53, 1)]);
    assert_eq!(
        pieces(it.reads(0x5a, 4)),
        [(0x5a, 2), (0x5c, 2)],
        "device-specific"
    );
    assert_eq!(pieces(it.reads(0x44, 4)), [], "power state");
    assert_eq!(pieces(it.reads(0xa8, 4)), [], "MSI");
    assert_eq!(pieces(it.reads(0xc0, 4)), [], "hidden");
    assert_eq!(pieces(it.reads(0xd0, 4)), [], "after what is hidden");
    assert_eq!(pieces(it.reads(0xe0, 8)), [], "MSI-X");
    assert_eq!(pieces(it.reads(0xec, 4)), [(0xec, 4)], "device-specific");
    assert_eq!(pieces(it.reads(0x148, 4)), [], "SR-IOV");
    assert_eq!(pieces(it.reads(0x184, 8)), [(0x188, 4)], "VSEC");
    assert_eq!(pieces(it.reads(0x300, 4)), [], "no capability");
    assert_eq!(pieces(it.reads(0, 4096)), [], "a VMM's copy");
}

#[test]
fn writes_reach_the_device_where_it_has_bits_of_the_guest() {
    let it = Forwarding::of(&full());
    assert_eq!(
        pieces(it.writes(0x68, 4)),
        [(0x68, 2)],
        "device status is not written"
    );
    assert_eq!(pieces(it.writes(0x69, 1)), [(0x69, 1)]);
    assert_eq!(pieces(it.writes(0x6a, 2)), []);
    assert_eq!(pieces(it.writes(0x70, 4)), [], "link control and status");
    assert_eq!(
        pieces(it.writes(0x48, 8)),
        [(0x4a, 2)],
        "VPD data is not written"
    );
    assert_eq!(pieces(it.writes(0x44, 4)), []);
    for offset in (0..0x40)
        .chain(0xa8..0xec)
        .chain(0x100..0x188)
        .chain(0x198..0x1000)
    {
        assert_eq!(pieces(it.writes(offset, 1)), [], "{offset:#x}");
    }
    assert_eq!(
        it.settings(),
        [Piece {
            offset: 0x68,
            len: 2
        }]
    );
}

#[test]
fn a_register_is_written_with_its_other_bits_as_they_are() {
    let it = Forwarding::of(&full());
    let value = |offset, len, wanted, now| {
        let piece = Piece { offset, len };
        it.value(piece, wanted, || Ok::<_, Infallible>(now))
            .unwrap()
    };
    // MRRS and relaxed ordering are the guest's; payload size and FLR are not.
    assert_eq!(value(0x68, 2, 0xffff, 0x2830), 0x7830);
    assert_eq!(value(0x68, 2, 0x0000, 0x2830), 0x0820);
    // Flag F is never written 1, which would start a write, though it is 1 at the device.
    assert_eq!(value(0x4a, 2, 0x8010, 0x8000), 0x0010);
    let unread = |_| -> Result<u32, ()> { panic!("nothing is kept") };
    let piece = Piece {
        offset: 0x188,
        len: 4,
    };
    assert_eq!(it.value(piece, 0x1234_5678, || unread(())), Ok(0x1234_5678));
    assert_eq!(
        it.readable(Piece {
            offset: 0x10,
            len: 4
        }),
        None
    );
    assert_eq!(
        it.writable(Piece {
            offset: 0x04,
            len: 2
        }),
        None
    );
}

#[test]
fn pieces_are_aligned_and_inside() {
    assert_eq!(
        Piece::new(0x10, 4),
        Some(Piece {
            offset: 0x10,
            len: 4
        })
    );
    for (offset, len) in [
        (1, 2),
        (2, 4),
        (0, 0),
        (0, 3),
        (0, 8),
        (0x1000, 1),
        (0xffff, 1),
    ] {
        assert_eq!(Piece::new(offset, len), None, "{offset:#x}, {len}");
    }
    let it = Forwarding::of(&full()[..256]);
    assert_eq!(
        it.readable(Piece {
            offset: 0x188,
            len: 4
        }),
        None,
        "past the space"
    );
}

#[test]
fn a_malformed_image_forwards_less() {
    for size in [0, 1, 64, 255, 257, 4095] {
        assert_eq!(Forwarding::of(&vec![0xff; size]), Forwarding::none(size));
    }
    // A list that loops, one that points into the header, and one that overlaps.
    let mut image = full();
    image.set_u8(0x51, 0x40);
    assert_eq!(Forwarding::of(&image).settings(), []);
    let mut image = full();
    image.set_u8(0x41, 0x20);
    let it = Forwarding::of(&image);
    assert_eq!(it, Forwarding::none(4096), "nothing is known of the rest");
    let mut image = full();
    image.set_u8(0x52, 0xff);
    let it = Forwarding::of(&image);
    assert_eq!(
        pieces(it.writes(0x5c, 4)),
        [(0x5c, 4)],
        "vendor-specific up to the next"
    );
    assert_eq!(pieces(it.writes(0x64, 4)), [], "the next");
}

#[test]
fn the_documentation_has_the_table() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/configuration-space.md"
    );
    let text = std::fs::read_to_string(path).unwrap();
    let mark = "<!-- The rest is generated from fabric/pci/src/policy.rs. -->\n";
    let (head, rest) = text.split_once(mark).expect("the page has the mark");
    if std::env::var_os("FARSIDE_WRITE_DOCS").is_some() {
        std::fs::write(path, format!("{head}{mark}{}", policy::markdown())).unwrap();
    } else {
        let fix = "run this test with FARSIDE_WRITE_DOCS=1, which writes it";
        assert!(
            rest == policy::markdown(),
            "docs/configuration-space.md is out of date: {fix}"
        );
    }
    assert_eq!(EXTENDED_GAPS.class, Class::Constant);
}

/// Bits that must not be written by a borrower, of [`full`].
fn is_refused(at: usize, bit: u32) -> bool {
    let bit = 1u8 << bit;
    match at {
        0x68 => bit != 0x10,
        0x69 => bit & 0x70 == 0,
        // VPD: the address is the guest's, the flag is not.
        0x4a => false,
        0x4b => bit == 0x80,
        0x00..=0x49
        | 0x4c..0x53
        | 0x60..0x68
        | 0x6a..0x9c
        | 0xa0..0xec
        | 0x100..0x188
        | 0x198.. => true,
        _ => false,
    }
}

proptest! {
    /// The law: what is written to the device differs from what it had in bits of the guest alone, whatever the borrower
    /// asks for.
    #[test]
    fn no_write_changes_a_bit_that_is_not_the_guests(
        offset in 0..4200_u64, data in prop::collection::vec(any::<u8>(), 0..40), now in any::<u32>(),
    ) {
        let it = Forwarding::of(&full());
        for piece in it.writes(offset, data.len()) {
            let at = usize::from(piece.offset) - offset as usize;
            let mut wanted = [0; 4];
            wanted[..piece.len.into()].copy_from_slice(&data[at..at + usize::from(piece.len)]);
            let now = now & u32::MAX >> (32 - 8 * u32::from(piece.len));
            let new = it.value(piece, u32::from_le_bytes(wanted), || Ok::<_, Infallible>(now)).unwrap();
            for (n, at) in piece.range().enumerate() {
                for bit in 0..8 {
                    let place = 8 * n as u32 + bit;
                    let (was, is) = (now >> place & 1, new >> place & 1);
                    let wants = u32::from_le_bytes(wanted) >> place & 1;
                    match is_refused(at, bit) {
                        // A status bit is written 0.
                        true => prop_assert!(is == was || is == 0 && at == 0x4b, "{at:#x}.{bit}"),
                        false => prop_assert_eq!(is, wants, "{:#x}.{}", at, bit),
                    }
                }
            }
        }
    }

    #[test]
    fn pieces_cover_the_devices_bytes_of_an_access_and_no_others(
        offset in 0..4200_u64, len in 0..9_usize,
    ) {
        let it = Forwarding::of(&full());
        let mut covered = vec![false; 4096];
        for piece in it.reads(offset, len) {
            prop_assert!(Piece::new(piece.offset, piece.len) == Some(piece));
            prop_assert!(it.readable(piece).is_some());
            for at in piece.range() {
                prop_assert!(!std::mem::replace(&mut covered[at], true));
                prop_assert!((offset..offset + len as u64).contains(&(at as u64)));
            }
        }
        for at in (offset..offset + len as u64).filter(|&at| at < 4096) {
            prop_assert!(covered[at as usize] || it.read_mask()[at as usize] == 0);
        }
    }

    #[test]
    fn any_image_is_fine(bytes in prop::collection::vec(any::<u8>(), 4096), small in any::<bool>()) {
        let size = if small { 256 } else { 4096 };
        let it = Forwarding::of(&bytes[..size]);
        for at in 0..size {
            prop_assert_eq!(it.write_mask()[at] & !it.read_mask()[at], 0);
            prop_assert!(at >= 0x40 || it.read_mask()[at] == 0);
        }
    }
}
