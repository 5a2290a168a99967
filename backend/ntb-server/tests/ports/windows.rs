//! Windows onto memory that the peer VMM shares.

use farside_ntb::regs::{WINDOW_BAR, error, event, link_status, reg};
use rustix::io::Errno;

use crate::{
    vmm::Ram,
    world::{RAM, RAM_SIZE, SEGMENT, World, lead},
};

#[test]
fn a_store_lands_in_the_other_vms_memory() {
    let mut world = World::new();
    lead(&mut world.a, 1, RAM + 0x3000);
    for len in [1, 2, 3, 4, 8, 100] {
        let data: Vec<u8> = (1..=len).collect();
        let at = 0x10 * u64::from(len);
        world.a.store(SEGMENT + at, &data);
        assert_eq!(world.ram_b.read(0x3000 + at, len.into()), data);
        assert_eq!(world.a.load(SEGMENT + at, len.into()), data);
    }
    assert_eq!(world.ram_a.read(0x3010, 8), [0; 8]);
    assert_eq!(world.a.get32(reg::ERROR_COUNT), 0);
}

#[test]
fn both_ways() {
    let mut world = World::new();
    lead(&mut world.a, 0, RAM);
    lead(&mut world.b, 511, RAM + 0x1000);
    world.a.store(8, b"from A");
    world.b.store(511 * SEGMENT + 8, b"from B");
    assert_eq!(world.ram_b.read(8, 6), b"from A");
    assert_eq!(world.ram_a.read(0x1008, 6), b"from B");
    world.ram_b.write(0x20, b"B's own");
    assert_eq!(world.a.load(0x20, 7), b"B's own");
}

#[test]
fn posted_writes_are_in_memory_when_a_read_behind_them_is_answered() {
    const WRITES: u64 = 10_000;
    let mut world = World::new();
    lead(&mut world.a, 0, RAM);
    for n in 0..WRITES {
        world
            .a
            .post_write(WINDOW_BAR, 8 * n, &(n * n).to_le_bytes());
    }
    let last = world.a.load(8 * (WRITES - 1), 8);
    assert_eq!(last, ((WRITES - 1) * (WRITES - 1)).to_le_bytes());
    let there = world.ram_b.read(0, 8 * WRITES as usize);
    for (n, bytes) in (0..WRITES).zip(there.chunks(8)) {
        assert_eq!(bytes, (n * n).to_le_bytes());
    }
    assert_eq!(world.a.get64(reg::WINDOW_WRITES), WRITES);
}

#[test]
fn many_writes_in_one_message_are_done_in_order() {
    let mut world = World::new();
    lead(&mut world.a, 0, RAM);
    world.a.write_multi(WINDOW_BAR, &[(0, 1), (8, 2), (0, 3)]);
    assert_eq!(world.ram_b.read(0, 16)[..9], [3, 0, 0, 0, 0, 0, 0, 0, 2]);
}

#[test]
fn what_is_unmapped_is_not_reached_any_more() {
    let mut world = World::new();
    lead(&mut world.a, 0, RAM);
    world.a.store(0, &[1]);
    world.b.unmap(RAM, RAM_SIZE).unwrap();
    // From now on the VMM receives a command, and refuses it.
    world.a.store(0, &[2]);
    let write = world.b.expect_write(RAM, &[2]);
    world.b.answer_write(&write, Err(Errno::FAULT));
    world.a.post_read(WINDOW_BAR, 0, 1);
    let read = world.b.expect_read(RAM, 1);
    world.b.answer_read(&read, Err(Errno::FAULT));
    assert_eq!(world.a.read_reply(), [0xff]);
    assert_eq!(world.ram_b.read(0, 1), [1]);
    assert_eq!(world.a.get32(reg::ERROR_COUNT), 2);
    assert_eq!(world.a.get32(reg::ERROR_INFO), error::PEER_REFUSED);
    assert_eq!(world.a.get64(reg::ERROR_ADDRESS), RAM);
}

#[test]
fn a_peer_port_that_is_no_bus_master_is_not_reached() {
    let mut world = World::new();
    lead(&mut world.a, 0, RAM);
    let events = world.a.set_eventfd(32);
    world.a.put32(reg::EVENT_STATUS, event::ALL);
    world.b.set_bus_master(false);
    assert_eq!(events.wait(), 1);
    assert_eq!(
        world.a.get32(reg::LINK_STATUS) & link_status::PEER_BUS_MASTER,
        0
    );
    world.a.put32(reg::EVENT_STATUS, event::ALL);
    world.a.store(0, &[1, 2, 3, 4]);
    assert_eq!(events.wait(), 1);
    assert_eq!(world.a.load(0, 4), [0xff; 4]);
    assert_eq!(world.ram_b.read(0, 4), [0; 4]);
    assert_eq!(world.a.get32(reg::ERROR_COUNT), 2);
    assert_eq!(world.a.get32(reg::ERROR_INFO), error::NOT_BUS_MASTER);
    assert!(!world.b.has_heard());
    world.b.set_bus_master(true);
    world.a.store(0, &[1, 2, 3, 4]);
    assert_eq!(world.ram_b.read(0, 4), [1, 2, 3, 4]);
}

#[test]
fn a_read_only_mapping_is_not_written() {
    let mut world = World::new();
    let rom = Ram::new(0x1000);
    rom.write(0, b"rom");
    world
        .b
        .map_as(0x1000, 0x1000, Some((&rom.0, 0)), 1)
        .unwrap();
    lead(&mut world.a, 0, 0x1000);
    world.a.store(0, &[1, 2, 3, 4]);
    assert_eq!(world.a.load(0, 3), b"rom");
    assert_eq!(world.a.get32(reg::ERROR_COUNT), 1);
    assert_eq!(
        world.a.get32(reg::ERROR_INFO),
        error::PEER_REFUSED | error::WRITE
    );
}

#[test]
fn pages_of_an_iommu_are_each_where_they_are() {
    const PAGES: u64 = 1024;
    let mut world = World::new();
    // Peer addresses in the reverse order of the file.
    let iova = 0x4000_0000;
    for page in 0..PAGES {
        let offset = (PAGES - 1 - page) * 4096;
        let fd = Some((&world.ram_b.0, offset));
        world.b.map(iova + page * 4096, 4096, fd);
    }
    for segment in 0..2 {
        lead(&mut world.a, segment, iova + u64::from(segment) * SEGMENT);
    }
    let data: Vec<u8> = (0..2 * 4096u32).map(|n| (n >> 5) as u8).collect();
    world.a.store(0x7f_f000 % (2 * SEGMENT), &data[..4096]);
    assert_eq!(world.ram_b.read(0, 4096), data[..4096]);
    world.a.store(0x1000, &data);
    let at = (PAGES - 3) * 4096;
    assert_eq!(world.ram_b.read(at, 4096), data[4096..]);
    assert_eq!(world.ram_b.read(at + 4096, 4096), data[..4096]);
    assert_eq!(world.a.load(0x1000, 2 * 4096), data);
}

#[test]
fn memory_that_is_cut_off_harms_nobody() {
    let mut world = World::new();
    let memfd = rustix::fs::memfd_create("cut", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memfd, 0x2000).unwrap();
    world.b.map(0, 0x2000, Some((&memfd, 0)));
    lead(&mut world.a, 0, 0);
    world.a.store(0x1000, &[1, 2, 3, 4, 5, 6, 7, 8]);
    rustix::fs::ftruncate(&memfd, 0).unwrap();
    assert_eq!(world.a.load(0x1000, 8), [0; 8]);
    world.a.store(0x1000, &[1, 2, 3, 4, 5, 6, 7, 8]);
    // The server is still running.
    assert_eq!(world.b.get32(reg::PORT), 1);
}
