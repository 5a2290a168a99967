//! The medium: an image file or block device, and the I/O in flight on it.
//!
//! This module is the safe interface of the engines. An engine passes pointers to guest
//! memory to the kernel, whose validity this module ensures:
//!
//! - a [`Tag`]'s slices, vectors and scratch memory belong to the
//!   [`BlockQueue`] and cannot be changed while the tag is in flight;
//! - a slice keeps its mapping alive, and is dropped only after the kernel has finished
//!   the I/O;
//! - dropping the queue waits for all I/O in flight.
//!
//! Nothing is allocated per transfer once a tag's vectors have grown.
#![allow(unsafe_code)]

mod engine;
#[cfg(test)]
pub(crate) mod faulty;
mod image;
mod inline;
mod lent;
mod limits;
pub(crate) mod medium;
mod network;
pub(crate) mod serial;
mod size;
pub(crate) mod tap;
mod threads;
mod transfer;
mod uring;

#[cfg(test)]
mod tests;

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::FileTypeExt,
    },
    sync::Arc,
};

use farside_fabric::memory::HostSlice;
use farside_medium::{Condition, HostIdentity, REFUSED};
use serde::{Deserialize, Serialize};

pub use image::{Image, ImageAccess, ImageError, ImageId};
pub use lent::{Ended, LentMedium, Turn};
pub use limits::{LEAST_BANDWIDTH, LEAST_IOPS, Limits, LimitsError};
pub use network::{MediumKeeper, Notice, RemoteMedium, Supply, remote_medium};
pub use serial::SERIAL_LEN;
pub use size::{GrowError, MAX_SIZE, SizeError, check_growth};
pub use tap::{Offloads, TAP_SIZE, Tap, TapError};

use engine::{Engine, RawOp};
use inline::Inline;
use limits::Throttle;
use network::Network;
use tap::TapEngine;
use threads::Threads;
use transfer::{Job, Step, Transfer};
use uring::Uring;

/// The I/O engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineChoice {
    /// io_uring if the kernel supports it, else threads.
    #[default]
    Auto,
    /// io_uring; fail if the kernel does not support it.
    IoUring,
    /// A small pool of threads with `preadv` and `pwritev`.
    Threads,
}

/// Most transfers in flight of a model.
pub const DEPTH: u16 = 1028;

/// Identifies a transfer; below the queue's depth.
pub type Tag = u16;

/// When a write is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Once it is in the host's page cache.
    Cached,
    /// Once it is on the medium.
    Durable,
}

/// Why an I/O failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockError {
    /// The kernel could not access guest memory, such as of a file that has shrunk.
    GuestMemory,
    /// The file system under the image is full.
    NoSpace,
    /// The medium does not support the operation.
    Unsupported,
    /// The medium has become read-only.
    ReadOnly,
    /// The medium is too short.
    EndsEarly,
    /// The medium failed, with this errno.
    Medium(i32),
    /// The host that has the medium is out of reach, and the operation was given up.
    Unreachable,
    /// Reservations refuse it, with these bits of a status.
    Refused(u16),
}

impl BlockError {
    /// The errno of a system call that fails so.
    fn errno(self) -> i32 {
        match self {
            Self::GuestMemory => libc::EFAULT,
            Self::NoSpace => libc::ENOSPC,
            Self::Unsupported => libc::EOPNOTSUPP,
            Self::ReadOnly => libc::EROFS,
            Self::EndsEarly => 0,
            Self::Medium(errno) => errno,
            Self::Unreachable => libc::ECANCELED,
            Self::Refused(status) => REFUSED + i32::from(status),
        }
    }
}

/// I/O on an image, by tag.
pub struct BlockQueue {
    // Dropped first: waits for the kernel, which uses the memory of `transfers`.
    engine: Box<dyn Engine>,
    transfers: Box<[Transfer]>,
    /// For a file of this host.
    inline: Option<(Inline, Arc<File>)>,
    /// If the device has limits.
    throttle: Option<Throttle>,
    in_flight: usize,
    finished: Vec<(Tag, i32)>,
    done: Vec<(Tag, Result<(), BlockError>)>,
    all_submitted: bool,
    /// The medium is a tap interface, here or at another host: each transfer is one frame.
    frames: bool,
}

impl BlockQueue {
    /// Opens an engine on `file` for up to `depth` transfers in flight.
    pub fn open(file: File, choice: EngineChoice, depth: u16) -> io::Result<Self> {
        let file = Arc::new(file);
        let engine: Box<dyn Engine> = match choice {
            EngineChoice::Threads => Box::new(Threads::start(Arc::clone(&file), depth)?),
            EngineChoice::IoUring => Box::new(Uring::open(Arc::clone(&file), depth)?),
            EngineChoice::Auto => match Uring::open(Arc::clone(&file), depth) {
                Ok(uring) => Box::new(uring),
                Err(refusal) => {
                    log::info!("io_uring is not available ({refusal}): using threads for I/O");
                    Box::new(Threads::start(Arc::clone(&file), depth)?)
                }
            },
        };
        let inline = Inline::new(&file)?;
        Ok(Self::new(engine, depth, Some((inline, file))))
    }

    /// I/O on the medium of another host, for up to `depth` transfers in flight.
    pub fn remote(medium: RemoteMedium, depth: u16) -> io::Result<Self> {
        let engine = Box::new(Network::start(medium, depth)?);
        Ok(Self::new(engine, depth, None))
    }

    /// Frames of a tap interface, for up to `depth` transfers in flight.
    pub fn tap(file: File, depth: u16) -> io::Result<Self> {
        let engine = Box::new(TapEngine::start(file, depth)?);
        Ok(Self::new(engine, depth, None).of_frames())
    }

    /// The medium is a tap interface: each transfer is one frame, and [`BlockQueue::moved`] its length.
    pub fn of_frames(mut self) -> Self {
        self.frames = true;
        self
    }

    /// See [`BlockQueue::of_frames`].
    fn is_of_frames(&self) -> bool {
        self.frames
    }

    /// I/O on a medium that fails as `faults` say.
    #[cfg(test)]
    pub fn faulty(
        file: File,
        faults: faulty::Faults,
        watch: crate::nvme::tests::watch::Watch,
        depth: u16,
    ) -> io::Result<Self> {
        let engine = Box::new(faulty::Faulty::start(file, faults, watch)?);
        Ok(Self::new(engine, depth, None))
    }

    fn new(engine: Box<dyn Engine>, depth: u16, inline: Option<(Inline, Arc<File>)>) -> Self {
        Self {
            engine,
            transfers: (0..depth).map(|_| Transfer::default()).collect(),
            inline,
            throttle: None,
            in_flight: 0,
            finished: Vec::with_capacity(depth.into()),
            done: Vec::with_capacity(depth.into()),
            all_submitted: true,
            frames: false,
        }
    }

    /// With these limits.
    ///
    /// # Errors
    /// Limits that are too low; those of creating a timer.
    pub fn limited(mut self, limits: Limits) -> io::Result<Self> {
        if !limits.is_none() {
            limits.validate().map_err(io::Error::other)?;
            let file = self.inline.as_ref().map(|(_, file)| file.metadata());
            let is_device =
                file.is_some_and(|meta| meta.is_ok_and(|it| it.file_type().is_block_device()));
            self.throttle = Some(Throttle::new(limits, is_device, self.engine.wake_fd())?);
        }
        Ok(self)
    }

    /// Whether the limits let the owner take another command. If not, it may sleep on the wake descriptor.
    pub fn may_take(&mut self) -> bool {
        self.throttle.as_mut().is_none_or(Throttle::may_take)
    }

    /// Whether the last [`BlockQueue::may_take`] returned false.
    pub fn is_held(&self) -> bool {
        self.throttle.as_ref().is_some_and(Throttle::is_held)
    }

    /// See [`Engine::sync`].
    pub fn sync(&self) -> io::Result<()> {
        self.engine.sync()
    }

    /// See [`Engine::condition`].
    pub fn condition(&self) -> Condition {
        self.engine.condition()
    }

    /// See [`Engine::take_size`].
    pub fn take_size(&mut self) -> Option<u64> {
        self.engine.take_size()
    }

    /// See [`Engine::is_connected`].
    pub fn is_connected(&self) -> bool {
        self.engine.is_connected()
    }

    /// See [`Engine::hurry`].
    pub fn hurry(&mut self) {
        if self.in_flight > 0 {
            self.engine.hurry(false);
        }
    }

    /// The guest memory of an idle tag, to be filled before a transfer.
    ///
    /// # Panics
    ///
    /// If `tag` is in flight.
    pub fn slices(&mut self, tag: Tag) -> &mut Vec<HostSlice> {
        self.transfers[usize::from(tag)].slices_mut()
    }

    /// The data of a scratch read, and the guest memory of the tag.
    ///
    /// # Panics
    ///
    /// If `tag` is in flight.
    pub fn scratch(&self, tag: Tag) -> (&[u8], &[HostSlice]) {
        self.transfers[usize::from(tag)].scratch()
    }

    /// Drops the guest memory of an idle tag.
    ///
    /// # Panics
    ///
    /// If `tag` is in flight.
    pub fn release(&mut self, tag: Tag) {
        self.transfers[usize::from(tag)].release();
    }

    /// Reads from byte `offset` of the image into the tag's guest memory.
    pub fn read(&mut self, tag: Tag, offset: u64) {
        self.start(tag, Job::ReadGuest { offset });
    }

    /// Writes the tag's guest memory to byte `offset` of the image.
    pub fn write(&mut self, tag: Tag, offset: u64, durability: Durability) {
        self.start(tag, Job::WriteGuest { offset, durability });
    }

    /// Reads `len` bytes at `offset` into the tag's scratch memory, at most
    /// [`BlockQueue::SCRATCH`].
    pub fn read_scratch(&mut self, tag: Tag, offset: u64, len: usize) {
        self.start(tag, Job::ReadScratch { offset, len });
    }

    /// Most bytes of a scratch read.
    pub const SCRATCH: usize = 64 << 10;

    /// Flushes all completed writes to the medium.
    pub fn flush(&mut self, tag: Tag) {
        self.start(tag, Job::Flush);
    }

    /// Deallocates `[offset, offset + len)`, which then reads as zeroes.
    pub fn punch(&mut self, tag: Tag, offset: u64, len: u64) {
        self.allocate(tag, PUNCH_HOLE, offset, len);
    }

    /// fallocate(2) on `[offset, offset + len)`, with [`PUNCH_HOLE`] or [`ZERO_RANGE`].
    fn allocate(&mut self, tag: Tag, mode: i32, offset: u64, len: u64) {
        self.start(tag, Job::Allocate { mode, offset, len });
    }

    /// Zeroes `[offset, offset + len)` by any method that the medium supports; with
    /// `punch`, preferably as a hole.
    pub fn zero(&mut self, tag: Tag, offset: u64, len: u64, punch: bool) {
        self.start(tag, Job::zero(offset, len, punch));
    }

    /// Has the lender of a shared namespace execute a request, whose result is then [`BlockQueue::moved`].
    pub fn reserve(&mut self, tag: Tag, request: Vec<u8>) {
        self.transfers[usize::from(tag)].set_scratch(request);
        self.start(tag, Job::Reserve);
    }

    /// Reads the report on the reservations of a shared namespace into the tag's guest memory.
    pub fn report(&mut self, tag: Tag, extended: bool) {
        self.start(tag, Job::Report { extended });
    }

    /// See [`Engine::set_host`].
    pub fn set_host(&mut self, host: HostIdentity) {
        self.engine.set_host(host);
    }

    /// See [`Engine::wants_fence`].
    pub fn wants_fence(&self) -> bool {
        self.engine.wants_fence()
    }

    /// Has the transfers in flight end with their current steps, each with these bits of a status.
    pub fn abort(&mut self, status: u16) {
        self.transfers.iter_mut().for_each(|it| it.abort(status));
    }

    /// See [`Engine::fence`].
    pub fn fence(&mut self) {
        self.engine.fence();
    }

    /// Whether any transfer is in flight.
    fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Sets what the receiver of a tap interface's frames can do; with `discard`, what came for a former one is lost.
    pub fn set_offloads(&mut self, tag: Tag, offloads: Offloads, discard: bool) {
        let bits = offloads.bits();
        self.start(tag, Job::Offloads { bits, discard });
    }

    /// The bytes that the last transfer of an idle tag has moved, or the result of a request.
    pub fn moved(&self, tag: Tag) -> u64 {
        self.transfers[usize::from(tag)].moved()
    }

    fn start(&mut self, tag: Tag, job: Job) {
        let transfer = &mut self.transfers[usize::from(tag)];
        if let Some(throttle) = &mut self.throttle {
            throttle.start(transfer.cost(&job, throttle.writes_zeroes));
        }
        match transfer.begin(job) {
            Some(op) => {
                self.in_flight += 1;
                self.queue(tag, op);
            }
            // An empty transfer.
            None => self.done.push((tag, Ok(()))),
        }
    }

    fn queue(&mut self, tag: Tag, op: RawOp) {
        if let Some((inline, file)) = &mut self.inline {
            // SAFETY: `op` comes from `Transfer::begin` or `Transfer::finish` of
            // `tag`, which point it at the transfer's own iovecs. These and their memory
            // (guest slices, which keep their mapping alive; scratch; the static zeroes) are
            // owned by `self.transfers` or static, and not changed before this call returns.
            if let Some(result) = unsafe { inline.try_now(file, &op) } {
                self.finished.push((tag, result));
                return;
            }
        }
        // SAFETY: the pointers are valid, as argued above, and stay so: the
        // methods of `Transfer` refuse to change an entry in flight, and this
        // one is in flight until `reap` has returned `tag`. The boxes and
        // vectors do not move their contents when `self` is moved, and `engine`,
        // whose drop waits for the kernel, is dropped before `transfers`.
        unsafe { self.engine.queue(tag, op) };
        self.all_submitted = false;
    }

    /// Starts queued operations and reaps finished ones; [`BlockQueue::next_done`] returns
    /// finished transfers.
    pub fn turn(&mut self) {
        if let Some(throttle) = &mut self.throttle {
            throttle.notice();
        }
        loop {
            if !self.all_submitted {
                self.all_submitted = self.engine.submit();
            }
            self.engine.reap(&mut self.finished);
            if !self.take_finished() || !self.all_submitted {
                return;
            }
        }
    }

    /// Processes finished operations. Returns whether a further step of a transfer was
    /// queued.
    fn take_finished(&mut self) -> bool {
        let mut more = false;
        while let Some((tag, result)) = self.finished.pop() {
            let transfer = &mut self.transfers[usize::from(tag)];
            if let Some(throttle) = &mut self.throttle
                && !throttle.writes_zeroes
            {
                throttle.charge(transfer.zeroes_written(result));
            }
            let step = match self.frames {
                true => transfer.finish_frame(result),
                false => transfer.finish(result),
            };
            match step {
                Step::Continue(op) => {
                    self.queue(tag, op);
                    more = true;
                }
                Step::Done(result) => {
                    let lost = self.transfers[usize::from(tag)].has_lost_memory();
                    let result = match lost {
                        true => result.and(Err(BlockError::GuestMemory)),
                        false => result,
                    };
                    self.in_flight -= 1;
                    self.done.push((tag, result));
                }
            }
        }
        if more {
            self.all_submitted = self.engine.submit();
        }
        more
    }

    /// The next finished transfer.
    pub fn next_done(&mut self) -> Option<(Tag, Result<(), BlockError>)> {
        self.done.pop()
    }

    /// Whether [`BlockQueue::turn`] has work. Clears stale readiness of the wake
    /// descriptor, so that the owner may sleep on it if this returns false.
    pub fn is_busy(&mut self) -> bool {
        // Always call the engine, which clears stale readiness.
        let finished = self.engine.has_finished() || !self.finished.is_empty();
        let due = self.throttle.as_mut().is_some_and(Throttle::is_due);
        !self.all_submitted || !self.done.is_empty() || finished || due
    }

    /// Readable when an operation has finished, or the limits let the owner take a command.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        match &self.throttle {
            Some(throttle) => throttle.ready(),
            None => self.engine.wake_fd(),
        }
    }

    /// Blocks until no transfer is in flight, and drops all results. Does not wait for a medium that is
    /// out of reach.
    pub fn drain(&mut self) {
        self.engine.hurry(true);
        while self.in_flight > 0 {
            self.turn();
            if self.in_flight > 0 && self.all_submitted && self.finished.is_empty() {
                self.engine.wait();
            }
        }
        self.done.clear();
    }
}

impl Drop for BlockQueue {
    fn drop(&mut self) {
        if self.frames {
            self.engine.cancel_reads();
        }
        self.drain();
    }
}

/// The modes of fallocate(2) that are used.
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
/// One that no kernel knows: an image has no [`Offloads`].
const NO_MODE: i32 = i32::MIN;
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// The condition of a file or block device.
fn condition(mut file: &File) -> Condition {
    let size = file.seek(SeekFrom::End(0)).unwrap_or(u64::MAX);
    let is_device = file
        .metadata()
        .is_ok_and(|meta| meta.file_type().is_block_device());
    if is_device {
        return Condition {
            size,
            full: false,
            read_only: is_read_only(file).unwrap_or(false),
        };
    }
    let system = rustix::fs::fstatvfs(file).ok();
    Condition {
        size,
        full: system.as_ref().is_some_and(|system| system.f_bavail == 0),
        read_only: system.is_some_and(|system| {
            system
                .f_flag
                .contains(rustix::fs::StatVfsMountFlags::RDONLY)
        }),
    }
}

fn last_errno() -> i32 {
    -io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

fn eventfd() -> io::Result<std::os::fd::OwnedFd> {
    use rustix::event::{EventfdFlags, eventfd};
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Whether a block device is read-only (`BLKROGET`).
fn is_read_only(device: &File) -> io::Result<bool> {
    let mut read_only: libc::c_int = 0;
    // SAFETY: the descriptor is open during the call, and BLKROGET writes one int to
    // `read_only`.
    let result = unsafe { libc::ioctl(raw(device), BLKROGET, &mut read_only) };
    match result {
        0 => Ok(read_only != 0),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The number of the disk in a block device, which no other of this system has (`BLKGETDISKSEQ`).
fn disk_sequence(device: &File) -> io::Result<u64> {
    let mut sequence: u64 = 0;
    // SAFETY: the descriptor is open during the call, and BLKGETDISKSEQ writes one u64 to
    // `sequence`.
    let result = unsafe { libc::ioctl(raw(device), BLKGETDISKSEQ, &mut sequence) };
    match result {
        0 => Ok(sequence),
        _ => Err(io::Error::last_os_error()),
    }
}

/// `_IOR(0x12, 128, u64)` of `linux/fs.h`, which the libc crate does not have.
const BLKGETDISKSEQ: libc::Ioctl = 0x8008_1280;

/// `_IO(0x12, 94)` of `linux/fs.h`, which the libc crate does not have.
const BLKROGET: libc::Ioctl = 0x125e;

fn raw(file: &File) -> i32 {
    use std::os::fd::AsRawFd;
    file.as_fd().as_raw_fd()
}
