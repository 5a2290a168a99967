//! Doorbells, scratchpads, events.

use super::{
    super::{
        Port,
        regs::{DOORBELLS, EVENT_VECTOR, SCRATCHPADS, event, peer_scratchpad, reg, scratchpad},
    },
    world::World,
};

#[test]
fn each_doorbell_has_its_vector() {
    let mut world = World::up();
    for bell in 0..DOORBELLS {
        world.put32(Port::A, reg::DOORBELL_SET_PEER, 1 << bell);
        assert_eq!(world.hosts.take_raised(), [(Port::B, bell as u16)]);
        assert_eq!(world.get32(Port::B, reg::DOORBELL_STATUS), 1 << bell);
        world.put32(Port::B, reg::DOORBELL_STATUS, 1 << bell);
        assert_eq!(world.get32(Port::B, reg::DOORBELL_STATUS), 0);
    }
    assert_eq!(world.get32(Port::A, reg::DOORBELL_STATUS), 0);
    assert_eq!(world.get32(Port::A, reg::DOORBELL_SET_PEER), 0);
}

#[test]
fn a_doorbell_that_rings_again_raises_again() {
    let mut world = World::up();
    for _ in 0..2 {
        world.put32(Port::B, reg::DOORBELL_SET_PEER, 1 << 31 | 1);
        assert_eq!(world.hosts.take_raised(), [(Port::A, 0), (Port::A, 31)]);
    }
    assert_eq!(world.get32(Port::A, reg::DOORBELL_STATUS), 1 << 31 | 1);
}

#[test]
fn a_masked_doorbell_is_kept_until_it_is_unmasked() {
    let mut world = World::up();
    world.put32(Port::B, reg::DOORBELL_MASK, 0b110);
    world.put32(Port::A, reg::DOORBELL_SET_PEER, 0b11);
    assert_eq!(world.hosts.take_raised(), [(Port::B, 0)]);
    world.put32(Port::B, reg::DOORBELL_MASK, 0b100);
    assert_eq!(world.hosts.take_raised(), [(Port::B, 1)]);
    // Cleared meanwhile: no interrupt is left to raise.
    world.put32(Port::A, reg::DOORBELL_SET_PEER, 0b100);
    world.put32(Port::B, reg::DOORBELL_STATUS, 0b100);
    world.put32(Port::B, reg::DOORBELL_MASK, 0);
    assert_eq!(world.hosts.take_raised(), []);
}

#[test]
fn a_doorbell_does_not_ring_over_a_link_that_is_down() {
    let mut world = World::up();
    world.put32(Port::B, reg::LINK_CONTROL, 0);
    world.hosts.take_raised();
    world.put32(Port::A, reg::DOORBELL_SET_PEER, !0);
    assert_eq!(world.get32(Port::B, reg::DOORBELL_STATUS), 0);
    assert_eq!(world.hosts.take_raised(), []);
}

#[test]
fn scratchpads_are_seen_from_both_sides() {
    let mut world = World::up();
    for pad in 0..SCRATCHPADS {
        world.put32(Port::A, scratchpad(pad), 0x100 + pad);
        world.put32(Port::A, peer_scratchpad(pad), 0x200 + pad);
    }
    for pad in 0..SCRATCHPADS {
        assert_eq!(world.get32(Port::B, peer_scratchpad(pad)), 0x100 + pad);
        assert_eq!(world.get32(Port::B, scratchpad(pad)), 0x200 + pad);
    }
    // Part of one.
    world.put(Port::B, peer_scratchpad(1) + 2, &[0xab]);
    assert_eq!(world.get32(Port::A, scratchpad(1)), 0x00ab_0101);
}

#[test]
fn the_peers_scratchpads_are_out_of_reach_while_the_link_is_down() {
    let mut world = World::up();
    world.put32(Port::B, scratchpad(0), 7);
    world.put32(Port::A, reg::LINK_CONTROL, 0);
    world.put32(Port::A, peer_scratchpad(0), 8);
    assert_eq!(world.get32(Port::A, peer_scratchpad(0)), !0);
    assert_eq!(world.get32(Port::B, scratchpad(0)), 7);
}

#[test]
fn a_masked_event_is_kept_until_it_is_unmasked() {
    let mut world = World::up();
    world.put32(Port::A, reg::EVENT_MASK, event::ALL);
    world.store(Port::A, 0, &[0]);
    assert_eq!(world.hosts.take_raised(), []);
    assert_eq!(world.get32(Port::A, reg::EVENT_STATUS), event::ERROR);
    world.put32(Port::A, reg::EVENT_MASK, event::LINK);
    assert_eq!(world.hosts.take_raised(), [(Port::A, EVENT_VECTOR)]);
    // A cleared event raises the interrupt again.
    world.put32(Port::A, reg::EVENT_STATUS, event::ERROR);
    world.store(Port::A, 0, &[0]);
    world.store(Port::A, 0, &[0]);
    assert_eq!(world.hosts.take_raised(), [(Port::A, EVENT_VECTOR)]);
}
