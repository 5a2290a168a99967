//! Link state, and the effect of a reset on it.

use super::{
    super::{
        Port,
        regs::{
            EVENT_VECTOR, event, link_control, link_status, lut_entry, reg, requester_entry,
            scratchpad,
        },
    },
    world::World,
};

#[test]
fn the_link_is_up_when_both_are_there_and_want_it() {
    for missing in [None, Some(0), Some(1), Some(2), Some(3)] {
        let mut world = World::new();
        for port in Port::BOTH {
            if missing != Some(port.number()) {
                world.ntb.set_present(port, true, &mut world.hosts);
            }
            if missing != Some(2 + port.number()) {
                world.put32(port, reg::LINK_CONTROL, link_control::ENABLE);
            }
        }
        for port in Port::BOTH {
            let up = world.get32(port, reg::LINK_STATUS) & link_status::UP != 0;
            assert_eq!(up, missing.is_none(), "without {missing:?}");
        }
    }
}

#[test]
fn each_step_of_the_peer_shows_and_is_an_event() {
    let mut world = World::new();
    world.ntb.set_present(Port::A, true, &mut world.hosts);
    world.put32(Port::A, reg::LINK_CONTROL, link_control::ENABLE);
    world.put32(Port::A, reg::EVENT_MASK, 0);
    world.hosts.take_raised();
    assert_eq!(world.get32(Port::A, reg::LINK_STATUS), 0);

    type Step = fn(&mut World);
    let steps: [(Step, u32); 5] = [
        (
            |world| world.ntb.set_present(Port::B, true, &mut world.hosts),
            link_status::PEER_PRESENT,
        ),
        (
            |world| world.put32(Port::B, reg::LINK_CONTROL, !0),
            link_status::PEER_PRESENT | link_status::PEER_ENABLED | link_status::UP,
        ),
        (
            |world| world.ntb.set_bus_master(Port::B, true, &mut world.hosts),
            0b1111,
        ),
        (|world| world.put32(Port::A, reg::LINK_CONTROL, 0), 0b1110),
        (
            |world| world.ntb.set_present(Port::B, false, &mut world.hosts),
            0,
        ),
    ];
    for (step, status) in steps {
        step(&mut world);
        assert_eq!(world.get32(Port::A, reg::LINK_STATUS), status);
        assert_eq!(world.get32(Port::A, reg::EVENT_STATUS), event::LINK);
        assert_eq!(world.hosts.take_raised(), [(Port::A, EVENT_VECTOR)]);
        world.put32(Port::A, reg::EVENT_STATUS, event::LINK);
    }
    // No change, no event.
    world.ntb.set_present(Port::B, false, &mut world.hosts);
    world.put32(Port::B, reg::LINK_CONTROL, 0);
    assert_eq!(world.get32(Port::A, reg::EVENT_STATUS), 0);
}

#[test]
fn a_reset_clears_the_port_and_the_peer_hears_of_it() {
    let mut world = World::up();
    world.lead(Port::A, 0, 0x1000);
    world.put32(Port::A, scratchpad(3), 1);
    world.put32(Port::B, reg::DOORBELL_SET_PEER, 1);
    world.store(Port::A, 0, &[1]);
    world.put32(Port::B, scratchpad(3), 2);
    world.put32(Port::B, reg::EVENT_STATUS, !0);
    world.hosts.take_raised();

    world.ntb.reset(Port::A, &mut world.hosts);
    assert_eq!(world.hosts.take_raised(), [(Port::B, EVENT_VECTOR)]);
    assert_eq!(
        world.get32(Port::B, reg::LINK_STATUS),
        link_status::PEER_PRESENT | link_status::PEER_BUS_MASTER
    );
    for zero in [
        reg::LINK_CONTROL,
        reg::DOORBELL_STATUS,
        reg::EVENT_STATUS,
        reg::ERROR_COUNT,
        reg::ERROR_INFO,
        scratchpad(3),
        lut_entry(0),
        requester_entry(0),
    ] {
        assert_eq!(world.get32(Port::A, zero), 0, "register {zero:#x}");
    }
    assert_eq!(world.get32(Port::A, reg::DOORBELL_MASK), !0);
    assert_eq!(world.get32(Port::A, reg::EVENT_MASK), event::ALL);
    // The peer's registers are unaffected.
    assert_eq!(world.get32(Port::B, scratchpad(3)), 2);
}
