//! Controllers that are killed, and go on as another process.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::crash;
use super::world::{DATA, Driver, OK, SHADOWS, Sqe, pattern};
use crate::{Device, block::EngineChoice, state};

const BLOCK: u64 = 512;

fn transfer(opcode: u8, block: u64, buffer: u64) -> Sqe {
    Sqe::new(opcode)
        .nsid(1)
        .prp(DATA + buffer * 4096, 0)
        .blocks(block, 1)
}

fn ready() -> Driver {
    let mut driver = Driver::off(|_| {});
    driver.keep_state();
    driver
}

fn ready_with_mapped_doorbells() -> Driver {
    let mut driver = Driver::with_mapped_doorbells(EngineChoice::default());
    driver.keep_state();
    driver
}

/// Takes completions until each of `ids` has its own, and no other has any.
fn collect(driver: &mut Driver, at: usize, ids: &[u16]) -> BTreeMap<u16, (u16, u16)> {
    let mut found = BTreeMap::new();
    for _ in ids {
        let cqe = driver.wait(at);
        assert!(ids.contains(&cqe.id), "{cqe:?}");
        assert_eq!(found.insert(cqe.id, cqe.status), None, "{cqe:?} twice");
    }
    driver.poll();
    assert_eq!(driver.take(at), None, "one completion each");
    found
}

fn all_ok(driver: &mut Driver, at: usize, ids: &[u16]) {
    let found = collect(driver, at, ids);
    assert!(found.values().all(|status| *status == OK), "{found:?}");
}

/// Writes, flushes, reads and compares, with many commands in flight.
fn io(driver: &mut Driver, at: usize, seed: u64) {
    let base = at as u64 * 64;
    let mut expected = Vec::new();
    let mut writes = Vec::new();
    for n in 0..6 {
        let data = pattern(BLOCK as usize, seed * 100 + base + n);
        driver.memory.put(DATA + n * 4096, &data);
        writes.push(transfer(1, base + n, n));
        expected.push(data);
    }
    let ids = driver.submit_batch(at, writes);
    all_ok(driver, at, &ids);
    let flush = driver.submit(at, Sqe::new(0).nsid(1));
    all_ok(driver, at, &[flush]);
    for n in 0..6 {
        driver.memory.put(DATA + n * 4096, &[0; BLOCK as usize]);
    }
    let ids = driver.submit_batch(at, (0..6).map(|n| transfer(2, base + n, n)));
    all_ok(driver, at, &ids);
    for (n, data) in (0..).zip(&expected) {
        assert!(
            driver.memory.get(DATA + n * 4096, data.len()) == *data,
            "block {n}"
        );
        assert!(
            driver.disk((base + n) * BLOCK, data.len()) == *data,
            "block {n}"
        );
    }
}

/// What a driver does from boot to shutdown.
fn life(driver: &mut Driver) {
    driver.enable();
    // An event request that stays open.
    let event = driver.submit(0, Sqe::new(0x0c));
    let first = driver.create_pair(1, 8);
    io(driver, first, 1);
    assert_eq!(driver.set_feature(6, 0).status, OK);
    assert_eq!(driver.feature(6, 0).result, 0);
    assert_eq!(driver.set_feature(0x0b, 0x1f).status, OK);
    if driver.mapped.is_none() {
        driver.clear_doorbell_buffer();
        driver.configure_doorbells();
    }
    let second = driver.create_pair(2, 16);
    for seed in 2..4 {
        io(driver, first, seed);
        io(driver, second, seed);
    }
    assert_eq!(driver.feature(6, 0).result, 0, "the write cache stays off");
    assert_eq!(driver.feature(0x0b, 0).result, 0x1f);
    // A queue with commands in flight is deleted and made anew.
    let reads = driver.submit_batch(second, (0..4).map(|n| transfer(2, n, n)));
    driver.poll();
    assert_eq!(driver.admin(Sqe::new(0).cdw(10, 2)).status, OK);
    all_ok(driver, second, &reads);
    assert_eq!(driver.admin(Sqe::new(4).cdw(10, 2)).status, OK);
    driver.pairs.truncate(2);
    driver.memory.put(SHADOWS + 16, &[0; 8]);
    let second = driver.create_pair(2, 4);
    let one = driver.submit(second, transfer(2, 1, 1));
    all_ok(driver, second, &[one]);
    // The event request is still there.
    let abort = driver.submit(0, Sqe::new(8).cdw(10, u32::from(event) << 16));
    let ends = collect(driver, 0, &[event, abort]);
    assert_eq!((ends[&event], ends[&abort]), ((0, 7), OK));
    // A reset ends what is in flight.
    driver.submit_batch(first, (0..4).map(|n| transfer(2, n, n)));
    driver.enable();
    let first = driver.create_pair(1, 8);
    io(driver, first, 5);
    driver.write32(0x14, 4 << 20 | 6 << 16 | 1 << 14 | 1);
    driver.until("shutdown", |driver| driver.read32(0x1c) == 9);
}

#[test]
fn a_controller_that_is_killed_at_any_store_completes_each_command_once() {
    kill_at_stores(ready, 1);
}

#[test]
fn a_controller_with_mapped_doorbells_that_is_killed_at_some_store_completes_each_command_once() {
    kill_at_stores(ready_with_mapped_doorbells, 4);
}

/// At one store of `step`, one life after the other.
fn kill_at_stores(ready: fn() -> Driver, step: usize) {
    let mut kills = 0;
    for point in (0..).step_by(step) {
        let mut driver = ready();
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
    assert!(kills > 1000 / step as u32, "{kills} points");
    println!("killed at {kills} points");
}

#[test]
fn a_controller_may_be_killed_again_while_it_recovers() {
    let mut random = 1u64;
    let mut next = move |most: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % most
    };
    for _ in 0..40 {
        let mut driver = ready();
        driver.kill_every = Some(next(60) + 20);
        crash::after(driver.kill_every);
        life(&mut driver);
        crash::after(None);
        assert!(driver.kills > 10, "{}", driver.kills);
    }
}

/// A flush whose completion was begun takes longer at the second time: another command gets the number that it had.
#[test]
fn a_completion_that_was_begun_before_two_kills_is_not_lost() {
    const INVALID_OPCODE: (u16, u16) = (0, 1);
    for first in 0..24 {
        for second in 0..24 {
            let mut driver = ready();
            driver.enable();
            let at = driver.create_pair(1, 8);
            crash::after(Some(first));
            let flush = driver.submit(at, Sqe::new(0).nsid(1));
            let start = Instant::now();
            while driver.kills == 0 && start.elapsed() < Duration::from_millis(20) {
                driver.poll();
            }
            crash::after(Some(second));
            let other = driver.submit(at, Sqe::new(0x7f).nsid(1));
            let found = collect(&mut driver, at, &[flush, other]);
            crash::after(None);
            assert_eq!(found[&flush], OK, "{first}, {second}");
            assert_eq!(found[&other], INVALID_OPCODE, "{first}, {second}");
        }
    }
}

/// Restarts as if SIGKILL had come in between two polls.
fn restart(driver: &mut Driver) {
    driver.nvme.detach_state();
    driver.restart();
}

#[test]
fn an_interrupt_of_each_queue_follows() {
    let mut driver = ready();
    driver.enable();
    driver.create_pair(1, 8);
    driver.create_pair(2, 8);
    restart(&mut driver);
    driver.irq.raised.clear();
    driver.memory.bus_master = false;
    driver.poll();
    assert!(driver.irq.raised.is_empty());
    driver.memory.bus_master = true;
    driver.poll();
    assert_eq!(driver.irq.raised, [0u16, 1, 2]);
}

#[test]
fn a_format_is_not_done_again() {
    let mut driver = ready();
    driver.enable();
    driver.set_disk(0, &[7; 4096]);
    let format = driver.submit(0, Sqe::new(0x80).nsid(1).cdw(10, 1 << 9));
    crash::after(Some(4));
    driver.poll();
    crash::after(None);
    assert_eq!(driver.kills, 1);
    driver.set_disk(0, &[8; 4096]);
    let cqe = driver.wait(0);
    assert_eq!((cqe.id, cqe.status), (format, (0, 0x21)));
    assert_eq!(driver.disk(0, 4096), [8; 4096]);
}

fn bytes(driver: &Driver) -> Vec<u8> {
    let mut bytes = vec![0; state::SIZE];
    driver.state.as_ref().unwrap().read(&mut bytes);
    bytes
}

fn resumed(driver: &mut Driver, bytes: &[u8]) -> Result<bool, String> {
    let state = driver.state.clone().unwrap();
    state.write(bytes);
    driver.nvme.detach_state();
    driver.nvme.reset();
    driver.nvme.set_state(state, true)
}

#[test]
fn what_no_controller_writes_is_refused_in_words() {
    let mut driver = ready();
    driver.enable();
    driver.create_pair(1, 8);
    let good = bytes(&driver);
    assert_eq!(resumed(&mut driver, &good), Ok(true));
    assert_eq!(resumed(&mut driver, &vec![0; state::SIZE]), Ok(false));
    let refusal = |driver: &mut Driver, at: usize, with: &[u8]| {
        let mut bad = good.clone();
        bad[at..at + with.len()].copy_from_slice(with);
        resumed(driver, &bad).unwrap_err()
    };
    let text = refusal(&mut driver, 0, b"x");
    assert!(text.contains("that of no device"), "{text}");
    let text = refusal(&mut driver, 8, &[9]);
    assert!(
        text.contains("version 9") && text.contains("versions 1 and 2"),
        "{text}"
    );
    let text = refusal(&mut driver, 12, &[3]);
    assert!(text.contains("malformed"), "{text}");
    // Counters of queue 1.
    for (offset, what) in [(8, "tail"), (24, "head")] {
        let text = refusal(&mut driver, 4096 + 32 + offset, &[8]);
        assert!(text.contains(what), "{text}");
    }
    let text = refusal(&mut driver, 4096 + 32, &[0xff; 8]);
    assert!(text.contains("too large"), "{text}");
    let short = driver.state.as_ref().unwrap().slice(0, 4096).unwrap();
    let text = driver.nvme.set_state(short, true).unwrap_err();
    assert!(text.contains("4096 bytes"), "{text}");
    // After a refusal it is a controller as any other.
    driver.nvme.reset();
    driver.state = None;
    driver.enable();
    let at = driver.create_pair(1, 8);
    io(&mut driver, at, 9);
}

/// Nothing in it can do more than the guest itself: DMA faults and errors, and no panic.
#[test]
fn garbage_is_refused_or_harmless() {
    let mut driver = ready();
    driver.enable();
    let at = driver.create_pair(1, 8);
    driver.submit(0, Sqe::new(0x0c));
    driver.submit_batch(at, (0..5).map(|n| transfer(1, n, n)));
    let good = bytes(&driver);
    let mut random = 88172645463325252u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let (mut refused, mut taken) = (0, 0);
    for round in 0..3000 {
        let mut bad = good.clone();
        for _ in 0..=round % 8 {
            // Snapshots and words, or the table's first entries.
            let at = match next() % 3 {
                0 => 16 + next() as usize % 64,
                1 => 4096 + next() as usize % 96,
                _ => 12288 + next() as usize % 2200,
            };
            bad[at] = next() as u8;
        }
        for entry in 0..next() as usize % 3 {
            let at = state::SIZE - 128 * (1536 - entry);
            for (n, byte) in bad[at..at + 128].iter_mut().enumerate() {
                if n >= 32 || next() % 4 == 0 {
                    *byte = next() as u8;
                }
            }
        }
        match resumed(&mut driver, &bad) {
            Ok(_) => taken += 1,
            Err(_) => refused += 1,
        }
        for _ in 0..3 {
            driver.poll();
        }
        driver.write32(0x14, 0);
        driver.until("disabled state", |driver| driver.read32(0x1c) & 1 == 0);
    }
    println!("{refused} refused, {taken} taken");
    assert!(refused > 100 && taken > 100, "{refused} {taken}");
}

/// What a controller of farside 0.1.0 has left, whose state had version 1.
#[test]
fn a_controller_goes_on_from_a_state_of_the_version_before() {
    let sample = include_bytes!("state-1.sample");
    let mut bytes = vec![0; state::SIZE];
    let mut rest = &sample[..];
    while let [a, b, c, d, len, more @ ..] = rest {
        let at = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
        let (part, more) = more.split_at(usize::from(*len));
        bytes[at..at + part.len()].copy_from_slice(part);
        rest = more;
    }
    let mut driver = ready();
    assert_eq!(resumed(&mut driver, &bytes), Ok(true));
    assert_eq!(driver.read32(0x1c), 1);
    assert_eq!(driver.read64(0x28), super::world::ASQ);
    // Six writes of block 10 to 15 were in flight.
    for n in 0..6 {
        driver
            .memory
            .put(DATA + n * 4096, &pattern(BLOCK as usize, n));
    }
    driver.poll();
    driver.until("writes", |driver| driver.stat("writes") == 6);
    for n in 0..6 {
        assert_eq!(driver.disk((10 + n) * BLOCK, 512), pattern(512, n));
    }
}
