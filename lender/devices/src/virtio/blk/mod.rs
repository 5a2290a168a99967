//! A virtio-blk device (virtio 1.2, 5.2): a disk on an image file or block device.

mod config;
mod device;
mod io;
mod layout;
mod recovery;
mod request;
mod slots;

pub use config::{Config, ConfigError};

use std::time::{Duration, Instant};

use super::{
    pci::{Kind, Transport, Written},
    queue::Segment,
};
use crate::{
    Bus,
    block::{BlockQueue, DEPTH, Image, RemoteMedium, SizeError, Tag, check_growth, medium::Medium},
    state::InFlight,
};
use layout::{CAPACITY, CONFIG_LEN, SECTOR, SEG_MAX, WRITEBACK};
use slots::Slots;
use virtio_bindings::{virtio_blk::VIRTIO_BLK_F_CONFIG_WCE, virtio_ids::VIRTIO_ID_BLOCK};

/// Most requests taken from one queue before the next queue.
const BURST: usize = 32;

/// Requests after which no further queue is looked at in a poll: those that are done at once take no slot.
const MAX_TAKEN: usize = 1024;

/// Most rounds of I/O per poll. Bounds the duration of a poll.
const MAX_TURNS: usize = 8;

/// Time that the driver takes for a request, from which on it may wait for polls at intervals: they take no more than two or three
/// requests' time.
const UNHURRIED: Duration = Duration::from_micros(30);

/// Polls that are at intervals, unless there is another batch: the driver may be waiting for each request by then.
const NAPS: u8 = 16;

/// The device type. Its class is that of mass storage, SCSI, as QEMU's.
const KIND: Kind = Kind {
    id: VIRTIO_ID_BLOCK as u16,
    class: 0x01_00_00,
    name: "virtio-blk",
    config_len: CONFIG_LEN as u32,
};

/// A virtio-blk device with a disk on an image.
pub struct VirtioBlk {
    transport: Transport,
    block: BlockQueue,
    slots: Slots,
    medium: Medium,
    /// The device's configuration, which the driver reads.
    config: [u8; CONFIG_LEN],
    serial: String,
    /// 512-byte sectors.
    sectors: u64,
    block_size: u32,
    read_only: bool,
    stats: Stats,
    quiesced: bool,
    /// Requests that were in flight when the process before this one ended, until they can be taken up.
    recovery: Option<Vec<InFlight>>,
    /// They are being taken up.
    recovering: bool,
    /// A flush has failed, which the kernel reports once.
    flush_failed: bool,
    /// The queue that the next round starts with.
    turn: u16,
    /// When requests were last taken.
    taken_at: Option<Instant>,
    /// So many of the next polls are at intervals: the driver has put in several requests, and takes longer to make one than to wait.
    naps: u8,
    /// The buffers of the request that is being decoded.
    segments: Vec<Segment>,
}

/// Counters since power-on, across resets.
#[derive(Clone, Copy, Debug, Default)]
struct Stats {
    requests: u64,
    reads: u64,
    writes: u64,
    bytes_read: u64,
    bytes_written: u64,
    flushes: u64,
    discards: u64,
    zeroes: u64,
    errors: u64,
    /// Notifications that trapped.
    notifications: u64,
}

impl VirtioBlk {
    /// Opens the image and creates a device in its power-on state. `id` is the device
    /// id, from which the serial number is derived unless it is configured.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`].
    pub fn open(id: &str, config: &Config) -> Result<Self, ConfigError> {
        Self::with_image(id, config, config.open_image()?)
    }

    /// As [`VirtioBlk::open`], on the open image of the same configuration.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`].
    pub fn with_image(id: &str, config: &Config, image: Image) -> Result<Self, ConfigError> {
        let Image {
            file,
            size,
            punches_holes,
        } = image;
        let block = BlockQueue::open(file, config.engine, DEPTH)
            .and_then(|block| block.limited(config.limits));
        Self::with_block(id, config, block, (size, punches_holes))
    }

    /// As [`VirtioBlk::open`], on a medium of `size` bytes that another host has, and whose discarded
    /// sectors read as zeroes if it `punches_holes`.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`].
    pub fn with_remote(
        id: &str,
        config: &Config,
        medium: RemoteMedium,
        (size, punches_holes): (u64, bool),
    ) -> Result<Self, ConfigError> {
        let block =
            BlockQueue::remote(medium, DEPTH).and_then(|block| block.limited(config.limits));
        Self::with_block(id, config, block, (size, punches_holes))
    }

    pub(in crate::virtio) fn with_block(
        id: &str,
        config: &Config,
        block: std::io::Result<BlockQueue>,
        (size, punches_holes): (u64, bool),
    ) -> Result<Self, ConfigError> {
        config.validate()?;
        let block = block.map_err(|source| ConfigError::Engine {
            image: config.image.clone(),
            source,
        })?;
        let sectors = size / layout::SECTOR;
        let features = layout::features(config);
        let description = config.description(size);
        Ok(Self {
            transport: Transport::new(KIND, id.to_owned(), config.queues, features, description),
            block,
            slots: Slots::new(),
            medium: Medium::new(format!("image {}", config.image.display()), size),
            config: layout::configuration(config, sectors, punches_holes),
            serial: config.serial_for(id),
            sectors,
            block_size: config.block_size,
            read_only: config.read_only,
            stats: Stats::default(),
            quiesced: false,
            recovery: None,
            recovering: false,
            flush_failed: false,
            turn: 0,
            taken_at: None,
            naps: 0,
            segments: Vec::with_capacity(SEG_MAX + 2),
        })
    }

    /// Whether writes are on the medium when they are complete.
    #[cfg(test)]
    pub(super) fn is_durable(&self) -> bool {
        self.durability() == crate::block::Durability::Durable
    }

    #[cfg(test)]
    pub(in crate::virtio) fn has_flush_failed(&self) -> bool {
        self.flush_failed
    }

    fn written(&mut self, written: Written, bus: &mut Bus<'_>) {
        match written {
            Written::Nothing => {}
            Written::Notified => self.stats.notifications += 1,
            Written::Config { at, value } => {
                // The only writable field (5.2.5).
                if at == WRITEBACK && self.transport.has_feature(VIRTIO_BLK_F_CONFIG_WCE) {
                    self.config[at] = value & 1;
                    self.save();
                }
            }
            Written::Reset => {
                self.recovery = None;
                // Before counters of its queues are used anew.
                self.save();
                self.advance(bus);
            }
        }
    }

    /// Advances a reset.
    fn advance(&mut self, bus: &mut Bus<'_>) {
        if self.transport.is_resetting() {
            for tag in self.slots.unpark() {
                self.release(tag);
            }
            match self.slots.busy() {
                0 => {
                    self.transport.finish_reset(bus.irq);
                    self.forget_session();
                }
                _ => self.block.hurry(),
            }
        }
    }

    /// The common part of a reset of the device and one of the function.
    fn forget_session(&mut self) {
        self.config[WRITEBACK] = 1;
        self.turn = 0;
        (self.taken_at, self.naps) = (None, 0);
        self.recovery = None;
        self.flush_failed = false;
    }

    /// Whether requests may be taken. Clear bus-master enable is no error: a guest that resets or unbinds
    /// a device clears it while the device is running.
    fn may_take(&self, bus: &Bus<'_>) -> bool {
        !self.quiesced && self.transport.is_running(bus) && self.recovery.is_none()
    }

    fn take_all(&mut self, bus: &mut Bus<'_>) -> bool {
        let count = self.transport.queue_count();
        let (first, mut taken, mut largest) = (self.turn, 0, 0);
        for queue in (0..count).map(|step| (first + step) % count) {
            if taken >= MAX_TAKEN {
                break;
            }
            let batch = self.take_from(queue, bus);
            if batch > 0 {
                // The next poll begins with those that were left out. One that takes nothing changes no queue's turn.
                self.turn = (queue + 1) % count;
                taken += batch;
                largest = largest.max(batch);
            }
        }
        if taken > 0 {
            let now = Instant::now();
            let since = self.taken_at.replace(now).map(|at| now - at);
            let unhurried = since >= Some(UNHURRIED * taken as u32);
            self.naps = match largest > 1 && unhurried {
                true => NAPS,
                false => self.naps.saturating_sub(1),
            };
        }
        taken > 0
    }

    /// Returns the number of requests.
    fn take_from(&mut self, queue: u16, bus: &mut Bus<'_>) -> usize {
        for taken in 0..BURST {
            if !self.slots.has_room() || !self.may_take(bus) || !self.block.may_take() {
                return taken;
            }
            if !self.take_request(queue, None, bus) {
                return taken;
            }
        }
        BURST
    }

    /// Starts the next request of a queue, or one that was in flight. Returns whether there is any.
    fn take_request(&mut self, queue: u16, again: Option<&InFlight>, bus: &mut Bus<'_>) -> bool {
        let mut segments = std::mem::take(&mut self.segments);
        let request = self
            .transport
            .take(queue, again, bus, &mut segments, SEG_MAX + 2);
        if let Some(request) = request {
            self.stats.requests += 1;
            self.start(queue, request, &segments, bus);
        }
        self.segments = segments;
        request.is_some()
    }

    /// Advances I/O without blocking. Returns whether any finished.
    fn turn_block(&mut self, bus: &mut Bus<'_>) -> bool {
        let mut busy = false;
        for _ in 0..MAX_TURNS {
            self.block.turn();
            let mut any = false;
            while let Some((tag, result)) = self.block.next_done() {
                any = true;
                self.finish_io(tag, result, bus);
            }
            if !any {
                break;
            }
            busy = true;
        }
        busy
    }

    fn release(&mut self, tag: Tag) {
        self.block.release(tag);
        self.slots.release(tag);
    }

    /// The medium has grown to `size` bytes. Returns whether that is news.
    fn grow(&mut self, size: u64) -> Result<bool, SizeError> {
        let from = self.sectors * SECTOR;
        check_growth(from, size, self.block_size)?;
        let has_grown = size > from;
        if has_grown {
            self.sectors = size / SECTOR;
            self.config[CAPACITY..CAPACITY + 8].copy_from_slice(&self.sectors.to_le_bytes());
            self.medium.grow(size);
            self.transport.config_changed();
        }
        Ok(has_grown)
    }

    /// Takes the size that [`BlockQueue::take_size`] returns. Logs a size that the disk cannot have, which has no effect.
    fn take_growth(&mut self) {
        if let Some(Err(error)) = self.block.take_size().map(|size| self.grow(size)) {
            let error = format_args!("ignored a size that the lender has reported: {error}");
            self.transport.log_error(error);
        }
    }

    fn run(&mut self, bus: &mut Bus<'_>) -> bool {
        self.take_growth();
        let mut busy = self.recover(bus);
        if self.may_take(bus) {
            self.unpark(bus);
            busy |= self.take_all(bus);
        }
        busy |= self.turn_block(bus);
        self.interrupt_driver(bus);
        self.advance(bus);
        self.save_changes();
        busy
    }

    fn interrupt_driver(&mut self, bus: &mut Bus<'_>) {
        if self.transport.is_running(bus) {
            self.transport.interrupt_driver(bus);
            self.transport.notify_config_change(bus.irq);
        }
    }
}
