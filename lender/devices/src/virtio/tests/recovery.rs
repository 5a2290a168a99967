//! Devices that are killed, and go on as another process.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use farside_fabric::memory::HostSlice;

use super::world::{
    Buffer, DATA, DEVICE, DISCARD, Driver, FLUSH, GET_ID, IOERR, ISR, OK, READ, TABLE, UNSUPP,
    WRITE, WRITE_ZEROES, pattern, readable, writable,
};
use super::{crash, failing::Faults, watch::Effect};
use crate::{Device, state};

const SECTOR: u64 = 512;

/// The table of requests in flight in the state: the first request's entry.
const REQUESTS_IN_FLIGHT: usize = state::SIZE - 1536 * 128;

fn buffer(n: u64) -> u64 {
    DATA + n * 4096
}

fn out(n: u64) -> [Buffer; 1] {
    [readable(buffer(n), SECTOR as u32)]
}

fn into(n: u64) -> [Buffer; 1] {
    [writable(buffer(n), SECTOR as u32)]
}

fn off() -> Driver {
    let mut driver = Driver::off(|_| {});
    driver.keep_state();
    driver
}

/// A medium without faults.
const NO_FAULTS: Faults = Faults {
    seed: 1,
    lost: 0,
    busy: 0,
    hangs: 0,
    again: 0,
    short: 0,
    delay: 0,
};

/// A device that was killed with `count` writes in flight, from sector 5 on, whose next process begins. Returns their
/// heads, too.
fn killed(count: u16) -> (Driver, Vec<u16>) {
    killed_with(count, |_| {})
}

/// As [`killed`], with a change of the state that the first process leaves.
fn killed_with(count: u16, change: impl FnOnce(&HostSlice)) -> (Driver, Vec<u16>) {
    let mut driver = Driver::off(|_| {});
    // The first process ends before its medium does anything.
    let watch = driver.set_faults(Faults {
        lost: 1,
        ..NO_FAULTS
    });
    driver.keep_state();
    driver.start();
    let mut heads = Vec::new();
    for n in 0..count {
        let sector = 5 + u64::from(n);
        let data = pattern(SECTOR as usize, sector);
        driver.memory.put(buffer(n.into()), &data);
        // As the driver takes three descriptors.
        let head = 3 * n + 2;
        let bytes = sector * SECTOR..(sector + 1) * SECTOR;
        watch.submitted((0, head), Effect::Write(bytes));
        assert_eq!(driver.request(0, WRITE, sector, &out(n.into())), head);
        heads.push(head);
    }
    for _ in 0..3 {
        driver.poll();
    }
    driver.faults = Some(NO_FAULTS);
    driver.device.detach_state();
    change(driver.state.as_ref().unwrap());
    driver.restart();
    (driver, heads)
}

fn ready() -> Driver {
    let mut driver = off();
    driver.start();
    driver
}

/// Takes requests until each of `heads` was returned, and no other.
fn collect(driver: &mut Driver, queue: usize, heads: &[u16]) -> BTreeMap<u16, u8> {
    let mut found = BTreeMap::new();
    for _ in heads {
        let (head, _) = driver.wait(queue);
        assert!(heads.contains(&head), "{head}");
        let status = driver.status_of(queue, head);
        assert_eq!(found.insert(head, status), None, "{head} twice");
    }
    driver.poll();
    assert_eq!(driver.take(queue), None, "each is returned once");
    found
}

fn all_ok(driver: &mut Driver, queue: usize, heads: &[u16]) {
    let found = collect(driver, queue, heads);
    assert!(found.values().all(|status| *status == OK), "{found:?}");
}

/// Writes, flushes, reads and compares, with many requests in flight.
fn io(driver: &mut Driver, queue: usize, seed: u64) {
    let base = queue as u64 * 64;
    let mut expected = Vec::new();
    let mut heads = Vec::new();
    for n in 0..6 {
        let data = pattern(SECTOR as usize, seed * 100 + base + n);
        driver.memory.put(buffer(n), &data);
        heads.push(driver.request(queue, WRITE, base + n, &out(n)));
        expected.push(data);
    }
    all_ok(driver, queue, &heads);
    let flush = driver.request(queue, FLUSH, 0, &[]);
    all_ok(driver, queue, &[flush]);
    heads.clear();
    for n in 0..6 {
        driver.memory.put(buffer(n), &[0; SECTOR as usize]);
        heads.push(driver.request(queue, READ, base + n, &into(n)));
    }
    all_ok(driver, queue, &heads);
    for (n, data) in (0..).zip(&expected) {
        let (read, disk) = (
            driver.memory.get(buffer(n), data.len()),
            driver.disk((base + n) * SECTOR, data.len()),
        );
        assert!(read == *data && disk == *data, "sector {n}");
    }
}

/// Requests of other kinds.
fn others(driver: &mut Driver) {
    driver.set_disk(1 << 20, &[7; 8192]);
    let range = |driver: &Driver, n: u64, sector: u64| {
        driver.memory.put_qwords(buffer(n), [sector, 8]);
        [readable(buffer(n), 16)]
    };
    let zero = range(driver, 0, 2048);
    let zero = driver.request(0, WRITE_ZEROES, 0, &zero);
    let discard = range(driver, 1, 2056);
    let discard = driver.request(0, DISCARD, 0, &discard);
    let id = driver.request(0, GET_ID, 0, &[writable(buffer(2), 20)]);
    all_ok(driver, 0, &[zero, discard, id]);
    assert_eq!(driver.disk(1 << 20, 4096), [0; 4096]);
    assert_eq!(driver.memory.get(buffer(2), 1), driver.config_serial());
}

impl Driver {
    fn config_serial(&self) -> Vec<u8> {
        let serial = crate::block::serial::serial_for(None, "disk0");
        serial.into_bytes()[..1].to_vec()
    }
}

/// What a driver does from boot to shutdown.
fn life(driver: &mut Driver) {
    driver.start();
    for vector in 0..3 {
        driver.write(TABLE + vector * 16, 8, 0xfee0_0000);
        driver.write(TABLE + vector * 16 + 8, 8, 0x40 + vector);
    }
    io(driver, 0, 1);
    io(driver, 1, 2);
    // Write through.
    driver.write(DEVICE + 32, 1, 0);
    driver.indirect = true;
    io(driver, 0, 3);
    others(driver);
    assert_eq!(driver.read(DEVICE + 32, 1), 0, "the cache mode stays");
    assert_eq!(driver.read(TABLE + 2 * 16 + 8, 4), 0x42);
    // A reset ends what is in flight.
    for n in 0..4 {
        driver.request(0, READ, n, &into(n));
    }
    driver.start();
    driver.indirect = false;
    assert_eq!(driver.read(DEVICE + 32, 1), 1);
    io(driver, 1, 4);
    // A request without a header.
    driver.submit(0, &[writable(DATA, 1)]);
    driver.wait_for_failure();
    driver.start();
    io(driver, 0, 5);
    driver.reset_device();
}

#[test]
fn a_device_that_is_killed_at_any_store_returns_each_request_once() {
    let mut kills = 0;
    for point in 0.. {
        let mut driver = off();
        crash::after(Some(point));
        life(&mut driver);
        let missed = crash::is_due();
        crash::after(None);
        kills += driver.kills;
        if missed {
            break;
        }
        assert_eq!(driver.kills, 1);
    }
    assert!(kills > 1000, "{kills} points");
    println!("killed at {kills} points");
}

#[test]
fn a_device_may_be_killed_again_while_it_recovers() {
    let mut random = super::random::Random(1);
    for _ in 0..40 {
        let mut driver = off();
        driver.kill_every = Some(random.below(60) + 60);
        crash::after(driver.kill_every);
        life(&mut driver);
        crash::after(None);
        assert!(driver.kills > 10, "{}", driver.kills);
    }
}

/// A flush whose return was begun takes longer at the second time: another request gets the number that it had.
#[test]
fn a_return_that_was_begun_before_two_kills_is_not_lost() {
    for first in 0..32 {
        for second in 0..32 {
            let mut driver = ready();
            crash::after(Some(first));
            let flush = driver.request(0, FLUSH, 0, &[]);
            let start = Instant::now();
            while driver.kills == 0 && start.elapsed() < Duration::from_millis(20) {
                driver.poll();
            }
            crash::after(Some(second));
            let other = driver.request(0, 99, 0, &[]);
            let found = collect(&mut driver, 0, &[flush, other]);
            crash::after(None);
            assert_eq!(found[&flush], OK, "{first}, {second}");
            assert_eq!(found[&other], UNSUPP, "{first}, {second}");
        }
    }
}

/// Restarts as if SIGKILL had come in between two polls.
fn restart(driver: &mut Driver) {
    driver.device.detach_state();
    driver.restart();
}

#[test]
fn an_interrupt_of_each_queue_follows() {
    let mut driver = ready();
    restart(&mut driver);
    driver.irq.raised.clear();
    driver.memory.bus_master = false;
    driver.poll();
    assert!(driver.irq.raised.is_empty());
    driver.memory.bus_master = true;
    driver.poll();
    assert_eq!(driver.irq.raised, [1u16, 2, 0], "queues, configuration");
    driver.poll();
    assert_eq!(driver.irq.raised, [1u16, 2, 0]);
    // By the line, too.
    driver.irq.intx = true;
    restart(&mut driver);
    driver.poll();
    assert!(driver.irq.line);
    assert_eq!(driver.read(ISR, 1), 3);
    assert!(!driver.irq.line);
}

#[test]
fn a_device_that_needs_a_reset_still_does_and_tells_again() {
    let mut driver = ready();
    driver.write(16, 2, 0);
    driver.submit(0, &[writable(DATA, 1)]);
    driver.wait_for_failure();
    restart(&mut driver);
    driver.irq.raised.clear();
    driver.poll();
    assert_eq!(driver.irq.raised, [0u16]);
    assert_eq!(driver.status() & 0x40, 0x40);
    driver.request(1, READ, 0, &into(0));
    assert!(!driver.poll());
    driver.start();
    io(&mut driver, 0, 1);
}

/// As while firmware has QEMU unmap RAM: nothing is demanded of the queue meanwhile.
#[test]
fn requests_in_flight_wait_for_their_queue() {
    let (mut driver, heads) = killed(3);
    driver.memory.unmapped = true;
    assert!(!driver.poll());
    assert!(driver.enable_notifications(), "it may sleep");
    driver.memory.unmapped = false;
    assert!(driver.poll());
    all_ok(&mut driver, 0, &heads);
    for sector in 5..8 {
        let data = pattern(SECTOR as usize, sector);
        assert_eq!(driver.disk(sector * SECTOR, data.len()), data);
    }
    assert_eq!(driver.memory.faults, []);
}

/// A device that was killed while it returned its only request, a write. The used ring has the request, and this index.
fn killed_while_returning(index: u16) -> (Driver, u16) {
    let (driver, heads) = killed_with(1, |state| {
        // The request is being returned as the first one.
        let completion = state.slice(REQUESTS_IN_FLIGHT + 24, 8).unwrap();
        completion.write(&1u64.to_le_bytes());
    });
    let used = driver.queues[0].used;
    driver.memory.put(used + 2, &index.to_le_bytes());
    driver.memory.put(used + 4, &heads[0].to_le_bytes());
    (driver, heads[0])
}

#[test]
fn a_request_that_the_used_ring_has_is_not_executed_again() {
    let (mut driver, head) = killed_while_returning(1);
    assert_eq!(driver.wait(0).0, head);
    for _ in 0..10 {
        driver.poll();
    }
    assert_eq!(driver.take(0), None, "it is returned once");
    let len = SECTOR as usize;
    assert_eq!(driver.disk(5 * SECTOR, len), vec![0; len]);
}

/// Only one index is that of the request that was being returned.
#[test]
fn a_used_index_that_the_guest_has_written_hides_no_request() {
    for index in [0, 2, 7, 0xffff] {
        let (mut driver, head) = killed_while_returning(index);
        let used = driver.queues[0].used;
        driver.until("return", |driver| {
            driver.memory.get(used + 2, 2) == 1u16.to_le_bytes()
        });
        all_ok(&mut driver, 0, &[head]);
        let len = SECTOR as usize;
        assert_eq!(driver.disk(5 * SECTOR, len), pattern(len, 5), "{index}");
    }
}

/// The kernel reports a failure once: executed again, the flush would succeed.
#[test]
fn a_flush_that_has_failed_is_not_executed_again() {
    let mut failed_after_a_kill = 0;
    for point in 0.. {
        let mut driver = Driver::off(|_| {});
        let watch = driver.set_faults(NO_FAULTS);
        driver.keep_state();
        driver.start();
        watch.fail_flush();
        let head = driver.free(0)[62];
        watch.submitted((0, head), Effect::Flush);
        crash::after(Some(point));
        let flush = driver.request(0, FLUSH, 0, &[]);
        let found = collect(&mut driver, 0, &[flush]);
        crash::after(None);
        // Unless the process was killed before it had recorded the failure.
        let is_known = driver.device.has_flush_failed();
        assert_eq!(found[&flush] == IOERR, is_known, "{point}");
        if driver.kills == 0 {
            assert!(is_known, "{point}");
            break;
        }
        failed_after_a_kill += u32::from(is_known);
        // Another one covers the data that was written since.
        watch.completed((0, head));
        watch.submitted((0, head), Effect::Flush);
        assert_eq!(driver.execute(FLUSH, 0, &[]).0, OK);
    }
    assert!(failed_after_a_kill > 4, "{failed_after_a_kill}");
}

/// Nor is there another call: the state is memory of this process.
#[test]
fn a_state_costs_no_dma() {
    let translations = |keeps: bool| {
        let mut driver = Driver::off(|_| {});
        if keeps {
            driver.keep_state();
        }
        driver.start();
        let before = driver.memory.translations;
        for n in 0..64 {
            let kind = [WRITE, READ][n as usize % 2];
            let data = match kind {
                WRITE => out(n % 8),
                _ => into(n % 8),
            };
            assert_eq!(driver.execute(kind, n, &data).0, OK);
        }
        driver.memory.translations - before
    };
    assert_eq!(translations(true), translations(false));
}

fn bytes(driver: &Driver) -> Vec<u8> {
    let mut bytes = vec![0; state::SIZE];
    driver.state.as_ref().unwrap().read(&mut bytes);
    bytes
}

fn resumed(driver: &mut Driver, bytes: &[u8]) -> Result<bool, String> {
    let state = driver.state.clone().unwrap();
    state.write(bytes);
    driver.device.detach_state();
    driver.device.reset();
    driver.device.set_state(state, true)
}

#[test]
fn what_no_device_writes_is_refused_in_words() {
    let (killed, _) = killed(1);
    let good = bytes(&killed);
    let mut driver = ready();
    assert_eq!(resumed(&mut driver, &good), Ok(true));
    assert_eq!(resumed(&mut driver, &vec![0; state::SIZE]), Ok(false));
    let refusal = |driver: &mut Driver, at: usize, with: &[u8]| {
        let mut bad = good.clone();
        bad[at..at + with.len()].copy_from_slice(with);
        resumed(driver, &bad).unwrap_err()
    };
    let nvme = refusal(&mut driver, 0, b"FARSNVME");
    assert_eq!(
        nvme,
        "the state is that of an NVMe controller, and not of a virtio device"
    );
    let text = refusal(&mut driver, 8, &[9]);
    assert!(text.contains("version 9"), "{text}");
    let text = refusal(&mut driver, 12, &[3]);
    assert!(text.contains("malformed"), "{text}");
    // Counters of queue 0: taken, given back.
    let text = refusal(&mut driver, 4096, &[0xff; 8]);
    assert!(text.contains("too large"), "{text}");
    let text = refusal(&mut driver, 4096 + 16, &[5]);
    assert!(text.contains("a counter of a queue"), "{text}");
    // The request's entry: its queue, its number, its first descriptor.
    for (at, with, what) in [
        (8, 3, "of no queue"),
        (16, 9, "number of a command"),
        (64, 64, "first descriptor"),
        (67, 1, "first descriptor"),
    ] {
        let text = refusal(&mut driver, REQUESTS_IN_FLIGHT + at, &[with]);
        assert!(text.contains(what), "{text}");
    }
    let short = driver.state.as_ref().unwrap().slice(0, 4096).unwrap();
    let text = driver.device.set_state(short, true).unwrap_err();
    assert!(text.contains("4096 bytes"), "{text}");
    // After a refusal it is a device as any other.
    driver.device.reset();
    driver.state = None;
    driver.start();
    io(&mut driver, 0, 9);
}

/// Nothing in it can do more than the guest itself: DMA faults and errors, and no panic.
#[test]
fn garbage_is_refused_or_harmless() {
    let (killed, _) = killed(5);
    let good = bytes(&killed);
    let mut driver = ready();
    let mut random = super::random::Random(1);
    let (mut refused, mut taken) = (0, 0);
    for round in 0..3000 {
        let mut bad = good.clone();
        for _ in 0..=round % 8 {
            // Header, counters, snapshots, or the table's first entries.
            let at = match random.below(4) {
                0 => 16 + random.below(64),
                1 => 4096 + random.below(96),
                2 => 12288 + random.below(200),
                _ => 12288 + (64 << 10) + random.below(5 * 128),
            };
            bad[at as usize] = random.below(256) as u8;
        }
        match resumed(&mut driver, &bad) {
            Ok(_) => taken += 1,
            Err(_) => refused += 1,
        }
        for _ in 0..3 {
            driver.poll();
        }
        driver.reset_device();
    }
    println!("{refused} refused, {taken} taken");
    assert!(refused > 100 && taken > 100, "{refused} {taken}");
}
