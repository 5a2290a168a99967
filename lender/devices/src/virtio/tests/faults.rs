//! A guest whose medium fails in all ways that it can, and whose device is killed at each step: see [`Watch`] for what
//! no device may do then.

use std::collections::BTreeMap;

use super::{
    crash,
    failing::{Faults, Watch},
    random::Random,
    watch::{Effect, Id},
    world::{
        Buffer, DATA, DISCARD, Driver, F_EVENT_IDX, FLUSH, GET_ID, IOERR, OK, READ, UNSUPP, WRITE,
        WRITE_ZEROES, pattern, readable, writable,
    },
};
use crate::Device;

/// Pages of the disk that are used; each has a buffer.
const PAGES: u64 = 48;
const PAGE: u64 = 4096;

/// Polls without a request that is returned, after which the driver resets the device.
const PATIENCE: u32 = 400;

const ALL: Faults = Faults {
    seed: 0,
    lost: 150,
    busy: 6,
    hangs: 40,
    again: 12,
    short: 8,
    delay: 6,
};

/// What a page holds, as far as the guest knows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Content {
    Known(u64),
    Zero,
    Unknown,
}

impl Content {
    fn bytes(self) -> Option<Vec<u8>> {
        match self {
            Self::Known(seed) => Some(pattern(PAGE as usize, seed)),
            Self::Zero => Some(vec![0; PAGE as usize]),
            Self::Unknown => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum What {
    Write(u64, Content),
    Read(u64),
    Flush,
    /// Without an effect, and with this status.
    Other(u8),
}

struct Guest {
    driver: Driver,
    watch: Watch,
    random: Random,
    pages: Vec<Content>,
    waits: BTreeMap<Id, What>,
    /// Queues that were interrupted for, and that the guest has not emptied since.
    raised: [bool; 2],
    idle: u32,
    written: u64,
    counts: BTreeMap<&'static str, u64>,
}

impl Drop for Guest {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!(
                "seed {}:\n{}",
                self.driver.faults().seed,
                self.watch.story()
            );
        }
    }
}

impl Guest {
    fn new(seed: u64, faults: Faults) -> Self {
        let mut driver = Driver::off(|_| {});
        let watch = driver.set_faults(Faults { seed, ..faults });
        driver.keep_state();
        let mut guest = Self {
            driver,
            watch,
            random: Random(seed),
            pages: vec![Content::Zero; PAGES as usize],
            waits: BTreeMap::new(),
            raised: [false; 2],
            idle: 0,
            written: 0,
            counts: BTreeMap::new(),
        };
        guest.begin();
        guest
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn begin(&mut self) {
        let crash = crash::take();
        let without = self.random.below(2) << F_EVENT_IDX;
        self.driver.start_without(without);
        self.driver.indirect = self.random.below(2) == 0;
        self.watch.reset();
        self.driver.irq.raised.clear();
        self.raised = [false; 2];
        self.idle = 0;
        crash::after(crash);
    }

    /// What was in flight is not returned any more.
    fn forget(&mut self) {
        for (_, what) in std::mem::take(&mut self.waits) {
            if let What::Write(page, _) = what {
                self.pages[page as usize] = Content::Unknown;
            }
        }
    }

    /// Resets the device, as a driver does that gives it up.
    fn reset(&mut self) {
        self.count("resets");
        self.driver.reset_device();
        self.watch.reset();
        self.watch.set_quiet(Some("reset"));
        for _ in 0..3 {
            self.driver.poll();
        }
        self.watch.set_quiet(None);
        self.forget();
        self.begin();
    }

    /// Resets the function, as its owner does: it quiesces it first.
    fn reset_function(&mut self) {
        self.count("function resets");
        self.quiesce();
        let crash = crash::take();
        self.driver.device.reset();
        self.driver.irq.line = false;
        crash::after(crash);
        self.watch.reset();
        self.forget();
        self.begin();
    }

    fn quiesce(&mut self) {
        self.driver.until("quiescence", |driver| {
            driver.with(|device, bus| device.quiesce(bus))
        });
    }

    fn submit(&mut self, queue: usize, kind: u32, page: u64, data: &[Buffer], of: (What, Effect)) {
        // Before the device can take it; no kill comes in between.
        let crash = crash::take();
        let (what, effect) = of;
        let free = self.driver.free(queue);
        let count = if self.driver.indirect {
            1
        } else {
            data.len() + 2
        };
        if free.len() >= count {
            let id = (queue as u16, free[free.len() - count]);
            self.watch.submitted(id, effect);
            self.waits.insert(id, what);
            crash::after(crash);
            let head = self.driver.request(queue, kind, page * 8, data);
            assert_eq!(head, id.1);
        } else {
            crash::after(crash);
        }
    }

    fn free_page(&mut self) -> Option<u64> {
        let page = self.random.below(PAGES);
        let is_used = self.waits.values().any(|what| match *what {
            What::Write(other, _) | What::Read(other) => other == page,
            _ => false,
        });
        (!is_used).then_some(page)
    }

    fn start(&mut self) {
        let queue = self.random.below(2) as usize;
        let Some(page) = self.free_page() else {
            return;
        };
        let buffer = DATA + page * PAGE;
        let bytes = page * PAGE..(page + 1) * PAGE;
        // In one buffer or two.
        let cut = 512 * self.random.below(8) as u32;
        let parts = |buffer_of: fn(u64, u32) -> Buffer| {
            let (first, rest) = (cut, PAGE as u32 - cut);
            let mut parts = vec![buffer_of(buffer + u64::from(first), rest)];
            if first > 0 {
                parts.insert(0, buffer_of(buffer, first));
            }
            parts
        };
        match self.random.below(16) {
            0..6 => {
                self.written += 1;
                let data = Content::Known(self.written);
                self.driver.memory.put(buffer, &data.bytes().unwrap());
                let of = (What::Write(page, data), Effect::Write(bytes));
                self.submit(queue, WRITE, page, &parts(readable), of);
            }
            6..10 => {
                self.driver.memory.put(buffer, &[0xa5; PAGE as usize]);
                let of = (What::Read(page), Effect::Read(bytes));
                self.submit(queue, READ, page, &parts(writable), of);
            }
            kind @ (10 | 11) => {
                let range = [page * 8, 8 | (kind & 1) << 32];
                self.driver.memory.put_qwords(buffer, range);
                let data = [readable(buffer, 16)];
                let of = Effect::Zero(bytes, false);
                let of = (What::Write(page, Content::Zero), of);
                self.submit(queue, WRITE_ZEROES, 0, &data, of);
            }
            12 => {
                self.driver.memory.put_qwords(buffer, [page * 8, 8]);
                let data = [readable(buffer, 16)];
                // It is advice.
                let of = (What::Write(page, Content::Unknown), Effect::Trim(bytes));
                self.submit(queue, DISCARD, 0, &data, of);
            }
            13 | 14 => {
                let flushes = |what: &What| matches!(what, What::Flush);
                if !self.waits.values().any(flushes) {
                    self.submit(queue, FLUSH, 0, &[], (What::Flush, Effect::Flush));
                }
            }
            _ => {
                let (kind, status) = match cut {
                    0 => (GET_ID, OK),
                    _ => (99, UNSUPP),
                };
                let data = [writable(DATA + PAGES * PAGE, 20)];
                self.submit(queue, kind, 0, &data, (What::Other(status), Effect::None));
            }
        }
    }

    /// Takes up to `most` requests of a queue that the guest was interrupted for.
    fn take(&mut self, queue: usize, most: u64) {
        for vector in std::mem::take(&mut self.driver.irq.raised) {
            if let Some(raised) = self.raised.get_mut(usize::from(vector).wrapping_sub(1)) {
                *raised = true;
            }
        }
        if !self.raised[queue] {
            return;
        }
        for _ in 0..most {
            let Some((head, _)) = self.driver.take(queue) else {
                self.raised[queue] = false;
                return;
            };
            let id = (queue as u16, head);
            self.watch.completed(id);
            let what = self.waits.remove(&id).unwrap();
            self.idle = 0;
            let status = self.driver.status_of(queue, head);
            self.returned(what, status);
        }
    }

    fn returned(&mut self, what: What, status: u8) {
        let text = format!("{what:?}: {status}");
        if status == IOERR {
            self.count("given up");
            match what {
                What::Write(page, _) => self.pages[page as usize] = Content::Unknown,
                What::Read(_) => {}
                What::Flush | What::Other(_) => panic!("{text}"),
            }
            return;
        }
        match what {
            What::Write(page, content) => {
                assert_eq!(status, OK, "{text}");
                self.pages[page as usize] = content;
            }
            What::Read(page) => {
                assert_eq!(status, OK, "{text}");
                let read = self.driver.memory.get(DATA + page * PAGE, PAGE as usize);
                let expected = self.pages[page as usize].bytes();
                assert!(expected.is_none_or(|data| data == read), "page {page}");
            }
            What::Flush => assert_eq!(status, OK, "{text}"),
            What::Other(expected) => assert_eq!(status, expected, "{text}"),
        }
    }

    /// Stops all DMA for a while.
    fn quiet(&mut self) {
        self.count("quiesced");
        self.quiesce();
        // A kill meanwhile begins a process that is not quiesced.
        let crash = crash::take();
        self.watch.set_quiet(Some("quiesced"));
        for _ in 0..3 {
            self.driver.poll();
            self.driver.enable_notifications();
        }
        self.watch.set_quiet(None);
        self.driver.with(|device, bus| device.resume(bus));
        crash::after(crash);
    }

    fn restart(&mut self) {
        self.driver.device.detach_state();
        self.driver.restart();
    }

    /// A process begins before the device may do DMA.
    fn restart_without_dma(&mut self) {
        self.count("without DMA");
        let crash = crash::take();
        self.restart();
        self.driver.memory.bus_master = false;
        self.watch.set_quiet(Some("no bus master"));
        for _ in 0..3 {
            self.driver.poll();
            self.driver.enable_notifications();
        }
        self.watch.set_quiet(None);
        self.driver.memory.bus_master = true;
        crash::after(crash);
    }

    fn poll(&mut self) {
        self.driver.poll();
        self.idle += 1;
        if self.idle < PATIENCE || self.waits.is_empty() {
            return;
        }
        for (index, queue) in self.driver.queues.iter().enumerate() {
            let returned = self.driver.look(queue, queue.seen);
            assert_eq!(returned, None, "no interrupt of queue {index} for it");
        }
        assert!(
            self.driver.faults().lost != 0,
            "never returned: {:?}",
            self.waits
        );
        self.reset();
    }

    fn step(&mut self) {
        match self.random.below(64) {
            0..22 => self.start(),
            22..48 => self.poll(),
            48..60 => {
                let (queue, most) = (self.random.below(2) as usize, 1 + self.random.below(8));
                self.take(queue, most);
            }
            60 | 61 => {
                self.driver.enable_notifications();
            }
            _ => match self.random.below(24) {
                0 => self.reset(),
                1 => self.reset_function(),
                2..5 => self.quiet(),
                5..8 => self.restart_without_dma(),
                _ => {}
            },
        }
    }

    /// Waits for everything in flight, then compares the medium.
    fn finish(&mut self) {
        let mut polls = 0;
        while !self.waits.is_empty() {
            self.poll();
            (0..2).for_each(|queue| self.take(queue, 64));
            polls += 1;
            assert!(polls < 100 * PATIENCE, "{:?}", self.waits);
        }
        for (page, content) in (0..).zip(&self.pages) {
            let disk = self.driver.disk(page * PAGE, PAGE as usize);
            let expected = content.bytes();
            assert!(expected.is_none_or(|data| data == disk), "page {page}");
        }
    }
}

fn seed() -> u64 {
    match std::env::var("FARSIDE_SEED") {
        Ok(text) => text.parse().expect("a number in FARSIDE_SEED"),
        Err(_) => 1,
    }
}

/// Lives of a device that is killed after each few stores, DMA and operations of the medium.
fn lives(faults: Faults, first: u64, count: u64) -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::new();
    for seed in first..first + count {
        let mut guest = Guest::new(seed, faults);
        let mut random = Random(seed);
        for _ in 0..800 {
            if !crash::is_due() && random.one_in(8) {
                crash::after(Some(random.below(60)));
            }
            guest.driver.kill_every = random.one_in(6).then(|| random.below(60));
            if random.one_in(60) {
                guest.restart();
            }
            guest.step();
        }
        guest.driver.kill_every = None;
        crash::after(None);
        guest.finish();
        guest.counts.insert("kills", guest.driver.kills.into());
        guest
            .counts
            .insert("requests executed again", guest.watch.replayed());
        for (what, count) in std::mem::take(&mut guest.counts) {
            *counts.entry(what).or_default() += count;
        }
    }
    counts
}

#[test]
fn no_forbidden_request_after_kills_while_the_medium_fails() {
    let counts = lives(ALL, seed(), 12);
    println!("{counts:?}");
    assert!(counts["kills"] > 500, "{counts:?}");
    for what in ["resets", "function resets", "quiesced", "without DMA"] {
        assert!(counts.contains_key(what), "{counts:?}");
    }
    assert!(counts["requests executed again"] > 500, "{counts:?}");
}

/// Nothing is lost: so each request is returned, without an error.
#[test]
fn each_request_is_returned_while_the_medium_is_slow() {
    let counts = lives(Faults { lost: 0, ..ALL }, seed(), 12);
    println!("{counts:?}");
    assert!(!counts.contains_key("given up"), "{counts:?}");
}

/// One kill in each life, at each point of it.
#[test]
fn a_kill_between_any_two_steps_is_outlived() {
    let mut points = 0;
    for point in 0.. {
        let mut guest = Guest::new(seed(), Faults { lost: 0, ..ALL });
        crash::after(Some(point));
        for _ in 0..40 {
            guest.step();
        }
        // Into the places of requests that were in flight.
        guest.reset();
        for _ in 0..40 {
            guest.step();
        }
        let missed = crash::is_due();
        crash::after(None);
        guest.finish();
        if missed {
            break;
        }
        points += 1;
    }
    println!("killed at {points} points");
    assert!(points > 200, "{points}");
}
