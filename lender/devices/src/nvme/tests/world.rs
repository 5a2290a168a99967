//! The guest's part: memory, interrupts and a driver.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
    sync::atomic::{Ordering, fence},
    time::{Duration, Instant},
};

use farside_fabric::memory::HostSlice;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::retry_on_intr,
};
use tempfile::TempDir;

pub use super::entries::{Cqe, OK, Sqe};
use super::{
    crash::Killed,
    failing::{Faults, Watch},
};
pub use crate::test_bus::{BASE, Irq, Memory, SIZE};
use crate::{
    Bus, Device,
    block::{EngineChoice, Image},
    nvme::{Config, Nvme},
};

/// Where the medium of a controller is that shares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Here,
    /// At a lender, over a connection.
    Lent,
}

/// Bytes of an image.
pub const IMAGE: u64 = 16 << 20;

pub const ASQ: u64 = BASE;
pub const ACQ: u64 = BASE + 0x1000;
/// The two pages of shadow doorbells and event indexes.
pub const SHADOWS: u64 = BASE + 0x2000;
/// Pages of queue pairs: submission, completion, at 64 KiB each.
pub const RINGS: u64 = BASE + 0x10_0000;
/// Data buffers of commands.
pub const DATA: u64 = BASE + 0x100_0000;
/// Entries of the admin queues.
pub const ADMIN_ENTRIES: u16 = 32;

/// The driver's end of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    pub id: u16,
    pub entries: u16,
    pub sq: u64,
    pub cq: u64,
    pub tail: u16,
    pub head: u16,
    pub phase: bool,
}

impl Pair {
    fn new(id: u16, entries: u16) -> Self {
        let at = RINGS + u64::from(id) * 0x2_0000;
        Self {
            id,
            entries,
            sq: at,
            cq: at + 0x1_0000,
            tail: 0,
            head: 0,
            phase: true,
        }
    }
}

/// Test fixture: device, memory, interrupts and queues.
pub struct Driver {
    pub nvme: Nvme,
    pub memory: Memory,
    pub irq: Irq,
    pub pairs: Vec<Pair>,
    /// The addresses of shadow doorbells, if they are written first, as Linux does.
    pub shadow: Option<(u64, u64)>,
    /// Whether doorbells are also written to that memory before Doorbell Buffer Config.
    pub mirror_doorbells: bool,
    /// The page of the doorbells, of a controller that has them mapped.
    pub mapped: Option<HostSlice>,
    /// Writes to doorbell registers.
    pub rings: u64,
    pub image: PathBuf,
    _directory: TempDir,
    next_id: u16,
    pub(super) config: Config,
    /// The image, which the lender has open.
    pub(super) lent: Image,
    /// Of a medium that fails.
    pub(super) faults: Option<Faults>,
    pub(super) watch: Option<Watch>,
    /// The state of a controller that can be killed.
    pub state: Option<HostSlice>,
    /// Of one that shares its namespace: its name, and where its medium is.
    pub share: Option<(&'static str, Place)>,
    /// What happens when it was killed, before the next one starts.
    pub while_dead: Option<Box<dyn FnMut()>>,
    /// How often it was.
    pub kills: u32,
    /// It is killed again after so many points.
    pub kill_every: Option<u64>,
}

pub const ENGINES: [EngineChoice; 2] = [EngineChoice::IoUring, EngineChoice::Threads];

/// A directory with an image of `size` bytes, each sector marked.
pub fn image(size: u64) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    let file = File::create(&path).unwrap();
    file.set_len(size).unwrap();
    (directory, path)
}

pub(super) fn clone(image: &Image) -> Image {
    Image {
        file: image.file.try_clone().unwrap(),
        ..*image
    }
}

/// Runs a test on each engine.
pub fn on_each_engine(test: impl Fn(&mut Driver)) {
    for engine in ENGINES {
        let mut driver = Driver::ready(engine);
        test(&mut driver);
    }
}

impl Driver {
    pub fn off(configure: impl FnOnce(&mut Config)) -> Self {
        let (directory, path) = image(IMAGE);
        let mut config = Config::new(&path);
        configure(&mut config);
        let lent = config.open_image().unwrap();
        Self {
            nvme: Nvme::with_image("disk0", &config, clone(&lent)).unwrap(),
            lent,
            faults: None,
            watch: None,
            memory: Memory::new(),
            irq: Irq::default(),
            pairs: Vec::new(),
            shadow: None,
            mirror_doorbells: false,
            mapped: None,
            rings: 0,
            image: path,
            _directory: directory,
            next_id: 0,
            config,
            state: None,
            share: None,
            while_dead: None,
            kills: 0,
            kill_every: None,
        }
    }

    /// Enabled, with one I/O pair of 64 entries.
    pub fn ready(engine: EngineChoice) -> Self {
        Self::ready_with(|config| config.engine = engine)
    }

    pub fn ready_with(configure: impl FnOnce(&mut Config)) -> Self {
        let mut driver = Self::off(configure);
        driver.enable();
        driver.create_pair(1, 64);
        driver
    }

    /// Again after a kill, as a backend sends what a worker has not served.
    pub fn with<R>(&mut self, mut act: impl FnMut(&mut Nvme, &mut Bus<'_>) -> R) -> R {
        loop {
            let mut bus = Bus {
                dma: &mut self.memory,
                irq: &mut self.irq,
            };
            if self.state.is_none() {
                return act(&mut self.nvme, &mut bus);
            }
            let nvme = &mut self.nvme;
            match catch_unwind(AssertUnwindSafe(|| act(nvme, &mut bus))) {
                Ok(result) => return result,
                Err(killed) if killed.is::<Killed>() => self.restart(),
                Err(panic) => resume_unwind(panic),
            }
        }
    }

    pub fn read32(&mut self, at: u64) -> u32 {
        let mut data = [0; 4];
        self.with(|nvme, bus| nvme.bar_read(0, at, &mut data, bus));
        u32::from_le_bytes(data)
    }

    pub fn read64(&mut self, at: u64) -> u64 {
        let mut data = [0; 8];
        self.with(|nvme, bus| nvme.bar_read(0, at, &mut data, bus));
        u64::from_le_bytes(data)
    }

    pub fn write32(&mut self, at: u64, value: u32) {
        self.with(|nvme, bus| nvme.bar_write(0, at, &value.to_le_bytes(), bus));
    }

    pub fn write64(&mut self, at: u64, value: u64) {
        self.with(|nvme, bus| nvme.bar_write(0, at, &value.to_le_bytes(), bus));
    }

    pub fn poll(&mut self) -> bool {
        self.with(|nvme, bus| nvme.poll(bus))
    }

    pub fn enable_notifications(&mut self) -> bool {
        self.with(|nvme, bus| nvme.enable_notifications(bus))
    }

    /// Sleeps as an owner does if [`Device::enable_notifications`] returns true.
    fn sleep(&mut self) {
        let is_polled = self.nvme.is_polled();
        let looks_again = self.nvme.looks_again();
        let fd = self.nvme.wake_fd().unwrap();
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let patience = match is_polled {
            true => Duration::from_micros(20),
            false => looks_again.unwrap_or(Duration::from_secs(10)),
        };
        let timeout = Timespec::try_from(patience).unwrap();
        // libFuzzer's timer interrupts it.
        let ready = retry_on_intr(|| poll(&mut fds, Some(&timeout))).unwrap();
        assert!(
            is_polled || looks_again.is_some() || ready != 0,
            "asleep, and nothing will wake it"
        );
    }

    /// Drives the device as its owner does, until `done`.
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < Duration::from_secs(20), "no {what}");
            if !self.poll() && self.enable_notifications() {
                if done(self) {
                    return;
                }
                self.sleep();
            }
        }
    }

    /// Enables the controller in the same order as Linux.
    pub fn enable(&mut self) {
        self.write32(0x14, 0);
        self.until("disabled state", |driver| driver.read32(0x1c) & 1 == 0);
        let entries = u32::from(ADMIN_ENTRIES) - 1;
        self.write32(0x24, entries << 16 | entries);
        self.write64(0x28, ASQ);
        self.write64(0x30, ACQ);
        self.memory.put(ASQ, &[0; 0x2000]);
        self.write32(0x14, 4 << 20 | 6 << 16);
        self.write32(0x14, 4 << 20 | 6 << 16 | 1);
        assert_eq!(self.read32(0x1c), 1, "ready");
        let mut admin = Pair::new(0, ADMIN_ENTRIES);
        (admin.sq, admin.cq) = (ASQ, ACQ);
        self.pairs = vec![admin];
        self.shadow = None;
    }

    pub fn create_pair(&mut self, id: u16, entries: u16) -> usize {
        let pair = Pair::new(id, entries);
        self.memory
            .put(pair.cq, &vec![0; usize::from(entries) * 16]);
        let size = u32::from(entries - 1) << 16 | u32::from(id);
        let cq = Sqe::new(5)
            .prp(pair.cq, 0)
            .cdw(10, size)
            .cdw(11, u32::from(id) << 16 | 3);
        assert_eq!(self.admin(cq).status, OK);
        let sq = Sqe::new(1)
            .prp(pair.sq, 0)
            .cdw(10, size)
            .cdw(11, u32::from(id) << 16 | 1);
        assert_eq!(self.admin(sq).status, OK);
        self.pairs.push(pair);
        self.pairs.len() - 1
    }

    pub fn doorbell(&mut self, index: u64, value: u16) {
        if let Some(page) = &self.mapped {
            let at = index as usize * 4;
            return page.store_u32(at, value.into(), Ordering::Release).unwrap();
        }
        if let Some((values, events)) = self.shadow
            && index >= 2
        {
            let old = self.memory.get_u32(values + index * 4) as u16;
            self.memory
                .put(values + index * 4, &u32::from(value).to_le_bytes());
            fence(Ordering::SeqCst);
            let event = self.memory.get_u32(events + index * 4) as u16;
            // As Linux and SPDK determine whether the write passed the event index: by the
            // old value in memory. Where a queue was in use before, a zero written over
            // the initial zero is not detectable, so it is rung.
            let passed = value.wrapping_sub(event).wrapping_sub(1) < value.wrapping_sub(old);
            if !passed && (value, old) != (0, 0) {
                return;
            }
        } else if self.mirror_doorbells && index >= 2 {
            self.memory
                .put(SHADOWS + index * 4, &u32::from(value).to_le_bytes());
        }
        self.rings += 1;
        self.write32(0x1000 + index * 4, value.into());
    }

    pub fn new_id(&mut self) -> u16 {
        self.next_id = self.next_id.wrapping_add(1);
        self.next_id
    }

    /// Puts a command into queue `at` and rings. Returns its id.
    pub fn submit(&mut self, at: usize, sqe: Sqe) -> u16 {
        let id = self.new_id();
        self.submit_as(at, sqe, id);
        id
    }

    pub fn submit_as(&mut self, at: usize, sqe: Sqe, id: u16) {
        self.put(at, sqe, id);
        self.ring_tail(at);
    }

    /// Takes the next completion of queue `at`, if there is one.
    pub fn take(&mut self, at: usize) -> Option<Cqe> {
        let cqe = self.peel(at)?;
        self.ring_head(at);
        Some(cqe)
    }

    pub fn ring_head(&mut self, at: usize) {
        let Pair { id, head, .. } = self.pairs[at];
        self.doorbell(u64::from(id) * 2 + 1, head);
    }

    /// The next completion of queue `at`, without ringing.
    pub fn peel(&mut self, at: usize) -> Option<Cqe> {
        let mut pair = self.pairs[at];
        let cqe = self.look(&mut pair);
        self.pairs[at] = pair;
        cqe
    }

    pub(super) fn look(&self, pair: &mut Pair) -> Option<Cqe> {
        let slot = pair.cq + u64::from(pair.head) * 16;
        let raw = self.memory.get(slot, 16);
        let word = |at: usize| u16::from_le_bytes([raw[at], raw[at + 1]]);
        let status = word(14);
        if (status & 1 != 0) != pair.phase {
            return None;
        }
        pair.head = (pair.head + 1) % pair.entries;
        if pair.head == 0 {
            pair.phase = !pair.phase;
        }
        Some(Cqe {
            result: u32::from_le_bytes(raw[..4].try_into().unwrap()),
            sq_head: word(8),
            sq_id: word(10),
            id: word(12),
            status: (status >> 9 & 7, status >> 1 & 0xff),
        })
    }

    /// Waits for the next completion of queue `at`.
    pub fn wait(&mut self, at: usize) -> Cqe {
        let mut cqe = None;
        self.until("completion", |driver| {
            cqe = driver.take(at);
            cqe.is_some()
        });
        cqe.unwrap()
    }

    /// Executes an admin command.
    pub fn admin(&mut self, sqe: Sqe) -> Cqe {
        self.execute(0, sqe)
    }

    /// Executes a command of the first I/O queue.
    pub fn io(&mut self, sqe: Sqe) -> Cqe {
        self.execute(1, sqe)
    }

    fn execute(&mut self, at: usize, sqe: Sqe) -> Cqe {
        let id = self.submit(at, sqe);
        let cqe = self.wait(at);
        assert_eq!((cqe.id, cqe.sq_id), (id, self.pairs[at].id));
        cqe
    }

    pub fn identify(&mut self, cns: u32, nsid: u32) -> Vec<u8> {
        let cqe = self.admin(Sqe::new(6).nsid(nsid).prp(DATA, 0).cdw(10, cns));
        assert_eq!(cqe.status, OK);
        self.memory.get(DATA, 4096)
    }

    pub fn feature(&mut self, feature: u32, cdw11: u32) -> Cqe {
        self.admin(Sqe::new(0x0a).cdw(10, feature).cdw(11, cdw11))
    }

    pub fn set_feature(&mut self, feature: u32, cdw11: u32) -> Cqe {
        self.admin(Sqe::new(9).cdw(10, feature).cdw(11, cdw11))
    }

    pub fn log(&mut self, page: u32, len: u32) -> Vec<u8> {
        let cqe = self.admin(
            Sqe::new(2)
                .nsid(0xffff_ffff)
                .prp(DATA, 0)
                .cdw(10, page | (len / 4 - 1) << 16),
        );
        assert_eq!(cqe.status, OK);
        self.memory.get(DATA, len as usize)
    }

    /// The image's bytes, read directly.
    pub fn disk(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        File::open(&self.image)
            .unwrap()
            .read_exact_at(&mut bytes, at)
            .unwrap();
        bytes
    }

    pub fn set_disk(&self, at: u64, bytes: &[u8]) {
        File::options()
            .write(true)
            .open(&self.image)
            .unwrap()
            .write_all_at(bytes, at)
            .unwrap();
    }

    pub fn stat(&self, name: &str) -> u64 {
        self.nvme
            .stats()
            .into_iter()
            .find(|(other, _)| *other == name)
            .unwrap()
            .1
    }
}

/// Bytes that depend on their position and `seed`.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}
