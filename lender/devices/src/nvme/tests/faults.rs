//! A guest whose medium fails in all ways that it can, and whose controller is killed at each step: see [`Watch`] for
//! what no controller may do then.

use std::collections::BTreeMap;

use super::{
    crash,
    random::Random,
    watch::{Effect, Id, Watch},
    world::{DATA, Driver, OK, Sqe, pattern},
};
use crate::{Device, block::faulty::Faults};

/// Pages of the namespace that are used; each has a buffer.
const PAGES: u64 = 48;
const PAGE: u64 = 4096;

const INVALID_OPCODE: (u16, u16) = (0, 1);
const INVALID_FIELD: (u16, u16) = (0, 2);
const INTERRUPTED: (u16, u16) = (0, 0x21);
/// The medium has given the command up.
const NOT_READY: (u16, u16) = (0, 0x82);

/// Polls without a completion, after which the driver resets the controller.
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
    Compare(u64),
    Flush,
    Format,
    /// Completes with this status, and without an effect.
    Refused((u16, u16)),
    Feature(Option<u32>),
}

struct Guest {
    driver: Driver,
    watch: Watch,
    random: Random,
    pages: Vec<Content>,
    waits: BTreeMap<Id, What>,
    /// Vectors that were raised, and whose queue the guest has not emptied since.
    raised: Vec<bool>,
    /// Of asynchronous event configuration.
    feature: u32,
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
            raised: vec![false; 4],
            feature: 0,
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

    /// Enables the controller, with queues some of which are full soon.
    fn begin(&mut self) {
        let crash = crash::take();
        self.driver.enable();
        for (id, entries) in [(1, 8), (2, 32)] {
            self.driver.create_pair(id, entries);
        }
        if self.random.below(2) == 0 {
            self.driver.clear_doorbell_buffer();
            self.driver.configure_doorbells();
        }
        self.watch.reset();
        self.driver.irq.raised.clear();
        self.raised.fill(false);
        self.feature = 0;
        self.idle = 0;
        crash::after(crash);
    }

    /// What was in flight has no completion any more.
    fn forget(&mut self) {
        for (_, what) in std::mem::take(&mut self.waits) {
            match what {
                What::Write(page, _) => self.pages[page as usize] = Content::Unknown,
                What::Format => self.pages.fill(Content::Unknown),
                _ => {}
            }
        }
    }

    /// Resets the controller, as a driver does whose command takes too long.
    fn reset(&mut self) {
        self.count("resets");
        self.driver.write32(0x14, 0);
        self.driver
            .until("disabled state", |driver| driver.read32(0x1c) & 1 == 0);
        self.watch.reset();
        self.watch.set_quiet(Some("disabled"));
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
        self.driver.until("quiescence", |driver| {
            driver.with(|nvme, bus| nvme.quiesce(bus))
        });
        let crash = crash::take();
        self.driver.nvme.reset();
        self.driver.irq.line = false;
        crash::after(crash);
        self.watch.reset();
        self.forget();
        self.begin();
    }

    /// Room in the submission queue, from the driver's view.
    fn has_room(&self, at: usize) -> bool {
        let pair = self.driver.pairs[at];
        let used = self.waits.keys().filter(|(sq, _)| *sq == pair.id).count();
        used + 1 < pair.entries.into()
    }

    fn submit(&mut self, at: usize, sqe: Sqe, what: What, effect: Effect) {
        let id = (self.driver.pairs[at].id, self.driver.new_id());
        self.watch.submitted(id, effect);
        self.watch.note(format!("{what:?}"));
        self.waits.insert(id, what);
        self.driver.submit_as(at, sqe, id.1);
    }

    fn free_page(&mut self) -> Option<u64> {
        let page = self.random.below(PAGES);
        let mut waits = self.waits.values();
        let is_used = waits.any(|what| match *what {
            What::Write(other, _) | What::Read(other) | What::Compare(other) => other == page,
            What::Format => true,
            _ => false,
        });
        (!is_used).then_some(page)
    }

    fn start(&mut self) {
        let at = 1 + self.random.below(2) as usize;
        let Some(page) = self.free_page().filter(|_| self.has_room(at)) else {
            return;
        };
        let buffer = DATA + page * PAGE;
        let bytes = page * PAGE..(page + 1) * PAGE;
        let sqe = |opcode| Sqe::new(opcode).nsid(1).prp(buffer, 0).blocks(page * 8, 8);
        let fua = (self.random.below(2) as u32) << 30;
        let content = self.pages[page as usize];
        match self.random.below(16) {
            0..5 => {
                self.written += 1;
                let data = Content::Known(self.written);
                self.driver.memory.put(buffer, &data.bytes().unwrap());
                let sqe = sqe(1).cdw(12, 7 | fua);
                self.submit(at, sqe, What::Write(page, data), Effect::Write(bytes));
            }
            5..9 => {
                self.driver.memory.put(buffer, &[0xa5; PAGE as usize]);
                self.submit(at, sqe(2), What::Read(page), Effect::Read(bytes));
            }
            9 => {
                let deallocate = (self.random.below(2) as u32) << 25;
                let sqe = sqe(8).cdw(12, 7 | fua | deallocate);
                let what = What::Write(page, Content::Zero);
                self.submit(at, sqe, what, Effect::Zero(bytes, fua != 0));
            }
            10 => {
                let range = [8 << 32, page * 8];
                self.driver.memory.put_qwords(buffer, range);
                let sqe = Sqe::new(9).nsid(1).prp(buffer, 0).cdw(11, 4);
                // It is advice.
                let what = What::Write(page, Content::Unknown);
                self.submit(at, sqe, what, Effect::Trim(bytes));
            }
            11 => {
                if let Some(data) = content.bytes() {
                    self.driver.memory.put(buffer, &data);
                    self.submit(at, sqe(5), What::Compare(page), Effect::Read(bytes));
                }
            }
            12 | 13 => {
                let flushes = |what: &What| matches!(what, What::Flush);
                if !self.waits.values().any(flushes) {
                    let sqe = Sqe::new(0).nsid(1);
                    self.submit(at, sqe, What::Flush, Effect::Flush);
                }
            }
            14 => {
                let what = What::Refused(INVALID_OPCODE);
                self.submit(at, sqe(0x7f), what, Effect::None);
            }
            _ => {
                // The first half of a compare-and-write (fused), and the second.
                let first = Sqe(std::array::from_fn(|n| {
                    sqe(5).0[n] | if n == 0 { 1 << 8 } else { 0 }
                }));
                let what = What::Refused(INVALID_FIELD);
                self.submit(at, first, what, Effect::None);
            }
        }
    }

    fn start_admin(&mut self) {
        if !self.has_room(0) {
            return;
        }
        match self.random.below(8) {
            0..3 => {
                self.feature = self.random.below(0x20) as u32;
                let sqe = Sqe::new(9).cdw(10, 0x0b).cdw(11, self.feature);
                self.submit(0, sqe, What::Feature(None), Effect::None);
            }
            3..7 => {
                let what = What::Feature(Some(self.feature));
                self.submit(0, Sqe::new(0x0a).cdw(10, 0x0b), what, Effect::None);
            }
            _ if self.waits.is_empty() => {
                let erase = 1 << 9;
                let sqe = Sqe::new(0x80).nsid(1).cdw(10, erase);
                self.submit(0, sqe, What::Format, Effect::Format);
            }
            _ => {}
        }
    }

    /// Takes up to `most` completions of a queue whose interrupt was raised.
    fn take(&mut self, at: usize, most: u64) {
        for vector in std::mem::take(&mut self.driver.irq.raised) {
            self.raised[usize::from(vector)] = true;
        }
        if !self.raised[at] {
            return;
        }
        for _ in 0..most {
            let Some(cqe) = self.driver.peel(at) else {
                self.raised[at] = false;
                return;
            };
            let id = (cqe.sq_id, cqe.id);
            self.watch.completed(id);
            self.driver.ring_head(at);
            let what = self.waits.remove(&id).unwrap();
            self.idle = 0;
            self.completed(what, cqe.status, cqe.result);
        }
    }

    fn completed(&mut self, what: What, status: (u16, u16), result: u32) {
        let text = format!("{what:?}: {status:?}");
        if status == NOT_READY {
            self.count("given up");
            match what {
                What::Write(page, _) => self.pages[page as usize] = Content::Unknown,
                What::Format => self.pages.fill(Content::Unknown),
                What::Read(_) | What::Compare(_) => {}
                _ => panic!("{text}"),
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
            What::Compare(_) | What::Flush => assert_eq!(status, OK, "{text}"),
            What::Format if status == INTERRUPTED => {
                self.count("formats interrupted");
                self.pages.fill(Content::Unknown);
            }
            What::Format => {
                assert_eq!(status, OK, "{text}");
                self.pages.fill(Content::Zero);
            }
            What::Refused(expected) => assert_eq!(status, expected, "{text}"),
            What::Feature(expected) => {
                assert_eq!(status, OK, "{text}");
                assert!(
                    expected.is_none_or(|it| it == result),
                    "{text}, {result:#x}"
                );
            }
        }
    }

    /// Stops all DMA for a while.
    fn quiet(&mut self) {
        self.count("quiesced");
        self.driver.until("quiescence", |driver| {
            driver.with(|nvme, bus| nvme.quiesce(bus))
        });
        // A kill meanwhile begins a process that is not quiesced.
        let crash = crash::take();
        self.watch.set_quiet(Some("quiesced"));
        for _ in 0..3 {
            self.driver.poll();
            self.driver.enable_notifications();
        }
        self.watch.set_quiet(None);
        self.driver.with(|nvme, bus| nvme.resume(bus));
        crash::after(crash);
    }

    fn restart(&mut self) {
        self.driver.nvme.detach_state();
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
        for (at, pair) in self.driver.pairs.clone().into_iter().enumerate() {
            assert!(
                self.driver.peel(at).is_none(),
                "no interrupt of queue {} for a completion",
                pair.id
            );
        }
        assert!(
            self.driver.faults().lost != 0,
            "never completed: {:?}",
            self.waits
        );
        self.reset();
    }

    fn step(&mut self) {
        match self.random.below(64) {
            0..20 => self.start(),
            20..22 => self.start_admin(),
            22..48 => self.poll(),
            48..60 => {
                let (at, most) = (self.random.below(3) as usize, 1 + self.random.below(8));
                self.take(at, most);
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
            (0..3).for_each(|at| self.take(at, 64));
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

/// Lives of a controller that is killed after each few stores, DMA and operations of the medium.
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
            .insert("commands executed again", guest.watch.replayed());
        for (what, count) in std::mem::take(&mut guest.counts) {
            *counts.entry(what).or_default() += count;
        }
    }
    counts
}

#[test]
fn no_forbidden_command_after_kills_while_the_medium_fails() {
    let counts = lives(ALL, seed(), 12);
    println!("{counts:?}");
    assert!(counts["kills"] > 500, "{counts:?}");
    for what in ["resets", "function resets", "quiesced", "without DMA"] {
        assert!(counts.contains_key(what), "{counts:?}");
    }
    assert!(counts["commands executed again"] > 500, "{counts:?}");
}

/// Nothing is lost: so each command completes, without a reset.
#[test]
fn each_command_completes_while_the_medium_is_slow() {
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
        // Into the places of commands that were in flight.
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
