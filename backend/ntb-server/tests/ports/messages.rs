//! Windows onto addresses that only the peer VMM can access.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use farside_ntb::regs::{WINDOW_BAR, error, event, reg};
use rustix::io::Errno;

use crate::{
    vmm::{Layout, NO_REPLY, Vmm},
    world::{RAM, World, lead},
};

/// Registers of a device in the peer VM.
const DEVICE: u64 = 0xfe00_0000;

#[test]
fn stores_and_loads_reach_the_peer_vms_devices() {
    for layout in [Layout::Qemu, Layout::Specified] {
        let mut world = World::with(layout);
        // As the VMM may map it, without a descriptor.
        world.b.map(DEVICE, 0x1000, None);
        lead(&mut world.a, 0, DEVICE);
        lead(&mut world.a, 1, DEVICE + 0x10_0000);
        world.a.post_write(WINDOW_BAR, 0x14, &[1, 2, 3, 4]);
        world.a.post_write(WINDOW_BAR, 0x20_0000, &[5; 8]);
        let first = world.b.expect_write(DEVICE + 0x14, &[1, 2, 3, 4]);
        world.b.answer_write(&first, Ok(()));
        let second = world.b.expect_write(DEVICE + 0x10_0000, &[5; 8]);
        world.b.answer_write(&second, Ok(()));

        for len in [4, 8] {
            world.a.post_read(WINDOW_BAR, 0x1c, len);
            let read = world.b.expect_read(DEVICE + 0x1c, len);
            let data: Vec<u8> = (1..=len as u8).collect();
            world.b.answer_read(&read, Ok(&data));
            assert_eq!(world.a.read_reply(), data);
        }
        assert_eq!(world.a.get32(reg::ERROR_COUNT), 0);
        assert_eq!(world.a.get64(reg::WINDOW_READS), 2);
    }
}

#[test]
fn while_a_message_is_unanswered_both_vmms_are_served() {
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    lead(&mut world.b, 0, RAM);
    world.a.post_read(WINDOW_BAR, 0, 4);
    let read = world.b.expect_read(DEVICE, 4);
    // Accesses by the peer VMM: registers, and memory of the waiting VM.
    assert_eq!(world.b.get32(reg::PORT), 1);
    world.b.store(0x10, b"meanwhile");
    assert_eq!(world.b.load(0x10, 9), b"meanwhile");
    assert!(!world.a.has_heard());
    world.b.answer_read(&read, Ok(&[1, 2, 3, 4]));
    assert_eq!(world.a.read_reply(), [1, 2, 3, 4]);
    assert_eq!(world.ram_a.read(0x10, 9), b"meanwhile");
}

#[test]
fn requests_behind_a_read_wait_for_it_and_answers_do_not() {
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    lead(&mut world.b, 0, DEVICE);
    // B's store to A's device is outstanding when A reads B's.
    world.b.store(4, &[9; 4]);
    let write = world.a.expect_write(DEVICE + 4, &[9; 4]);
    world.a.post_read(WINDOW_BAR, 0, 4);
    world.a.post_write(WINDOW_BAR, 8, &[7; 4]);
    let read = world.b.expect_read(DEVICE, 4);
    assert!(!world.b.has_heard(), "a write overtook a read");
    world.b.answer_read(&read, Ok(&[1; 4]));
    let behind = world.b.expect_write(DEVICE + 8, &[7; 4]);
    world.a.answer_write(&write, Ok(()));
    world.b.answer_write(&behind, Ok(()));
    assert_eq!(world.a.read_reply_before(1), [1; 4]);
    assert_eq!(world.b.get32(reg::ERROR_COUNT), 0);
}

#[test]
fn two_reads_that_wait_for_each_other_do_not_wait_long() {
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    lead(&mut world.b, 0, DEVICE);
    let start = Instant::now();
    world.a.post_read(WINDOW_BAR, 0, 4);
    let read = world.b.expect_read(DEVICE, 4);
    // As QEMU would: B reads before it serves the command.
    assert_eq!(world.b.load(0, 4), [0xff; 4]);
    assert_eq!(world.b.get32(reg::ERROR_INFO), error::BUSY);
    world.b.answer_read(&read, Ok(&[1; 4]));
    assert_eq!(world.a.read_reply(), [1; 4]);
    assert!(start.elapsed() < Duration::from_secs(2), "a timeout passed");
    assert_eq!(world.a.get32(reg::ERROR_COUNT), 0);
}

#[test]
fn accesses_behind_a_message_do_not_overtake_it() {
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    lead(&mut world.a, 1, RAM);
    world.a.store(0, &[1; 4]);
    let device = world.b.expect_write(DEVICE, &[1; 4]);
    // To shared memory, which is directly accessible.
    world.a.store(0x20_0000, &[2; 8]);
    assert_eq!(world.ram_b.read(0, 8), [0; 8]);
    let memory = world.b.expect_write(RAM, &[2; 8]);
    world.a.post_read(WINDOW_BAR, 0x20_0000, 8);
    let read = world.b.expect_read(RAM, 8);
    world.b.answer_write(&device, Ok(()));
    world.b.answer_write(&memory, Ok(()));
    world.b.answer_read(&read, Ok(&[2; 8]));
    assert_eq!(world.a.read_reply(), [2; 8]);
    // With no command outstanding, memory is accessed directly again.
    world.a.store(0x20_0000, &[3; 8]);
    assert_eq!(world.ram_b.read(0, 8), [3; 8]);
    assert!(!world.b.has_heard());
}

#[test]
fn what_the_vmm_refuses_is_counted_and_told() {
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    let events = world.a.set_eventfd(32);
    world.a.put32(reg::EVENT_STATUS, event::ALL);
    world.a.store(0x40, &[1; 4]);
    let write = world.b.expect_write(DEVICE + 0x40, &[1; 4]);
    world.b.answer_write(&write, Err(Errno::NODEV));
    assert_eq!(events.wait(), 1);
    assert_eq!(world.a.get32(reg::ERROR_COUNT), 1);
    let info = error::PEER_REFUSED | error::WRITE;
    assert_eq!(world.a.get32(reg::ERROR_INFO), info);
    assert_eq!(world.a.get64(reg::ERROR_OFFSET), 0x40);
    assert_eq!(world.a.get64(reg::ERROR_ADDRESS), DEVICE + 0x40);
}

#[test]
fn a_vmm_that_does_not_answer_is_not_waited_for() {
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    world.a.store(0, &[0; 4]);
    let write = world.b.expect_write(DEVICE, &[0; 4]);
    world.b.answer_write(&write, Ok(()));
    let start = Instant::now();
    world.a.post_read(WINDOW_BAR, 0, 4);
    let late = world.b.expect_read(DEVICE, 4);
    assert_eq!(world.a.read_reply(), [0xff; 4]);
    assert!(start.elapsed() >= Duration::from_secs(2));
    assert_eq!(world.a.get32(reg::ERROR_INFO), error::TIMEOUT);
    // It answers late, and then receives another command.
    world.b.answer_read(&late, Ok(&[1; 4]));
    world.a.post_read(WINDOW_BAR, 0, 4);
    let read = world.b.expect_read(DEVICE, 4);
    world.b.answer_read(&read, Ok(&[2; 4]));
    assert_eq!(world.a.read_reply(), [2; 4]);
}

#[test]
fn a_flood_of_writes_waits_for_the_peer() {
    const COUNT: u32 = 10_000;
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    lead(&mut world.b, 0, DEVICE);
    let (a, b) = (&mut world.a, &mut world.b);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..COUNT {
                a.post_write(WINDOW_BAR, 0, &n.to_le_bytes());
            }
        });
        execute(b, 0..1);
        // The peer is served meanwhile.
        b.post_write(WINDOW_BAR, 4, &[9; 4]);
        execute(b, 1..COUNT);
    });
    let other_way = world.a.expect_write(DEVICE + 4, &[9; 4]);
    world.a.answer_write(&other_way, Ok(()));
    for vmm in [&mut world.a, &mut world.b] {
        assert_eq!(vmm.get32(reg::ERROR_COUNT), 0);
    }
}

#[test]
fn a_flood_of_writes_does_not_wait_long_for_a_peer_that_does_not_answer() {
    const COUNT: u32 = 4096 + 256;
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    let start = Instant::now();
    for n in 0..COUNT {
        world.a.post_write(WINDOW_BAR, 0, &n.to_le_bytes());
    }
    assert!(world.a.get32(reg::ERROR_COUNT) > 0);
    let elapsed = start.elapsed();
    // QEMU waits for 5 s.
    let (timeout, limit) = (Duration::from_secs(2), Duration::from_secs(5));
    assert!(elapsed >= timeout && elapsed < limit, "{elapsed:?}");
}

#[test]
fn a_flood_of_writes_waits_for_a_peer_that_has_waited_for_a_load() {
    // Together more than the limit of commands, and sent before the first is executed.
    const REQUESTS: u64 = 30;
    const WRITES: u64 = 200;
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    lead(&mut world.b, 0, DEVICE);
    world.a.post_read(WINDOW_BAR, 0, 4);
    let read = world.b.expect_read(DEVICE, 4);
    world.b.answer_read(&read, Ok(&[1; 4]));
    assert_eq!(world.a.read_reply(), [1; 4]);
    for request in 0..REQUESTS {
        let writes: Vec<_> = (0..WRITES).map(|n| (0, request * WRITES + n)).collect();
        world.b.post_multi(WINDOW_BAR, NO_REPLY, &writes);
    }
    for n in 0..REQUESTS * WRITES {
        let write = world.a.expect_write(DEVICE, &n.to_le_bytes());
        world.a.answer_write(&write, Ok(()));
    }
    assert_eq!(world.b.get32(reg::ERROR_COUNT), 0);
}

/// Writes of which some wait, as over 256 of their commands are not executed: no more than fit in a socket's buffer.
const WAITING: u32 = 450;

/// Executes the writes of a flood.
fn execute(vmm: &mut Vmm, writes: Range<u32>) {
    for n in writes {
        let write = vmm.expect_write(DEVICE, &n.to_le_bytes());
        vmm.answer_write(&write, Ok(()));
    }
}

#[test]
fn floods_in_both_directions_end() {
    const COUNT: u32 = WAITING;
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    lead(&mut world.b, 0, DEVICE);
    for n in 0..COUNT {
        for vmm in [&mut world.a, &mut world.b] {
            vmm.post_write(WINDOW_BAR, 0, &n.to_le_bytes());
        }
    }
    let start = Instant::now();
    let (a, b) = (&mut world.a, &mut world.b);
    std::thread::scope(|scope| {
        scope.spawn(|| execute(a, 0..COUNT));
        execute(b, 0..COUNT);
    });
    assert!(start.elapsed() < Duration::from_secs(2), "a timeout passed");
    for vmm in [&mut world.a, &mut world.b] {
        assert_eq!(vmm.get32(reg::ERROR_COUNT), 0);
    }
}

#[test]
fn a_load_during_the_peers_flood_is_answered() {
    const COUNT: u32 = WAITING;
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    lead(&mut world.b, 0, DEVICE);
    for n in 0..COUNT {
        world.b.post_write(WINDOW_BAR, 0, &n.to_le_bytes());
    }
    let first = world.a.expect_write(DEVICE, &0u32.to_le_bytes());
    // It executes no command until the load is answered, and the answer is behind the flood.
    let start = Instant::now();
    world.a.post_read(WINDOW_BAR, 0, 4);
    let read = world.b.expect_read(DEVICE, 4);
    world.b.answer_read(&read, Ok(&[1; 4]));
    assert_eq!(world.a.read_reply(), [1; 4]);
    assert!(start.elapsed() < Duration::from_secs(2), "a timeout passed");
    world.a.answer_write(&first, Ok(()));
    execute(&mut world.a, 1..COUNT);
    for vmm in [&mut world.a, &mut world.b] {
        assert_eq!(vmm.get32(reg::ERROR_COUNT), 0);
    }
}

#[test]
fn more_writes_in_one_request_than_the_limit_are_refused() {
    const MOST: u64 = 4096;
    let mut world = World::new();
    lead(&mut world.a, 0, DEVICE);
    let writes: Vec<_> = (0..MOST + 10).map(|n| (0, n)).collect();
    world.a.write_multi(WINDOW_BAR, &writes);
    for n in 0..MOST {
        let write = world.b.expect_write(DEVICE, &n.to_le_bytes());
        world.b.answer_write(&write, Ok(()));
    }
    assert_eq!(world.a.get32(reg::ERROR_COUNT), 10);
    assert_eq!(world.a.get32(reg::ERROR_INFO), error::BUSY | error::WRITE);
}
