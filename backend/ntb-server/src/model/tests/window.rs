//! Translation and refusal of accesses through a window.

use farside_fabric::PeerAddress;

use super::{
    super::{
        PeerError, Port, Target,
        regs::{error, event, link_control, lut_entry, reg, requester, requester_entry},
    },
    world::{SEGMENT, SMALL, World},
};

const FAR: u64 = 0x12_3456_7000;

fn connected() -> World {
    let mut world = World::up();
    world.hosts.add_page(Port::B, FAR);
    world.lead(Port::A, 3, FAR);
    world
}

#[test]
fn a_store_reaches_the_peer_address_and_a_load_finds_it() {
    for len in 1..=8 {
        let mut world = connected();
        let data: Vec<u8> = (1..=len).collect();
        let at = 3 * SEGMENT + 0x123;
        world.store(Port::A, at, &data);
        let there = world.hosts.bytes(Port::B, FAR + 0x123, len.into()).unwrap();
        assert_eq!(there, data);
        assert_eq!(world.load(Port::A, at, len.into()), Some(data));
        assert_eq!(world.get64(Port::A, reg::WINDOW_WRITES), 1);
        assert_eq!(world.get64(Port::A, reg::WINDOW_READS), 1);
        assert_eq!(world.get32(Port::A, reg::ERROR_COUNT), 0);
    }
}

#[test]
fn windows_of_both_ports_are_apart() {
    let mut world = connected();
    world.hosts.add_page(Port::A, 0x5000);
    world.lead(Port::B, 3, 0x5000);
    world.store(Port::A, 3 * SEGMENT, b"to B");
    world.store(Port::B, 3 * SEGMENT, b"to A");
    assert_eq!(world.hosts.bytes(Port::B, FAR, 4).unwrap(), b"to B");
    assert_eq!(world.hosts.bytes(Port::A, 0x5000, 4).unwrap(), b"to A");
}

#[test]
fn an_access_over_two_segments_is_split_between_them() {
    let mut world = connected();
    world.hosts.add_page(Port::B, 0x10_f000);
    world.lead(Port::A, 2, 0x10_0000);
    world.store(Port::A, 3 * SEGMENT - 3, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(world.hosts.bytes(Port::B, 0x10_fffd, 3).unwrap(), [1, 2, 3]);
    assert_eq!(world.hosts.bytes(Port::B, FAR, 5).unwrap(), [4, 5, 6, 7, 8]);
    assert_eq!(
        world.load(Port::A, 3 * SEGMENT - 3, 8),
        Some(vec![1, 2, 3, 4, 5, 6, 7, 8])
    );
}

#[test]
fn a_burst_is_split_at_pages_and_only_what_is_refused_is_lost() {
    let mut world = connected();
    world.hosts.add_page(Port::B, FAR + 0x2000);
    let burst: Vec<u8> = (0..0x3000u32).map(|n| (n % 251) as u8 + 1).collect();
    world.store(Port::A, 3 * SEGMENT, &burst);
    world.assert_refused(Port::A, 1, error::PEER_REFUSED, true);
    assert_eq!(
        world.get64(Port::A, reg::ERROR_OFFSET),
        3 * SEGMENT + 0x1000
    );
    assert_eq!(world.get64(Port::A, reg::ERROR_ADDRESS), FAR + 0x1000);
    let read = world.load(Port::A, 3 * SEGMENT, 0x3000).unwrap();
    assert_eq!(read[..0x1000], burst[..0x1000]);
    assert!(read[0x1000..0x2000].iter().all(|byte| *byte == 0xff));
    assert_eq!(read[0x2000..], burst[0x2000..]);
}

/// Makes an access in both directions and checks that it is refused.
#[track_caller]
fn assert_refuses(world: &mut World, offset: u64, reason: u32) {
    world.hosts.take_raised();
    world.put32(Port::A, reg::EVENT_STATUS, !0);
    world.put32(Port::A, reg::ERROR_COUNT, 0);
    world.store(Port::A, offset, &[1, 2, 3, 4]);
    world.assert_refused(Port::A, 1, reason, true);
    assert_eq!(world.load(Port::A, offset, 4), Some(vec![0xff; 4]));
    world.assert_refused(Port::A, 2, reason, false);
    assert_eq!(world.get64(Port::A, reg::ERROR_OFFSET), offset);
    assert_eq!(world.get32(Port::A, reg::EVENT_STATUS), event::ERROR);
    // One interrupt for both: the event was not yet cleared at the second.
    assert_eq!(world.hosts.take_raised(), [(Port::A, 32)]);
    if let Some(bytes) = world.hosts.bytes(Port::B, FAR, 4) {
        assert_eq!(bytes, [0; 4]);
    }
}

#[test]
fn an_entry_that_is_not_valid_refuses() {
    let mut world = connected();
    assert_refuses(&mut world, 4 * SEGMENT, error::LUT_INVALID);
    world.put64(Port::A, lut_entry(3), FAR);
    assert_refuses(&mut world, 3 * SEGMENT, error::LUT_INVALID);
}

#[test]
fn a_link_that_is_down_refuses() {
    let mut world = connected();
    world.put32(Port::B, reg::LINK_CONTROL, 0);
    assert_refuses(&mut world, 3 * SEGMENT, error::LINK_DOWN);
    world.put32(Port::B, reg::LINK_CONTROL, link_control::ENABLE);
    world.ntb.set_present(Port::B, false, &mut world.hosts);
    assert_refuses(&mut world, 3 * SEGMENT, error::LINK_DOWN);
}

#[test]
fn without_a_requester_entry_all_is_refused() {
    let mut world = connected();
    world.put32(Port::A, requester_entry(0), 0x0100);
    assert_refuses(&mut world, 3 * SEGMENT, error::NO_REQUESTER);
    world.put32(Port::A, requester_entry(31), requester::VALID | 8);
    world.store(Port::A, 3 * SEGMENT, &[9]);
    assert_eq!(world.hosts.bytes(Port::B, FAR, 1).unwrap(), [9]);
}

#[test]
fn a_peer_port_that_is_no_bus_master_refuses() {
    let mut world = connected();
    world.ntb.set_bus_master(Port::B, false, &mut world.hosts);
    assert_refuses(&mut world, 3 * SEGMENT, error::NOT_BUS_MASTER);
    // The accessing port's own bit does not matter.
    world.ntb.set_bus_master(Port::B, true, &mut world.hosts);
    world.ntb.set_bus_master(Port::A, false, &mut world.hosts);
    world.store(Port::A, 3 * SEGMENT, &[9]);
    assert_eq!(world.hosts.bytes(Port::B, FAR, 1).unwrap(), [9]);
}

#[test]
fn an_unmapped_peer_address_is_refused() {
    let mut world = connected();
    assert_refuses(&mut world, 3 * SEGMENT + 0x1000, error::PEER_REFUSED);
    assert_eq!(world.get64(Port::A, reg::ERROR_ADDRESS), FAR + 0x1000);
}

#[test]
fn a_peer_address_beyond_the_end_refuses() {
    let mut world = connected();
    world.lead(Port::A, 5, u64::MAX - 0xfff);
    assert_refuses(&mut world, 5 * SEGMENT + 0x1000, error::ADDRESS);
    // The last page itself is a valid address.
    assert_refuses(&mut world, 5 * SEGMENT, error::PEER_REFUSED);
}

#[test]
fn beyond_the_bar_there_is_nothing() {
    let mut world = connected();
    let end = SMALL.window_size;
    for offset in [end - 3, end, u64::MAX - 3, u64::MAX] {
        world.store(Port::A, offset, &[1, 2, 3, 4]);
        assert_eq!(world.load(Port::A, offset, 4), Some(vec![0xff; 4]));
    }
    assert_eq!(world.get32(Port::A, reg::ERROR_COUNT), 0);
}

#[test]
fn a_slow_read_is_answered_later() {
    let mut world = connected();
    world.hosts.add_slow_page(Port::B, FAR + 0x1000);
    let offset = 3 * SEGMENT + 0x1010;
    assert_eq!(world.load(Port::A, offset, 8), None);
    let target = Target {
        from: Port::A,
        offset,
        address: PeerAddress::new(FAR + 0x1010),
    };
    assert_eq!(world.hosts.asked.take(), Some((target, 8)));
    // The other port keeps working.
    assert_eq!(world.get32(Port::B, reg::PORT), 1);
    let data = [1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(world.answer(Port::A, Ok(&data)), Some(data.to_vec()));
    assert_eq!(world.answer(Port::A, Ok(&data)), None);
    assert_eq!(world.get64(Port::A, reg::WINDOW_READS), 1);
}

#[test]
fn a_read_with_slow_pieces_waits_for_each() {
    let mut world = connected();
    for page in [FAR + 0x1000, FAR + 0x3000] {
        world.hosts.add_slow_page(Port::B, page);
    }
    world.hosts.add_page(Port::B, FAR + 0x2000);
    world.hosts.bytes(Port::B, FAR, 4096).unwrap().fill(1);
    world
        .hosts
        .bytes(Port::B, FAR + 0x2000, 4096)
        .unwrap()
        .fill(3);
    assert_eq!(world.load(Port::A, 3 * SEGMENT + 0xff0, 0x2020), None);
    assert_eq!(world.hosts.asked.take().unwrap().1, 0x1000);
    assert_eq!(world.answer(Port::A, Ok(&[2; 0x1000])), None);
    assert_eq!(world.hosts.asked.take().unwrap().1, 0x10);
    let read = world.answer(Port::A, Err(PeerError::Timeout)).unwrap();
    assert_eq!(read[..0x10], [1; 0x10]);
    assert_eq!(read[0x10..0x1010], [2; 0x1000]);
    assert_eq!(read[0x1010..0x2010], [3; 0x1000]);
    assert_eq!(read[0x2010..], [0xff; 0x10]);
    world.assert_refused(Port::A, 1, error::TIMEOUT, false);
    assert_eq!(world.get64(Port::A, reg::ERROR_ADDRESS), FAR + 0x3000);
}

#[test]
fn an_answer_of_another_length_is_none() {
    let mut world = connected();
    world.hosts.add_slow_page(Port::B, FAR + 0x1000);
    assert_eq!(world.load(Port::A, 3 * SEGMENT + 0x1000, 4), None);
    assert_eq!(world.answer(Port::A, Ok(&[1; 8])), Some(vec![0xff; 4]));
    world.assert_refused(Port::A, 1, error::PEER_REFUSED, false);
}

#[test]
fn nobody_waits_after_a_reset_or_a_cancel() {
    for reset in [true, false] {
        let mut world = connected();
        world.hosts.add_slow_page(Port::B, FAR + 0x1000);
        assert_eq!(world.load(Port::A, 3 * SEGMENT + 0x1000, 4), None);
        match reset {
            true => world.ntb.reset(Port::A, &mut world.hosts),
            false => world.ntb.cancel_read(Port::A),
        }
        assert_eq!(world.answer(Port::A, Ok(&[1; 4])), None);
        assert_eq!(world.get32(Port::A, reg::ERROR_COUNT), 0);
    }
}

#[test]
fn a_write_that_fails_later_is_told() {
    let mut world = connected();
    let at = Target {
        from: Port::A,
        offset: 3 * SEGMENT,
        address: PeerAddress::new(FAR),
    };
    world
        .ntb
        .write_failed(at, PeerError::Refused, &mut world.hosts);
    world.assert_refused(Port::A, 1, error::PEER_REFUSED, true);
    assert_eq!(world.get32(Port::A, reg::EVENT_STATUS), event::ERROR);
    assert_eq!(world.get32(Port::B, reg::ERROR_COUNT), 0);
}
