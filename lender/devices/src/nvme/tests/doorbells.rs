//! Shadow doorbells, with a driver that behaves as Linux does.

use super::world::{BASE, DATA, Driver, OK, Pair, SHADOWS, Sqe, on_each_engine};
use crate::Device;

impl Driver {
    /// Zeroes the doorbell memory, as drivers do before Doorbell Buffer Config.
    pub fn clear_doorbell_buffer(&mut self) {
        self.memory.put(SHADOWS, &[0; 0x2000]);
    }

    /// Enables shadow doorbells.
    pub fn configure_doorbells(&mut self) {
        let (values, events) = (SHADOWS, SHADOWS + 0x1000);
        let cqe = self.admin(Sqe::new(0x7c).prp(values, events));
        assert_eq!(cqe.status, OK);
        self.shadow = Some((values, events));
    }

    /// Puts a command into queue `at`, without ringing.
    pub fn put(&mut self, at: usize, sqe: Sqe, id: u16) {
        let pair = &mut self.pairs[at];
        let slot = pair.sq + u64::from(pair.tail) * 64;
        pair.tail = (pair.tail + 1) % pair.entries;
        self.memory.put(slot, &sqe.id(id).bytes());
    }

    pub fn ring_tail(&mut self, at: usize) {
        let Pair { id, tail, .. } = self.pairs[at];
        self.doorbell(u64::from(id) * 2, tail);
    }

    /// Puts commands into queue `at`, and rings once for all. Returns their ids.
    pub fn submit_batch(&mut self, at: usize, sqes: impl IntoIterator<Item = Sqe>) -> Vec<u16> {
        let ids = sqes.into_iter().map(|sqe| {
            let id = self.new_id();
            self.put(at, sqe, id);
            id
        });
        let ids = ids.collect();
        self.ring_tail(at);
        ids
    }

    /// Takes `count` posted completions of queue `at`, and writes the head once.
    pub fn take_batch(&mut self, at: usize, count: u16) {
        for _ in 0..count {
            assert_eq!(self.peel(at).unwrap().status, OK);
        }
        self.ring_head(at);
    }
}

fn read(block: u64) -> Sqe {
    Sqe::new(2).nsid(1).prp(DATA, 0).blocks(block, 1)
}

#[test]
fn configuration_is_checked() {
    let mut driver = Driver::ready_with(|_| {});
    let cqe = driver.admin(Sqe::new(0x7c).prp(BASE + 0x2008, BASE + 0x3000));
    assert_eq!(cqe.status, (0, 0x02));
    let cqe = driver.admin(Sqe::new(0x7c).prp(BASE + 0x2000, BASE + 0x3004));
    assert_eq!(cqe.status, (0, 0x02));
}

#[test]
fn a_busy_guest_rings_nothing() {
    on_each_engine(|driver| {
        driver.configure_doorbells();
        assert_eq!(driver.io(read(0)).status, OK);
        driver.poll();
        let rings = driver.rings;
        // Many turns of the ring, with a device that is polled all the time.
        for round in 0..500 {
            for block in 0..7 {
                driver.submit(1, read(round + block));
            }
            let mut done = 0;
            while done < 7 {
                driver.poll();
                done += usize::from(driver.take(1).is_some());
            }
        }
        let heads = driver.rings - rings;
        // The head's event index stays where it is, so it is passed once a
        // turn of the ring: 3500 entries of 64.
        assert!(heads <= 3500 / 64 + 1, "{heads} doorbells rung");
        assert!(driver.stat("shadow_polls") > 500);
    });
}

#[test]
fn an_armed_device_is_rung_every_time() {
    on_each_engine(|driver| {
        driver.configure_doorbells();
        for round in 0..300 {
            driver.until("sleep", |driver| {
                !driver.poll() && driver.enable_notifications()
            });
            let rings = driver.rings;
            driver.submit(1, read(round));
            assert_eq!(driver.rings, rings + 1, "round {round}");
            assert_eq!(driver.wait(1).status, OK);
        }
    });
}

#[test]
fn arm_sees_what_came_before_the_event_index() {
    on_each_engine(|driver| {
        driver.configure_doorbells();
        driver.io(read(0));
        driver.until("idle device", |driver| !driver.poll());
        driver.submit(1, read(1));
        assert!(!driver.enable_notifications(), "a command is there");
        assert_eq!(driver.wait(1).status, OK);
    });
}

#[test]
fn late_register_writes_do_not_move_the_tail_back() {
    on_each_engine(|driver| {
        driver.configure_doorbells();
        for block in 0..20 {
            assert_eq!(driver.io(read(block)).status, OK);
        }
        driver.write32(0x1008, 3);
        driver.write32(0x100c, 3);
        driver.until("idle device", |driver| !driver.poll());
        assert!(driver.take(1).is_none(), "nothing is done twice");
        assert_eq!(driver.io(read(1)).status, OK);
    });
}

#[test]
fn a_driver_that_never_writes_the_shadow_is_served() {
    let mut driver = Driver::ready_with(|_| {});
    for block in 0..5 {
        assert_eq!(driver.io(read(block)).status, OK);
    }
    driver.configure_doorbells();
    driver.shadow = None;
    for block in 0..100 {
        assert_eq!(driver.io(read(block)).status, OK);
    }
}

#[test]
fn queues_created_later_start_at_zero_whatever_is_there() {
    let mut driver = Driver::ready_with(|_| {});
    driver.configure_doorbells();
    let (values, _) = driver.shadow.unwrap();
    driver.memory.put(values + 16, &[9, 0, 0, 0, 7, 0, 0, 0]);
    driver.create_pair(2, 16);
    driver.poll();
    assert!(driver.take(2).is_none());
    for block in 0..40 {
        driver.submit(2, read(block));
        assert_eq!(driver.wait(2).status, OK);
    }
}

#[test]
fn a_full_completion_queue_asks_for_the_head() {
    on_each_engine(|driver| {
        driver.configure_doorbells();
        let at = driver.create_pair(2, 8);
        // Twice the room: the second half waits for the guest.
        for round in 0..20 {
            for block in 0..7 {
                driver.submit(at, read(block));
            }
            driver.until("sleep", |driver| {
                !driver.poll() && driver.enable_notifications()
            });
            for _ in 0..7 {
                assert_eq!(driver.wait(at).status, OK, "round {round}");
            }
        }
    });
}

#[test]
fn the_line_falls_without_a_trap_only_when_it_must() {
    let mut driver = Driver::ready_with(|_| {});
    driver.irq.intx = true;
    driver.configure_doorbells();
    driver.until("sleep", |driver| {
        !driver.poll() && driver.enable_notifications()
    });
    for _ in 0..20 {
        driver.submit(1, Sqe::new(0).nsid(1));
        driver.until("interrupt", |driver| driver.irq.line);
        driver.until("sleep", |driver| {
            !driver.poll() && driver.enable_notifications()
        });
        // The device sleeps; consuming the entry must wake it.
        let rings = driver.rings;
        assert_eq!(driver.take(1).unwrap().status, OK);
        assert_eq!(driver.rings, rings + 1);
        driver.poll();
        assert!(!driver.irq.line);
    }
}

#[test]
fn values_out_of_range_are_an_event_once() {
    let mut driver = Driver::ready_with(|_| {});
    driver.configure_doorbells();
    driver.io(read(0));
    driver.submit_as(0, Sqe::new(0x0c), 77);
    driver.poll();
    let (values, _) = driver.shadow.unwrap();
    driver.memory.put(values + 8, &64u32.to_le_bytes());
    let event = driver.wait(0);
    assert_eq!((event.id, event.result), (77, 0x01_01_00));
    driver.log(1, 64);
    driver.submit_as(0, Sqe::new(0x0c), 78);
    for _ in 0..10 {
        driver.poll();
    }
    assert!(driver.take(0).is_none(), "reported already");
    let tail = u32::from(driver.pairs[1].tail);
    driver.memory.put(values + 8, &tail.to_le_bytes());
    assert_eq!(driver.io(read(0)).status, OK);
}

#[test]
fn unreachable_doorbells_are_fatal() {
    let mut driver = Driver::ready_with(|_| {});
    driver.submit(0, Sqe::new(0x7c).prp(0x1000, 0x2000));
    driver.poll();
    driver.poll();
    assert_eq!(driver.read32(0x1c), 3);
    driver.with(|nvme, bus| nvme.enable_notifications(bus));
    driver.enable();
    driver.create_pair(1, 64);
    assert_eq!(driver.io(read(0)).status, OK);
}

/// A driver's use of the buffer before it is configured.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    /// None: its first write follows the completion of Doorbell Buffer Config.
    Untouched,
    /// It also writes every doorbell to the buffer, as Linux does.
    Kept,
}

/// Puts `counts` commands into the I/O queues, and takes all their completions: exactly
/// one for each.
fn run_all(driver: &mut Driver, counts: [u16; 2]) {
    let mut ids = [Vec::new(), Vec::new()];
    for (queue, ids) in ids.iter_mut().enumerate() {
        for block in 0..counts[queue] {
            ids.push(driver.submit(1 + queue, read(block.into())));
        }
    }
    take_all(driver, ids);
}

fn take_all(driver: &mut Driver, ids: [Vec<u16>; 2]) {
    for (queue, mut ids) in ids.into_iter().enumerate() {
        while !ids.is_empty() {
            let cqe = driver.wait(1 + queue);
            assert_eq!(cqe.status, OK);
            let at = ids.iter().position(|id| *id == cqe.id);
            ids.swap_remove(at.unwrap_or_else(|| panic!("{cqe:?} on queue {queue}, not {ids:?}")));
        }
    }
    driver.until("sleep", |driver| {
        !driver.poll() && driver.enable_notifications()
    });
    for queue in [1, 2] {
        assert_eq!(driver.take(queue), None, "nothing is done twice");
    }
}

/// Like [`run_all`], with one write to each doorbell.
fn run_batches(driver: &mut Driver, counts: [u16; 2]) {
    let mut batch = |at: usize| {
        let rings = driver.rings;
        let ids = driver.submit_batch(at, (0..counts[at - 1]).map(|n| read(n.into())));
        assert_eq!(driver.rings, rings + 1, "the device sleeps");
        ids
    };
    let ids = [batch(1), batch(2)];
    take_all(driver, ids);
}

/// A driver's first use of a buffer that was configured during I/O.
#[derive(Clone, Copy)]
enum First {
    /// This many commands for each queue, each with a doorbell write.
    Each([u16; 2]),
    /// Some commands for both, with one doorbell write: from most positions they wrap.
    Batch,
}

/// The buffer is configured during I/O: with two queues at any position of their rings,
/// with commands that are submitted, fetched, completed or reaped. The initial zero is
/// not a tail: taking it for one would execute the ring again.
#[test]
fn the_buffer_is_switched_on_at_any_point_of_io() {
    const ENTRIES: u16 = 4;
    let mut driver = Driver::ready_with(|_| {});
    for before in [Before::Untouched, Before::Kept] {
        for (first, second) in (0..ENTRIES).flat_map(|a| (0..ENTRIES).map(move |b| (a, b))) {
            for open in 0..ENTRIES {
                for polls in 0..3 {
                    for use_first in [
                        First::Each([1, 0]),
                        First::Each([0, 1]),
                        First::Each([1, 1]),
                        First::Batch,
                    ] {
                        driver.enable();
                        driver.clear_doorbell_buffer();
                        driver.create_pair(1, ENTRIES);
                        driver.create_pair(2, ENTRIES);
                        driver.mirror_doorbells = before == Before::Kept;
                        // Rings at any place.
                        for _ in 0..first {
                            run_all(&mut driver, [1, 0]);
                        }
                        for _ in 0..second {
                            run_all(&mut driver, [0, 1]);
                        }
                        // As many in flight, seen by the device or not.
                        let open = [open, ENTRIES - 1 - open];
                        let mut ids = [Vec::new(), Vec::new()];
                        for queue in [0, 1] {
                            for block in 0..open[queue] {
                                ids[queue].push(driver.submit(1 + queue, read(block.into())));
                            }
                        }
                        for _ in 0..polls {
                            driver.poll();
                        }
                        driver.mirror_doorbells = false;
                        driver.configure_doorbells();
                        take_all(&mut driver, ids);
                        match use_first {
                            First::Each(counts) => run_all(&mut driver, counts),
                            First::Batch => run_batches(&mut driver, [3, 2]),
                        }
                        // More than a turn of both rings.
                        for counts in [[1, 0], [0, 1], [3, 2], [2, 3], [3, 3], [1, 1]] {
                            run_all(&mut driver, counts);
                        }
                    }
                }
            }
        }
    }
    assert_eq!(driver.log(1, 64)[..8], [0; 8], "no error was logged");
}

/// The event index of a completion queue must not be at or beyond the tail while a command
/// waits for room: the guest would not ring for its next head, and the command would never
/// be executed. For every position of a ring, and any number of entries consumed at once.
#[test]
fn a_full_completion_queue_is_rung_wherever_it_stands_and_however_much_is_consumed() {
    const ENTRIES: u16 = 4;
    for place in 0..2 * ENTRIES {
        for consumed in 1..ENTRIES {
            let mut driver = Driver::ready_with(|_| {});
            driver.configure_doorbells();
            driver.create_pair(2, ENTRIES);
            for _ in 0..place {
                run_all(&mut driver, [0, 1]);
            }
            // A full completion queue, and the same number of commands that wait for room.
            for _ in 0..2 {
                for block in 0..ENTRIES - 1 {
                    driver.submit(2, read(block.into()));
                }
                driver.until("sleep", |driver| {
                    !driver.poll() && driver.enable_notifications()
                });
                let done = driver.stat("io_commands") - u64::from(place);
                assert_eq!(done, u64::from(ENTRIES - 1));
            }
            // The guest takes some and writes its head once, as Linux does.
            let rings = driver.rings;
            driver.take_batch(2, consumed);
            assert_eq!(
                driver.rings,
                rings + 1,
                "place {place}, {consumed} consumed"
            );
            driver.until("sleep", |driver| {
                !driver.poll() && driver.enable_notifications()
            });
            let done = driver.stat("io_commands") - u64::from(place);
            assert_eq!(done, u64::from(ENTRIES - 1 + consumed));
            for _ in 0..2 * (ENTRIES - 1) - consumed {
                assert_eq!(driver.wait(2).status, OK);
            }
        }
    }
}

/// The guest resets a controller without shutdown, and unmasks its line meanwhile.
#[test]
fn a_mask_that_is_written_without_bus_mastering_is_no_fault() {
    const INTMC: u64 = 0x10;
    let mut driver = Driver::ready_with(|_| {});
    driver.clear_doorbell_buffer();
    driver.configure_doorbells();
    let id = driver.submit(1, Sqe::new(0).nsid(1));
    driver.until("completion", |driver| {
        driver.peel(1).is_some_and(|cqe| cqe.id == id)
    });
    assert!(driver.irq.line, "its completion is not consumed");
    driver.with(|nvme, bus| {
        while !nvme.quiesce(bus) {
            std::thread::yield_now();
        }
        nvme.resume(bus);
    });
    driver.memory.bus_master = false;
    driver.memory.on_translate = Some(Box::new(|iova| panic!("DMA at {iova}")));
    driver.write32(INTMC, 1);
    assert_eq!(driver.read32(0x1c), 1, "ready, and no fatal status");
}
