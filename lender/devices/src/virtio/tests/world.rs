//! Drivers of virtio devices, scripted: what all have in common, and the disk's.

use std::{
    fs::File,
    ops::{Deref, DerefMut},
    os::unix::fs::FileExt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
    sync::atomic::{Ordering, fence},
    time::{Duration, Instant},
};

use farside_fabric::memory::{HostSlice, SharedMemory};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::retry_on_intr,
};
use tempfile::TempDir;

use super::{
    crash::Killed,
    failing::{Faults, Watch},
};
pub use crate::test_bus::{BASE, Irq, Memory, SIZE};
use crate::{
    Bus, Device,
    block::{EngineChoice, Image},
    virtio::{Config, VirtioBlk},
};

/// Bytes of an image.
pub const IMAGE: u64 = 16 << 20;
/// The queues, at 64 KiB each: descriptors, available ring, used ring.
pub const RINGS: u64 = BASE;
/// Headers, statuses and indirect tables of requests, at 8 KiB each: for each descriptor of each queue.
pub const REQUESTS: u64 = BASE + 0x40_0000;
/// Data of requests.
pub const DATA: u64 = BASE + 0x180_0000;

pub const READ: u32 = 0;
pub const WRITE: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;

pub const NEXT: u16 = 1;
pub const WRITABLE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Bits of features.
pub const F_RO: u32 = 5;
pub const F_FLUSH: u32 = 9;
pub const F_CONFIG_WCE: u32 = 11;
pub const F_MQ: u32 = 12;
pub const F_EVENT_IDX: u32 = 29;
pub const F_VERSION_1: u32 = 32;
pub const F_ACCESS_PLATFORM: u32 = 33;

/// Where structures are in BAR 0.
pub const ISR: u64 = 0x1000;
pub const DEVICE: u64 = 0x2000;
pub const NOTIFY: u64 = 0x3000;
pub const TABLE: u64 = 0x4000;
pub const PENDING: u64 = 0x5000;

/// A buffer of a request.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub at: u64,
    pub len: u32,
    pub writable: bool,
}

pub fn readable(at: u64, len: u32) -> Buffer {
    let writable = false;
    Buffer { at, len, writable }
}

pub fn writable(at: u64, len: u32) -> Buffer {
    let writable = true;
    Buffer { at, len, writable }
}

/// The driver's end of a queue.
#[derive(Clone, Debug)]
pub struct Queue {
    pub size: u16,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    pub next: u16,
    pub seen: u16,
    /// Free descriptors.
    free: Vec<u16>,
    /// Descriptors of requests in flight, by their first.
    chains: Vec<Vec<u16>>,
}

impl Queue {
    fn new(index: u16, size: u16) -> Self {
        let at = RINGS + u64::from(index) * 0x1_0000;
        Self {
            size,
            descriptors: at,
            available: at + 0x8000,
            used: at + 0xc000,
            next: 0,
            seen: 0,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); size.into()],
        }
    }
}

/// A device under test, and what is around it.
pub trait Model: Device + Sized {
    type World;

    /// Starts another device in place of one that was killed.
    fn restart(driver: &mut Driver<Self>);
}

/// Test fixture: device, memory, interrupts and queues.
pub struct Driver<D: Model = VirtioBlk> {
    pub device: D,
    pub memory: Memory,
    pub irq: Irq,
    pub queues: Vec<Queue>,
    /// How many the driver creates as it starts, and their entries.
    pub queue_count: u16,
    pub queue_size: u16,
    pub features: u64,
    /// Requests use indirect tables.
    pub indirect: bool,
    /// Notifications.
    pub kicks: u64,
    /// The state of a device that can be killed.
    pub state: Option<HostSlice>,
    /// How often it was.
    pub kills: u32,
    /// It is killed again after so many points.
    pub kill_every: Option<u64>,
    pub world: D::World,
}

impl<D: Model> Deref for Driver<D> {
    type Target = D::World;

    fn deref(&self) -> &D::World {
        &self.world
    }
}

impl<D: Model> DerefMut for Driver<D> {
    fn deref_mut(&mut self) -> &mut D::World {
        &mut self.world
    }
}

/// What is around a disk.
pub struct Disk {
    pub image: PathBuf,
    _directory: TempDir,
    pub config: Config,
    /// The image, locked.
    pub lent: Image,
    /// Of a medium that fails.
    pub faults: Option<Faults>,
    pub watch: Option<Watch>,
}

pub const ENGINES: [EngineChoice; 2] = [EngineChoice::IoUring, EngineChoice::Threads];

/// Runs a test on each engine, with and without event indexes and indirect tables.
pub fn on_each_form(test: impl Fn(&mut Driver)) {
    for engine in ENGINES {
        for form in 0..4 {
            let mut driver = Driver::off(|config| config.engine = engine);
            let without = match form & 1 {
                0 => 0,
                _ => 1 << F_EVENT_IDX,
            };
            driver.start_without(without);
            driver.indirect = form & 2 != 0;
            test(&mut driver);
        }
    }
}

impl Driver {
    pub fn off(configure: impl FnOnce(&mut Config)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk.img");
        File::create(&image).unwrap().set_len(IMAGE).unwrap();
        let mut config = Config::new(&image);
        config.queues = 4;
        configure(&mut config);
        let lent = config.open_image().unwrap();
        let image_of_device = Image {
            file: lent.file.try_clone().unwrap(),
            ..lent
        };
        let device = VirtioBlk::with_image("disk0", &config, image_of_device).unwrap();
        Self::new(
            device,
            Disk {
                image,
                _directory: directory,
                config,
                lent,
                faults: None,
                watch: None,
            },
        )
    }

    /// Running, with two queues.
    pub fn ready(configure: impl FnOnce(&mut Config)) -> Self {
        let mut driver = Self::off(configure);
        driver.start();
        driver
    }
}

impl<D: Model> Driver<D> {
    pub fn new(device: D, world: D::World) -> Self {
        Self {
            device,
            memory: Memory::new(),
            irq: Irq::default(),
            queues: Vec::new(),
            queue_count: 2,
            queue_size: 64,
            features: 0,
            indirect: false,
            kicks: 0,
            state: None,
            kills: 0,
            kill_every: None,
            world,
        }
    }

    /// Has a state outlive the device.
    pub fn keep_state(&mut self) {
        let size = self.device.state_bytes() as usize;
        let memory = SharedMemory::anonymous(size).unwrap();
        let state = memory.slice(0, size).unwrap();
        assert!(!self.device.set_state(state.clone(), false).unwrap());
        self.state = Some(state);
    }

    /// Starts another device in place of one that was killed.
    pub fn restart(&mut self) {
        D::restart(self);
    }

    pub fn start(&mut self) {
        self.start_without(0);
    }

    /// As Linux does it, but for `features`.
    pub fn start_without(&mut self, features: u64) {
        self.reset_device();
        self.set_status(1);
        self.set_status(3);
        self.features = self.offered() & !features;
        self.accept(self.features);
        self.set_status(0xb);
        assert_eq!(self.status(), 0xb, "features are accepted");
        self.queues.clear();
        self.write(16, 2, 0);
        for index in 0..self.queue_count {
            self.create_queue(index, self.queue_size);
        }
        self.set_status(0xf);
        assert_eq!(self.status(), 0xf);
    }

    pub fn reset_device(&mut self) {
        self.set_status(0);
        self.until("reset", |driver| driver.status() == 0);
    }

    pub fn offered(&mut self) -> u64 {
        self.write(0, 4, 0);
        let low = self.read(4, 4);
        self.write(0, 4, 1);
        low | self.read(4, 4) << 32
    }

    pub fn accept(&mut self, features: u64) {
        for half in 0..2 {
            self.write(8, 4, half);
            self.write(12, 4, features >> (32 * half) & 0xffff_ffff);
        }
    }

    pub fn status(&mut self) -> u8 {
        self.read(20, 1) as u8
    }

    pub fn set_status(&mut self, status: u8) {
        self.write(20, 1, status.into());
    }

    pub fn create_queue(&mut self, index: u16, size: u16) {
        let queue = Queue::new(index, size);
        self.memory.put(queue.available, &vec![0; 0x8000]);
        self.write(22, 2, index.into());
        self.write(24, 2, size.into());
        self.write(26, 2, u64::from(index) + 1);
        self.write(32, 8, queue.descriptors);
        self.write(40, 4, queue.available & 0xffff_ffff);
        self.write(44, 4, queue.available >> 32);
        self.write(48, 8, queue.used);
        self.write(28, 2, 1);
        self.queues.push(queue);
    }

    /// Again after a kill, as a backend sends what a worker has not served.
    pub fn with<R>(&mut self, mut act: impl FnMut(&mut D, &mut Bus<'_>) -> R) -> R {
        loop {
            let mut bus = Bus {
                dma: &mut self.memory,
                irq: &mut self.irq,
            };
            if self.state.is_none() {
                return act(&mut self.device, &mut bus);
            }
            let device = &mut self.device;
            match catch_unwind(AssertUnwindSafe(|| act(device, &mut bus))) {
                Ok(result) => return result,
                Err(killed) if killed.is::<Killed>() => D::restart(self),
                Err(panic) => resume_unwind(panic),
            }
        }
    }

    pub fn read(&mut self, at: u64, len: usize) -> u64 {
        let mut data = [0; 8];
        self.with(|device, bus| device.bar_read(0, at, &mut data[..len], bus));
        u64::from_le_bytes(data)
    }

    pub fn write(&mut self, at: u64, len: usize, value: u64) {
        let data = value.to_le_bytes();
        self.with(|device, bus| device.bar_write(0, at, &data[..len], bus));
    }

    pub fn poll(&mut self) -> bool {
        self.with(|device, bus| device.poll(bus))
    }

    pub fn enable_notifications(&mut self) -> bool {
        self.with(|device, bus| device.enable_notifications(bus))
    }

    /// Sleeps as an owner does if [`Device::enable_notifications`] returns true.
    fn sleep(&mut self) {
        let fd = self.device.wake_fd().unwrap();
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: 10,
            tv_nsec: 0,
        };
        let ready = retry_on_intr(|| poll(&mut fds, Some(&timeout))).unwrap();
        assert_ne!(ready, 0, "asleep, and nothing will wake it");
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

    /// Writes descriptor `index` of the table at `table`.
    pub fn describe(&self, table: u64, index: u16, buffer: Buffer, flags: u16, next: u16) {
        let flags = match buffer.writable {
            true => flags | WRITABLE,
            false => flags,
        };
        let second = u64::from(buffer.len) | u64::from(flags) << 32 | u64::from(next) << 48;
        self.memory
            .put_qwords(table + u64::from(index) * 16, [buffer.at, second]);
    }

    /// Puts a chain of buffers into a queue, without making it available. Returns its head.
    fn chain(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        let count = if self.indirect { 1 } else { buffers.len() };
        let at = self.queues[queue].free.len() - count;
        let chain = self.queues[queue].free.split_off(at);
        let head = chain[0];
        let table = self.queues[queue].descriptors;
        if self.indirect {
            let indirect = self.memory_of(queue, head) + 64;
            for (n, buffer) in (0..).zip(buffers) {
                let more = usize::from(n) + 1 < buffers.len();
                self.describe(indirect, n, *buffer, u16::from(more), n + 1);
            }
            let all = readable(indirect, buffers.len() as u32 * 16);
            self.describe(table, head, all, INDIRECT, 0);
        } else {
            for (n, buffer) in buffers.iter().enumerate() {
                let next = chain.get(n + 1).copied();
                let flags = u16::from(next.is_some());
                self.describe(table, chain[n], *buffer, flags, next.unwrap_or(0));
            }
        }
        self.queues[queue].chains[usize::from(head)] = chain;
        head
    }

    /// Memory of the request with this head.
    pub fn memory_of(&self, queue: usize, head: u16) -> u64 {
        REQUESTS + (queue as u64 * 256 + u64::from(head)) * 0x2000
    }

    /// Free descriptors of a queue: the last ones are used first.
    pub fn free(&self, queue: usize) -> &[u16] {
        &self.queues[queue].free
    }

    /// Makes a chain available, and notifies if the device asked for it.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let Queue {
            size,
            available,
            used,
            next,
            ..
        } = self.queues[queue];
        let slot = available + 4 + u64::from(next % size) * 2;
        self.memory.put(slot, &head.to_le_bytes());
        let new = next.wrapping_add(1);
        self.memory.put(available + 2, &new.to_le_bytes());
        self.queues[queue].next = new;
        fence(Ordering::SeqCst);
        let half = |at| u16::from_le_bytes(self.memory.get(at, 2).try_into().unwrap());
        let kick = match self.features >> F_EVENT_IDX & 1 {
            0 => half(used) & 1 == 0,
            _ => half(used + 4 + u64::from(size) * 8) == next,
        };
        if kick {
            self.kicks += 1;
            self.write(NOTIFY + queue as u64 * 4, 2, queue as u64);
        }
    }

    pub fn submit(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        let head = self.chain(queue, buffers);
        self.offer(queue, head);
        head
    }

    /// Number `seen` of the requests that were returned: its head, and the bytes written.
    pub fn look(&self, queue: &Queue, seen: u16) -> Option<(u16, u32)> {
        let used = queue.used;
        let index = u16::from_le_bytes(self.memory.get(used + 2, 2).try_into().unwrap());
        if index == seen {
            return None;
        }
        let at = used + 4 + u64::from(seen % queue.size) * 8;
        Some((self.memory.get_u32(at) as u16, self.memory.get_u32(at + 4)))
    }

    /// The next request that was returned: its head, and the bytes written.
    pub fn take(&mut self, queue: usize) -> Option<(u16, u32)> {
        let Queue {
            size,
            available,
            seen,
            ..
        } = self.queues[queue];
        let (id, len) = self.look(&self.queues[queue], seen)?;
        let seen = seen.wrapping_add(1);
        self.queues[queue].seen = seen;
        // For the next interrupt.
        let event = available + 4 + u64::from(size) * 2;
        self.memory.put(event, &seen.to_le_bytes());
        let chain = std::mem::take(&mut self.queues[queue].chains[usize::from(id)]);
        assert!(!chain.is_empty(), "request {id} is in flight");
        self.queues[queue].free.extend(chain);
        Some((id, len))
    }

    /// The next request that is returned.
    pub fn wait(&mut self, queue: usize) -> (u16, u32) {
        let mut taken = None;
        self.until("request", |driver| {
            taken = driver.take(queue);
            taken.is_some()
        });
        taken.unwrap()
    }

    /// Waits until the device needs a reset.
    pub fn wait_for_failure(&mut self) {
        self.until("failure", |driver| driver.status() & 0x40 != 0);
    }

    pub fn stat(&self, name: &str) -> u64 {
        let stats = self.device.stats().into_iter();
        let mut named = stats.filter(|(other, _)| *other == name);
        named.next().unwrap().1
    }
}

impl Driver {
    /// Puts a request into a queue. Returns its head.
    pub fn request(&mut self, queue: usize, kind: u32, sector: u64, data: &[Buffer]) -> u16 {
        // As `chain` takes them.
        let count = if self.indirect { 1 } else { data.len() + 2 };
        let free = &self.queues[queue].free;
        let head = free[free.len() - count];
        let at = self.memory_of(queue, head);
        self.memory.put_qwords(at, [kind.into(), sector]);
        self.memory.put(at + 16, &[0xff]);
        let mut buffers = vec![readable(at, 16)];
        buffers.extend(data);
        buffers.push(writable(at + 16, 1));
        assert_eq!(self.submit(queue, &buffers), head);
        head
    }

    /// Executes a request of the first queue. Returns its status, and the bytes written.
    pub fn execute(&mut self, kind: u32, sector: u64, data: &[Buffer]) -> (u8, u32) {
        let head = self.request(0, kind, sector, data);
        let (taken, len) = self.wait(0);
        assert_eq!(taken, head);
        (self.status_of(0, head), len)
    }

    pub fn status_of(&self, queue: usize, head: u16) -> u8 {
        self.memory.get(self.memory_of(queue, head) + 16, 1)[0]
    }

    /// The image's bytes, read directly.
    pub fn disk(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let file = File::open(&self.image).unwrap();
        file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    pub fn set_disk(&self, at: u64, bytes: &[u8]) {
        let file = File::options().write(true).open(&self.image).unwrap();
        file.write_all_at(bytes, at).unwrap();
    }
}

/// Bytes that depend on their position and `seed`.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}
