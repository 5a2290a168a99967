//! Properties, against a reference that translates byte by byte.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{
    super::{Port, regs::lut},
    world::{SEGMENT, SMALL, World},
};

/// Pages of the peer's memory.
const PAGES: u64 = 64;

/// The reference's peer address of a byte of the window.
fn peer_address(luts: &BTreeMap<u32, u64>, offset: u64) -> Option<u64> {
    let entry = luts.get(&((offset / SEGMENT) as u32))?;
    let address = entry.checked_add(offset % SEGMENT)?;
    (address < PAGES * 4096).then_some(address)
}

fn entries() -> impl Strategy<Value = BTreeMap<u32, u64>> {
    let address = prop_oneof![
        4 => (0..PAGES).prop_map(|page| page * 4096),
        1 => any::<u64>().prop_map(|address| address & lut::ADDRESS),
    ];
    proptest::collection::btree_map(0..SMALL.lut_entries, address, 0..8)
}

proptest! {
    /// Every byte is stored at the address in its segment's entry or dropped, and is
    /// loaded from there or reads as all ones.
    #[test]
    fn translation_is_the_entry_of_the_segment_and_the_offset_in_it(
        luts in entries(),
        accesses in proptest::collection::vec((0..SMALL.window_size, 1..0x2800usize, any::<u8>()), 1..12),
    ) {
        let mut world = World::up();
        for page in 0..PAGES {
            world.hosts.add_page(Port::B, page * 4096);
        }
        for (segment, address) in &luts {
            world.lead(Port::A, *segment, *address);
        }
        let mut oracle = vec![0; (PAGES * 4096) as usize];
        for (offset, len, seed) in accesses {
            let len = len.min((SMALL.window_size - offset) as usize);
            let data: Vec<u8> = (0..len).map(|n| seed.wrapping_add(n as u8)).collect();
            world.store(Port::A, offset, &data);
            for (at, byte) in (offset..).zip(&data) {
                if let Some(address) = peer_address(&luts, at) {
                    oracle[address as usize] = *byte;
                }
            }
            let expected: Vec<u8> = (offset..offset + len as u64)
                .map(|at| match peer_address(&luts, at) {
                    Some(address) => oracle[address as usize],
                    None => 0xff,
                })
                .collect();
            prop_assert_eq!(world.load(Port::A, offset, len), Some(expected));
        }
        for (page, expected) in (0..).step_by(4096).zip(oracle.chunks(4096)) {
            let there = world.hosts.bytes(Port::B, page, 4096).unwrap();
            prop_assert_eq!(there, expected);
        }
    }

    /// No access, of any offset and length, panics or breaks the register file.
    #[test]
    fn no_access_panics(
        accesses in proptest::collection::vec(
            (any::<bool>(), any::<bool>(), 0..6u8, prop_oneof![0..0x10010u64, any::<u64>()], proptest::collection::vec(any::<u8>(), 0..40)),
            0..60,
        ),
    ) {
        let mut world = World::up();
        for (from_a, write, bar, offset, mut data) in accesses {
            let port = if from_a { Port::A } else { Port::B };
            if write {
                world.ntb.write(port, bar, offset, &data, &mut world.hosts);
            } else {
                let read = world.ntb.read(port, bar, offset, &mut data, &mut world.hosts);
                prop_assert_eq!(read, super::super::Read::Done);
            }
        }
        for port in Port::BOTH {
            prop_assert_eq!(world.get32(port, 0), super::super::regs::ID);
        }
    }
}
