//! Rings and chains that no driver should make: the device needs a reset, and works after one.

use super::world::{
    BASE, DATA, Driver, F_EVENT_IDX, INDIRECT, NEXT, OK, Queue, READ, SIZE, readable, writable,
};
use crate::Device;

/// Lets `act` break a ready device; it needs a reset then, says so once, and works after one.
fn breaks(what: &str, act: impl Fn(&mut Driver, Queue)) {
    for without in [0, 1 << F_EVENT_IDX] {
        let mut driver = Driver::off(|_| {});
        driver.start_without(without);
        assert_eq!(driver.execute(READ, 0, &[writable(DATA, 512)]).0, OK);
        driver.poll();
        driver.irq.raised.clear();
        let queue = driver.queues[0].clone();
        act(&mut driver, queue);
        driver.until(what, |driver| driver.status() == 0x4f);
        assert_eq!(driver.irq.raised, [0], "{what}");
        // It does nothing more.
        driver.request(1, READ, 0, &[writable(DATA, 512)]);
        let requests = driver.stat("requests");
        while !driver.enable_notifications() {
            driver.poll();
        }
        driver.poll();
        assert_eq!(driver.stat("requests"), requests, "{what}");
        driver.start();
        assert_eq!(driver.execute(READ, 0, &[writable(DATA, 512)]).0, OK);
    }
}

#[test]
fn an_index_that_jumps() {
    breaks("index", |driver, queue| {
        let next = queue.next.wrapping_add(queue.size + 1);
        driver.memory.put(queue.available + 2, &next.to_le_bytes());
    });
}

#[test]
fn a_head_outside_of_the_table() {
    for head in [64, 255, 0xffff] {
        breaks("head", |driver, _| driver.offer(0, head));
    }
}

#[test]
fn chains_that_loop_or_leave_their_table() {
    breaks("loop of one", |driver, queue| {
        driver.describe(queue.descriptors, 9, readable(DATA, 16), NEXT, 9);
        driver.offer(0, 9);
    });
    breaks("loop of two", |driver, queue| {
        driver.describe(queue.descriptors, 9, readable(DATA, 16), NEXT, 10);
        driver.describe(queue.descriptors, 10, readable(DATA, 16), NEXT, 9);
        driver.offer(0, 9);
    });
    breaks("outside", |driver, queue| {
        driver.describe(queue.descriptors, 9, readable(DATA, 16), NEXT, 64);
        driver.offer(0, 9);
    });
    breaks("more than 4 GiB", |driver, queue| {
        driver.describe(queue.descriptors, 9, readable(DATA, !0), NEXT, 10);
        driver.describe(queue.descriptors, 10, readable(DATA, !0), 0, 0);
        driver.offer(0, 9);
    });
}

#[test]
fn indirect_tables_that_are_none() {
    let table = DATA + 0x1000;
    breaks("indirect in indirect", |driver, queue| {
        driver.describe(table, 0, readable(table, 16), INDIRECT, 0);
        driver.describe(queue.descriptors, 9, readable(table, 16), INDIRECT, 0);
        driver.offer(0, 9);
    });
    breaks("loop in an indirect table", |driver, queue| {
        driver.describe(table, 0, readable(DATA, 16), NEXT, 0);
        driver.describe(queue.descriptors, 9, readable(table, 16 * 4), INDIRECT, 0);
        driver.offer(0, 9);
    });
    breaks("longer than a queue", |driver, queue| {
        for n in 0..300 {
            driver.describe(table, n, readable(DATA, 16), NEXT, n + 1);
        }
        let all = readable(table, 16 * 301);
        driver.describe(queue.descriptors, 9, all, INDIRECT, 0);
        driver.offer(0, 9);
    });
    for len in [0, 8, 17, 0xffff_fff0] {
        breaks("length", |driver, queue| {
            driver.describe(queue.descriptors, 9, readable(table, len), INDIRECT, 0);
            driver.offer(0, 9);
        });
    }
    for at in [0, BASE + SIZE as u64, u64::MAX - 7] {
        breaks("address", |driver, queue| {
            driver.describe(queue.descriptors, 9, readable(at, 32), INDIRECT, 0);
            driver.offer(0, 9);
        });
    }
}

#[test]
fn chains_that_are_no_requests() {
    breaks("no status", |driver, _| {
        driver.submit(0, &[readable(DATA, 16)]);
    });
    breaks("an empty status", |driver, _| {
        driver.submit(0, &[readable(DATA, 16), writable(DATA, 0)]);
    });
    breaks("no header", |driver, _| {
        driver.submit(0, &[readable(DATA, 15), writable(DATA, 1)]);
    });
    breaks("buffers in the wrong order", |driver, _| {
        let buffers = [readable(DATA, 16), writable(DATA, 1), readable(DATA, 1)];
        driver.submit(0, &buffers);
    });
    breaks("a status that cannot be written", |driver, _| {
        driver.submit(0, &[readable(DATA, 16), writable(0, 1)]);
    });
}

#[test]
fn a_header_that_cannot_be_read_is_an_error_of_its_request() {
    let mut driver = Driver::ready(|_| {});
    driver.submit(0, &[readable(0, 16), writable(DATA, 1)]);
    driver.wait(0);
    assert_eq!(driver.memory.get(DATA, 1), [1]);
    assert_eq!(driver.status(), 0xf);
}

#[test]
fn rings_outside_of_memory() {
    let end = BASE + SIZE as u64;
    for field in [32, 40, 48] {
        for at in [end, end - 64, u64::MAX - 15, 0] {
            let mut driver = Driver::ready(|_| {});
            driver.write(22, 2, 2);
            driver.write(24, 2, 64);
            for (other, good) in [(32, BASE), (40, BASE + 0x8000), (48, BASE + 0xc000)] {
                driver.write(other, 8, if other == field { at } else { good });
            }
            driver.write(28, 2, 1);
            driver.wait_for_failure();
            let faults = driver.memory.faults.len();
            assert!(faults <= 1, "{faults} faults");
            driver.poll();
            assert_eq!(driver.memory.faults.len(), faults, "counted once");
            driver.start();
            assert_eq!(driver.execute(READ, 0, &[writable(DATA, 512)]).0, OK);
        }
    }
}

#[test]
fn queues_that_cannot_be_enabled() {
    for (field, len, value) in [
        (24, 2, 0),
        (24, 2, 3),
        (24, 2, 512),
        (24, 2, 0xffff),
        (32, 8, BASE + 8),
        (40, 8, BASE + 1),
        (48, 8, BASE + 2),
    ] {
        let mut driver = Driver::ready(|_| {});
        driver.write(22, 2, 2);
        driver.write(32, 8, BASE);
        driver.write(40, 8, BASE + 0x8000);
        driver.write(48, 8, BASE + 0xc000);
        driver.write(field, len, value);
        driver.write(28, 2, 1);
        assert_eq!(driver.status(), 0x4f, "{field} {value:#x}");
        assert_eq!(driver.read(28, 2), 0);
        driver.start();
    }
}

/// A driver that does not wait for the end of a reset gets a device that is off.
#[test]
fn writes_during_a_reset_have_no_effect() {
    let mut driver = Driver::ready(|_| {});
    for n in 0..20 {
        driver.request(0, READ, n, &[writable(DATA, 64 << 10)]);
    }
    driver.poll();
    driver.set_status(0);
    if driver.status() != 0 {
        driver.set_status(0xf);
        driver.until("reset", |driver| driver.status() == 0);
    }
    assert_eq!(driver.device.in_flight(), Some((0, 1028)));
    driver.start();
    assert_eq!(driver.execute(READ, 0, &[writable(DATA, 512)]).0, OK);
}

#[test]
fn a_ring_that_shares_memory_with_everything_ends_somehow() {
    let mut driver = Driver::ready(|_| {});
    driver.write(22, 2, 2);
    driver.write(24, 2, 256);
    for field in [32, 40, 48] {
        driver.write(field, 8, BASE);
    }
    driver.write(28, 2, 1);
    for n in 0..1000u16 {
        driver.memory.put(BASE + 2, &n.to_le_bytes());
        driver.poll();
    }
    driver.start();
    assert_eq!(driver.execute(READ, 0, &[writable(DATA, 512)]).0, OK);
}

/// As when firmware changes the attributes of low RAM: a device that polls its rings meanwhile is not at fault.
#[test]
fn rings_that_are_unmapped_for_a_moment_are_polled_again() {
    let mut driver = Driver::ready(|_| {});
    assert_eq!(driver.execute(READ, 0, &[writable(DATA, 512)]).0, OK);
    while !driver.with(|device, bus| device.quiesce(bus)) {}
    driver.memory.unmapped = true;
    driver.with(|device, bus| device.resume(bus));
    driver.poll();
    assert!(driver.enable_notifications());
    driver.poll();
    assert_eq!((driver.memory.faults.len(), driver.status()), (0, 0xf));
    driver.memory.unmapped = false;
    assert_eq!(driver.execute(READ, 0, &[writable(DATA, 512)]).0, OK);
    // A driver that notifies wants them to be there.
    while !driver.with(|device, bus| device.quiesce(bus)) {}
    driver.memory.unmapped = true;
    driver.with(|device, bus| device.resume(bus));
    driver.write(super::world::NOTIFY, 2, 0);
    driver.poll();
    assert_eq!((driver.memory.faults.len(), driver.status()), (1, 0x4f));
    driver.memory.unmapped = false;
    driver.start();
}
