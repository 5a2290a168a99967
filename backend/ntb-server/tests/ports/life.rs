//! VMMs that connect, disconnect and reset; doorbells and link.

use farside_ntb::regs::{
    ID, LUT, WINDOW_BAR, event, link_status, lut_entry, peer_scratchpad, reg, scratchpad,
};

use crate::{
    vmm::{Layout, Vmm},
    world::{RAM, Server, World, lead, set_up},
};

#[test]
fn a_doorbell_signals_the_eventfd_of_its_vector() {
    let mut world = World::new();
    let bells: Vec<_> = [0, 7, 31].map(|n| (n, world.b.set_eventfd(n))).into();
    for (n, bell) in &bells {
        world.a.put32(reg::DOORBELL_SET_PEER, 1 << n);
        assert_eq!(bell.wait(), 1);
        assert_eq!(world.b.get32(reg::DOORBELL_STATUS), 1 << n);
        world.b.put32(reg::DOORBELL_STATUS, 1 << n);
    }
    assert!(bells.iter().all(|(_, bell)| bell.is_quiet()));
}

#[test]
fn a_doorbell_that_nobody_listens_to_is_pending() {
    let mut world = World::new();
    // Enables MSI-X.
    let other = world.b.set_eventfd(1);
    world.a.put32(reg::DOORBELL_SET_PEER, 1 << 9);
    let pba = farside_ntb::regs::MSIX_PBA;
    assert_eq!(world.b.get64(pba), 1 << 9);
    let bell = world.b.set_eventfd(9);
    assert_eq!(bell.wait(), 1);
    assert_eq!(world.b.get64(pba), 0);
    assert!(other.is_quiet());
}

#[test]
fn the_function_looks_like_an_ntb() {
    let server = Server::start();
    let mut vmm = Vmm::negotiated(&server.socket("a"), Layout::Qemu);
    let config = vmm.config_read(0, 64);
    assert_eq!(config[..4], [0x5d, 0xfa, 0x1d, 0xb4]);
    assert_eq!(config[9..12], [0, 0x80, 0x06]);
    assert_eq!(config[14], 0, "header type");
    // Sizes the BARs as firmware does.
    vmm.config_write(0x10, &[0xff; 16]);
    let bars = vmm.config_read(0x10, 16);
    assert_eq!(bars[..4], 0xffff_0000_u32.to_le_bytes());
    assert_eq!(bars[4..8], [0; 4]);
    assert_eq!(bars[8..], 0xffff_ffff_c000_000c_u64.to_le_bytes());
    assert_eq!(vmm.get32(reg::ID), ID);
}

#[test]
fn a_vmm_that_goes_takes_the_link_with_it() {
    let mut world = World::new();
    lead(&mut world.b, 3, RAM);
    let events = world.a.set_eventfd(32);
    world.a.put32(reg::EVENT_STATUS, event::ALL);
    lead(&mut world.a, 0, RAM);
    let World {
        mut a, b, server, ..
    } = world;
    drop(b);
    assert_eq!(events.wait(), 1);
    assert_eq!(a.get32(reg::LINK_STATUS), 0);
    assert_eq!(a.get32(reg::EVENT_STATUS), event::LINK);
    assert_eq!(a.load(0, 4), [0xff; 4]);

    // Another VM finds the port in its power-on state.
    let mut b = Vmm::negotiated(&server.socket("b"), Layout::Qemu);
    assert_eq!(b.get64(lut_entry(3)), 0);
    assert_eq!(b.get32(reg::LINK_CONTROL), 0);
    assert_eq!(b.config_read(4, 2), [0, 0]);
    set_up(&mut b);
    assert_ne!(a.get32(reg::LINK_STATUS) & link_status::UP, 0);
    // The previous VM's memory is not accessed: the new VMM receives a command.
    a.post_write(WINDOW_BAR, 0, &[1; 4]);
    b.expect_write(RAM, &[1; 4]);
}

#[test]
fn a_vmm_that_goes_leaves_no_read_waiting() {
    let mut world = World::new();
    lead(&mut world.a, 0, 0xfe00_0000);
    world.a.post_read(WINDOW_BAR, 0, 4);
    world.b.expect_read(0xfe00_0000, 4);
    let World { mut a, b, .. } = world;
    drop(b);
    assert_eq!(a.read_reply(), [0xff; 4]);
    assert_eq!(a.get32(reg::ERROR_COUNT), 1);
}

#[test]
fn a_vmm_that_goes_while_it_waits_does_no_harm() {
    let mut world = World::new();
    lead(&mut world.a, 0, 0xfe00_0000);
    world.a.post_read(WINDOW_BAR, 0, 4);
    let read = world.b.expect_read(0xfe00_0000, 4);
    let World {
        a, mut b, server, ..
    } = world;
    drop(a);
    let mut a = Vmm::negotiated(&server.socket("a"), Layout::Qemu);
    b.answer_read(&read, Ok(&[1; 4]));
    assert_eq!(b.get32(reg::PORT), 1);
    assert_eq!(a.get32(reg::PORT), 0);
}

#[test]
fn resets_clear_the_port() {
    let resets: [fn(&mut Vmm); 2] = [
        Vmm::reset,
        // Function-level reset, in the device control register.
        |vmm| vmm.config_write(0x50 + 8, &[0x10, 0xa8]),
    ];
    for reset in resets {
        let mut world = World::new();
        lead(&mut world.a, 5, RAM);
        world.a.put32(scratchpad(0), 5);
        world.b.put32(reg::EVENT_STATUS, event::ALL);
        let events = world.b.set_eventfd(32);
        reset(&mut world.a);
        assert_eq!(events.wait(), 1);
        assert_eq!(world.b.get32(reg::LINK_STATUS), link_status::PEER_PRESENT);
        assert!(world.a.read(0, LUT, 4096).iter().all(|byte| *byte == 0));
        assert_eq!(world.a.get32(scratchpad(0)), 0);
        assert_eq!(world.a.config_read(4, 2), [0, 0]);
        // DMA mappings survive a reset.
        set_up(&mut world.a);
        lead(&mut world.b, 0, RAM);
        world.b.store(0, &[8]);
        assert_eq!(world.ram_a.read(0, 1), [8]);
    }
}

#[test]
fn drivers_talk_by_scratchpads() {
    let mut world = World::new();
    world.a.put32(peer_scratchpad(2), 0x1234);
    assert_eq!(world.b.get32(scratchpad(2)), 0x1234);
    world.b.put32(scratchpad(2), 0x4321);
    assert_eq!(world.a.get32(peer_scratchpad(2)), 0x4321);
}

#[test]
fn a_port_that_is_unplugged_can_be_plugged_in_again() {
    let mut world = World::new();
    let events = world.a.set_eventfd(32);
    world.a.put32(reg::EVENT_STATUS, event::ALL);
    // QEMU's unplug notification; the connection stays.
    world.b.take_error_trigger();
    assert_eq!(events.wait(), 1);
    assert_eq!(world.a.get32(reg::LINK_STATUS), 0);
    let mut again = Vmm::negotiated(&world.server.socket("b"), Layout::Qemu);
    set_up(&mut again);
    assert_ne!(world.a.get32(reg::LINK_STATUS) & link_status::UP, 0);
}
