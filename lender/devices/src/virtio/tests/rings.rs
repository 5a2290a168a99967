//! Any order of requests, sizes, notifications and polls.

use proptest::prelude::*;

use super::world::{DATA, Driver, F_EVENT_IDX, OK, READ, WRITE, pattern, readable, writable};

#[derive(Clone, Debug)]
enum Step {
    /// A read or write at a sector, in buffers of these lengths (of 512 bytes in all).
    Request {
        queue: usize,
        write: bool,
        sector: u64,
        cuts: Vec<u32>,
    },
    Poll,
    Enable,
    Take {
        queue: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let request = (
        0..2usize,
        any::<bool>(),
        0..64u64,
        prop::collection::vec(1..511u32, 0..4),
    );
    prop_oneof![
        4 => request.prop_map(|(queue, write, sector, cuts)| Step::Request {
            queue,
            write,
            sector,
            cuts
        }),
        2 => Just(Step::Poll),
        1 => Just(Step::Enable),
        2 => (0..2usize).prop_map(|queue| Step::Take { queue }),
    ]
}

/// A request in flight: its queue and head, and what the data must be.
struct Expected {
    queue: usize,
    head: u16,
    at: u64,
    read: Option<Vec<u8>>,
}

fn check(driver: &Driver, expected: &mut Vec<Expected>, queue: usize, head: u16) {
    let is_this = |it: &Expected| (it.queue, it.head) == (queue, head);
    let index = expected.iter().position(is_this).unwrap();
    let done = expected.swap_remove(index);
    assert_eq!(driver.status_of(queue, head), OK);
    if let Some(data) = done.read {
        assert_eq!(driver.memory.get(done.at, 512), data);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Each request is returned once, with its data, and no request waits for a notification that the
    /// device did not ask for.
    #[test]
    fn each_request_is_returned_once(
        steps in prop::collection::vec(step(), 1..200),
        event_idx in any::<bool>(),
        indirect in any::<bool>(),
        // What is contiguous in host memory.
        run in prop::sample::select(vec![4096, usize::MAX]),
    ) {
        let mut driver = Driver::off(|_| {});
        driver.start_without(if event_idx { 0 } else { 1 << F_EVENT_IDX });
        driver.indirect = indirect;
        driver.memory.run = run;
        let disk = pattern(64 * 512, 9);
        driver.set_disk(0, &disk);
        let mut expected = Vec::new();
        let mut number = 0;
        for step in steps {
            match step {
                Step::Request { queue, write, sector, cuts } => {
                    let in_queue = expected.iter().filter(|it: &&Expected| it.queue == queue);
                    if in_queue.count() == 8 {
                        continue;
                    }
                    let at = DATA + number % 4096 * 1024;
                    number += 1;
                    // Reads of the first half, writes to the second: their order is not defined.
                    let mut ends: Vec<u32> = cuts;
                    ends.push(512);
                    ends.sort_unstable();
                    ends.dedup();
                    let mut from = 0;
                    let mut buffers = Vec::new();
                    for to in ends {
                        let (at, len) = (at + u64::from(from), to - from);
                        buffers.push(if write { readable(at, len) } else { writable(at, len) });
                        from = to;
                    }
                    let byte = sector as usize * 512;
                    let (kind, sector, read) = match write {
                        true => {
                            driver.memory.put(at, &disk[byte..byte + 512]);
                            (WRITE, sector + 64, None)
                        }
                        false => (READ, sector, Some(disk[byte..byte + 512].to_vec())),
                    };
                    let head = driver.request(queue, kind, sector, &buffers);
                    expected.push(Expected { queue, head, at, read });
                }
                Step::Poll => {
                    driver.poll();
                }
                Step::Enable => {
                    driver.enable_notifications();
                }
                Step::Take { queue } => {
                    if let Some((head, _)) = driver.take(queue) {
                        check(&driver, &mut expected, queue, head);
                    }
                }
            }
        }
        for queue in 0..2 {
            while expected.iter().any(|it| it.queue == queue) {
                let (head, _) = driver.wait(queue);
                check(&driver, &mut expected, queue, head);
            }
        }
        prop_assert!(driver.memory.faults.is_empty());
        prop_assert_eq!(driver.status(), 0xf);
    }
}

/// The indexes wrap at 65536.
#[test]
fn indexes_wrap() {
    for without in [0, 1 << F_EVENT_IDX] {
        let mut driver = Driver::off(|_| {});
        driver.start_without(without);
        for _ in 0..66_000 / 32 {
            for _ in 0..32 {
                driver.request(0, 99, 0, &[]);
            }
            for _ in 0..32 {
                driver.wait(0);
            }
        }
        assert!(driver.queues[0].next < 1000);
        assert_eq!(driver.status(), 0xf);
    }
}
