//! A mostly valid configuration-space image, and guest accesses to the configuration space
//! built from it.
//!
//! Input: a byte that selects a 256-byte image or a longer one (bit 0), of a software model or a physical function (bit 1), a byte with the number of
//! image bytes to change, each change as two bytes of offset and a value; then accesses,
//! see [`run`].
//!
//! Invariants: no panic; capability-list walks terminate; the identity registers do not
//! change; a write has exactly the reported effect; a refused bus-master bit reads as
//! clear; a reset restores the initial contents; what goes to a function is aligned, in the access, and none of the header.

use farside_config_space::{ConfigSpace, Edge};
use farside_pci::Piece;

use crate::image::Image;
use crate::input::Input;

/// Builds the space of `input` and performs its accesses.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let mut image = Image::nvme();
    let selector = input.u8();
    if selector & 1 != 0 {
        image.0.config.truncate(256);
    }
    for _ in 0..input.u8() {
        let at = usize::from(input.u16()) % image.0.config.len();
        image.put(at, &[input.u8()]);
    }
    let space = match selector & 2 {
        0 => ConfigSpace::new(&image.0),
        _ => ConfigSpace::of_function(&image.0),
    };
    let Ok(mut space) = space else { return };
    let fresh = bytes(&space);
    walk(&fresh);

    while !input.is_empty() {
        let op = input.u8();
        let offset = input.u16();
        // Occasionally far out of bounds.
        let offset = if op & 0x80 != 0 {
            u64::MAX - u64::from(offset)
        } else {
            offset.into()
        };
        let length = usize::from(input.u8());
        match op & 3 {
            0 => read(&space, offset, length),
            1 => write(&mut space, offset, input.bytes(length), false),
            2 => write(&mut space, offset, input.bytes(length), true),
            _ => {
                space.reset();
                assert_eq!(bytes(&space), fresh);
                assert!(!space.may_dma());
            }
        }
        let now = bytes(&space);
        assert_eq!(now[..4], fresh[..4], "identity");
        walk(&now);
    }
}

fn read(space: &ConfigSpace, offset: u64, length: usize) {
    let mut data = vec![0; length];
    space.read(offset, &mut data);
    for piece in space.reads(offset, length) {
        check(piece, offset, length);
        space.merge(piece, u32::MAX, offset, &mut data);
    }
}

/// A part of an access, for the device.
fn check(piece: Piece, offset: u64, length: usize) {
    assert_eq!(Piece::new(piece.offset, piece.len), Some(piece));
    let range = piece.range();
    assert!(range.start >= 0x40, "of the header");
    assert!(range.start as u64 >= offset && range.end as u64 <= offset + length as u64);
}

fn write(space: &mut ConfigSpace, offset: u64, data: &[u8], refuse: bool) {
    let before = space.clone();
    let mut staged = space.stage(offset, data);
    assert_eq!(bytes(space), bytes(&before), "staging does nothing");
    for (piece, _) in staged.forwarded() {
        check(*piece, offset, data.len());
    }
    let promised = staged.effects().clone();
    let dma = staged.dma();
    if refuse && dma == Edge::Rising {
        staged.refuse_bus_master();
        space.commit(staged);
        assert!(!space.bus_master() && !space.may_dma());
        return;
    }
    let done = space.commit(staged);
    assert_eq!(done, promised);
    assert_eq!(dma, Edge::between(before.may_dma(), space.may_dma()));
    assert_eq!(
        done.bus_master(),
        Edge::between(before.bus_master(), space.bus_master())
    );
    if done.reset().is_some() {
        assert!(!space.bus_master());
    }
}

fn bytes(space: &ConfigSpace) -> Vec<u8> {
    let mut bytes = vec![0; space.size() as usize];
    space.read(0, &mut bytes);
    bytes
}

/// Walks both capability lists as a guest does.
fn walk(bytes: &[u8]) {
    let mut at = usize::from(bytes[0x34]);
    for steps in 0.. {
        if at == 0 {
            break;
        }
        assert!(steps < 48 && at >= 0x40, "a list that does not end");
        at = usize::from(bytes[at + 1]);
    }
    let mut at = if bytes.len() > 256 { 256 } else { 0 };
    for steps in 0.. {
        if at == 0 {
            break;
        }
        assert!(steps < 960 && at >= 256, "a list that does not end");
        at = usize::from(u16::from_le_bytes([bytes[at + 2], bytes[at + 3]]) >> 4);
    }
}
