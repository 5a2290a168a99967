//! The product's driver against the model, register by register.

use std::sync::Arc;

use farside_fabric::{LutRange, PeerAddress};
use farside_ntb::regs::{
    EVENT_VECTOR, ID, REQUESTERS, VERSION, lut, lut_entry, reg, requester, requester_entry,
};
use farside_ntb::{FarsideNtb, NtbDriver, NtbError, Registers};
use farside_ntb_server::model::{Port, PortConfig};
use farside_pci::Bdf;

use crate::messages::Messages;
use crate::world::{MIB, World};

fn driver(world: &Arc<World>, port: Port) -> FarsideNtb {
    world.set_present(port, true);
    let (registers, window) = world.bars(port);
    let size = world.window_size(port);
    FarsideNtb::new(bdf(), registers, window, size).expect("it is our NTB")
}

fn bdf() -> Bdf {
    "0000:40:00.0".parse().unwrap()
}

#[test]
fn sizes_are_those_of_the_ports() {
    let config = |window_size, lut_entries| PortConfig {
        window_size,
        lut_entries,
    };
    let world = World::new([config(64 * MIB, 64), config(128 * MIB, 256)]);
    let a = driver(&world, Port::A);
    let own = a.capabilities();
    assert_eq!((own.window_size, own.lut_entries), (64 * MIB, 64));
    assert_eq!((own.segment(), own.address_alignment), (MIB, 4096));
    let counts = (own.doorbells, own.scratchpads, own.requester_entries);
    assert_eq!(counts, (32, 16, 32));
    let peer = a.peer().unwrap();
    assert_eq!((peer.window_size, peer.lut_entries), (128 * MIB, 256));
    assert_eq!(peer.segment(), MIB / 2);
}

#[test]
fn the_link_needs_both_sides() {
    let world = World::small();
    let mut a = driver(&world, Port::A);
    assert!(!a.link().peer_present);
    a.enable_link().unwrap();
    let mut b = driver(&world, Port::B);
    assert!(b.link().peer_enabled && !b.link().up);
    assert!(a.link().peer_present && !a.link().peer_enabled);
    b.enable_link().unwrap();
    assert!(a.link().up && b.link().up);
    assert!(!a.link().usable(), "the peer may not master its bus");
    b.disable_link();
    assert!(!a.link().up);
}

#[test]
fn windows_are_lut_entries_in_a_row() {
    let world = World::small();
    let mut a = driver(&world, Port::A);
    let entries = LutRange {
        first: 5,
        entries: 3,
    };
    let peer_address = 0x12_3456_7000;
    a.set_window(entries, PeerAddress::new(peer_address))
        .unwrap();
    let entry = |index| world.read64(Port::A, lut_entry(index));
    for (index, i) in (5..8).zip(0..) {
        assert_eq!(entry(index), (peer_address + i * MIB) | lut::VALID);
    }
    assert_eq!((entry(4), entry(8)), (0, 0));
    assert_eq!(
        world.read64(Port::B, lut_entry(5)),
        0,
        "the peer's is its own"
    );
    a.clear_window(entries).unwrap();
    assert!((0..64).all(|index| entry(index) == 0));
}

#[test]
fn a_lut_entry_that_is_not_there_is_an_error() {
    let world = World::small();
    let mut a = driver(&world, Port::A);
    let beyond = LutRange {
        first: 63,
        entries: 2,
    };
    let error = a.set_window(beyond, PeerAddress::new(MIB)).unwrap_err();
    assert!(error.to_string().contains("LUT entry 64"), "{error}");
    assert_eq!(world.read64(Port::A, lut_entry(63)), 0, "none is left");
}

#[test]
fn requesters_take_free_entries_until_there_is_none() {
    let world = World::small();
    let mut a = driver(&world, Port::A);
    let valid = |world: &World| -> Vec<u32> {
        let entry = |i| world.read64(Port::A, requester_entry(i) & !7) >> (32 * (i & 1));
        let all = (0..REQUESTERS).map(|i| entry(i) as u32);
        all.filter(|entry| entry & requester::VALID != 0)
            .map(|entry| entry & requester::RID)
            .collect()
    };
    for rid in 0..REQUESTERS as u16 {
        a.add_requester(rid << 8).unwrap();
    }
    assert_eq!(valid(&world).len(), REQUESTERS as usize);
    let error = a.add_requester(0xffff).unwrap_err();
    assert!(matches!(error, NtbError::RequesterTable { limit: 32, .. }));
    a.remove_requester(0x300).unwrap();
    a.remove_requester(0x300).unwrap();
    assert_eq!(valid(&world).len(), REQUESTERS as usize - 1);
    a.add_requester(0xffff).unwrap();
    assert_eq!(valid(&world)[3], 0xffff);
    a.clear_tables().unwrap();
    assert!(valid(&world).is_empty());
}

#[test]
fn doorbells_and_scratchpads_reach_the_peer() {
    let world = World::small();
    let mut drivers = [Port::A, Port::B].map(|port| driver(&world, port));
    let [a, b] = [Port::A, Port::B].map(|port| Messages(world.bars(port).0));
    a.set_peer_scratchpad(3, 7);
    assert_eq!(a.peer_scratchpad(3), u32::MAX, "the link is down");
    for driver in &mut drivers {
        driver.enable_link().unwrap();
    }
    a.set_peer_scratchpad(3, 7);
    assert_eq!((b.scratchpad(3), a.peer_scratchpad(3)), (7, 7));
    b.set_scratchpad(3, 8);
    assert_eq!(a.peer_scratchpad(3), 8);
    b.unmask_doorbells(1 << 31);
    a.ring_doorbell(31);
    a.ring_doorbell(0);
    assert_eq!(b.take_doorbells(), 1 << 31 | 1);
    assert_eq!(b.take_doorbells(), 0);
    assert_eq!(drivers[1].event_vector(), EVENT_VECTOR);
}

#[test]
fn events_are_taken_once() {
    let world = World::small();
    let mut a = driver(&world, Port::A);
    let mut b = driver(&world, Port::B);
    a.enable_link().unwrap();
    b.enable_link().unwrap();
    let events = a.take_events();
    assert!(events.link && events.refused.is_none());
    assert_eq!(a.take_events(), Default::default());
    // A read of a segment without a translation.
    a.flush().flush(9 * MIB);
    let refused = a.take_events().refused.expect("it was refused");
    assert_eq!((refused.count, refused.write), (1, false));
    assert_eq!(refused.offset, 9 * MIB);
    a.flush().flush(8 * MIB);
    assert_eq!(a.take_events().refused.expect("again").count, 1);
}

/// Registers of another device.
struct Words(Vec<(u64, u32)>);

impl Registers for Words {
    fn read32(&self, offset: u64) -> u32 {
        let found = self.0.iter().find(|(at, _)| *at == offset);
        found.map_or(u32::MAX, |(_, value)| *value)
    }

    fn write32(&self, _offset: u64, _value: u32) {}

    fn read64(&self, _offset: u64) -> u64 {
        u64::MAX
    }

    fn write64(&self, _offset: u64, _value: u64) {}
}

#[test]
fn other_devices_and_versions_are_named() {
    let new = |words: &[(u64, u32)]| {
        let registers = Arc::new(Words(words.to_vec()));
        let window: Arc<dyn Registers> = Arc::clone(&registers) as _;
        let made = FarsideNtb::new(bdf(), registers, window, 64 * MIB);
        made.err().expect("it is refused").to_string()
    };
    let error = new(&[]);
    assert!(
        error.contains("0000:40:00.0") && error.contains("does not answer"),
        "{error}"
    );
    let error = new(&[(reg::ID, 0x1234)]);
    assert!(error.contains("0x00001234, expected"), "{error}");
    let error = new(&[(reg::ID, ID), (reg::VERSION, VERSION + 1)]);
    assert!(error.contains("version 2, this farside knows 1"), "{error}");
    let caps = |caps| new(&[(reg::ID, ID), (reg::VERSION, VERSION), (reg::CAPS, caps)]);
    for nonsense in [u32::MAX, 0, 20 | 10 << 8 | 12 << 16] {
        let error = caps(nonsense);
        assert!(error.contains("cannot be used as an NTB"), "{error}");
    }
    let error = caps(27 | 6 << 8 | 12 << 16);
    assert!(
        error.contains("0x8000000 bytes for the window BAR, which has 0x4000000"),
        "{error}"
    );
}
