//! The lender's half of a medium: serves operations of a borrower on another host.
//!
//! What a borrower can use is bounded: each operation has a tag below the queue's depth, and data waits
//! in [`MEMORY`] bytes. While these are in use nothing more is received, so TCP holds the borrower back.

mod reservations;

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use farside_fabric::memory::{HostSlice, SharedMemory};
use farside_medium::{Condition, Frame, FrameError, Link, LinkError, MAX_DATA, Memory};

use super::{
    BlockError, BlockQueue, DEPTH, Durability, PUNCH_HOLE, Tag, ZERO_RANGE,
    medium::{Direction as MediumDirection, Medium},
    transfer::Job,
};
use crate::nvme::LentReservations;

/// Bytes for the data of operations in flight.
const MEMORY: usize = 16 << 20;

/// Bytes of a part of it.
const PART: usize = 64 << 10;

/// Parts of the longest operation, without which no frame is received.
const MOST_PARTS: usize = MAX_DATA / PART;

/// Most frames that are received before everything else is looked at.
const BURST: usize = 64;

/// Most rounds of receiving, serving and answering before the caller looks at everything else.
const ROUNDS: usize = 16;

/// Time between two looks whether the I/O of other controllers has ended, which wake nobody.
const LOOK: Duration = Duration::from_millis(1);

/// Time after a failure for which answers have the medium's condition.
const CONDITION_AGE: Duration = Duration::from_secs(60);

/// Why a borrower's connection is over.
#[derive(Debug)]
pub enum Ended {
    /// The borrower has returned the device.
    Returned,
    /// The connection was lost, or the borrower violated the protocol.
    Cut(LinkError),
}

/// What a [`LentMedium::turn`] has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// There was nothing to do.
    Idle,
    /// There was, and everything is done that can be.
    Busy,
    /// There is more to do at once, which no descriptor reports.
    More,
}

/// An operation in flight, or an answer that is being sent.
#[derive(Default)]
struct Slot {
    frame: Option<Frame>,
    parts: Vec<u16>,
    /// The vectors that name its memory.
    iovecs: Vec<libc::iovec>,
}

/// A medium that is served over a connection.
pub struct LentMedium {
    // Dropped first: both use the memory of `slots`.
    block: BlockQueue,
    link: Link,
    slots: Box<[Slot]>,
    memory: Arc<SharedMemory>,
    free: Vec<u16>,
    /// The tags of answers with data, and their frames' numbers.
    unsent: VecDeque<(u64, Tag)>,
    posted: u64,
    size: u64,
    read_only: bool,
    /// Of a shared namespace.
    reservations: Option<LentReservations>,
    /// The request that waits for the I/O of preempted hosts.
    aborting: Option<Tag>,
    /// The number of the last frame with notifications.
    notified: Option<u64>,
    condition: Condition,
    /// The last failure.
    failed: Option<Instant>,
    /// Failures, for the operator.
    failures: Medium,
    stats: Stats,
}

#[derive(Default)]
struct Stats {
    reads: u64,
    writes: u64,
    bytes_read: u64,
    bytes_written: u64,
    flushes: u64,
    errors: u64,
}

impl LentMedium {
    /// Serves the medium `block` of `size` bytes, for [`DEPTH`] transfers in flight, of the device `name`.
    ///
    /// # Errors
    /// The system is out of memory.
    pub fn new(
        block: BlockQueue,
        (size, read_only): (u64, bool),
        (name, link): (&str, Link),
    ) -> io::Result<Self> {
        let parts = (MEMORY / PART) as u16;
        let what = match block.is_of_frames() {
            true => "tap of",
            false => "image",
        };
        Ok(Self {
            block,
            link,
            slots: (0..DEPTH).map(|_| Slot::default()).collect(),
            memory: SharedMemory::anonymous(MEMORY)?,
            free: (0..parts).rev().collect(),
            unsent: VecDeque::new(),
            posted: 0,
            size,
            read_only,
            reservations: None,
            aborting: None,
            notified: None,
            condition: Condition {
                size,
                full: false,
                read_only,
            },
            failed: None,
            failures: Medium::new(format!("{what} {name}"), size),
            stats: Stats::default(),
        })
    }

    /// Checks each operation with the `reservations` of the medium.
    pub fn sharing(mut self, reservations: LentReservations) -> Self {
        self.reservations = Some(reservations);
        self
    }

    /// Receives, serves and answers, without blocking. Called every [`Link::TICK`] at the latest, it finds the reservation
    /// notifications of other hosts' changes, which wake nobody. `on_failed_sync` is called before the borrower
    /// learns that a flush has failed: the kernel reports that once.
    ///
    /// # Errors
    /// The connection is over.
    pub fn turn(&mut self, on_failed_sync: &mut dyn FnMut()) -> Result<Turn, Ended> {
        for round in 0..ROUNDS {
            let received = self.receive()?;
            self.block.turn();
            let mut finished = false;
            while let Some((tag, result)) = self.block.next_done() {
                finished = true;
                self.finish(tag, result, on_failed_sync);
            }
            finished |= self.finish_abort();
            self.send_fence();
            self.send_notifications();
            self.link.flush().map_err(Ended::Cut)?;
            let released = self.release_sent();
            if !received && !finished && !released {
                return Ok(match (self.block.is_busy(), round) {
                    (true, _) => Turn::More,
                    (false, 0) => Turn::Idle,
                    (false, _) => Turn::Busy,
                });
            }
        }
        Ok(Turn::More)
    }

    /// When to look again although no descriptor is ready.
    pub fn looks_again(&self) -> Option<Duration> {
        self.aborting.map(|_| LOOK)
    }

    /// A current failure of the medium.
    pub fn problem(&self) -> Option<&str> {
        self.failures.problem()
    }

    /// To be called every [`Link::TICK`].
    ///
    /// # Errors
    /// The connection is over.
    pub fn tick(&mut self) -> Result<(), Ended> {
        self.link.tick(self.reads()).map_err(Ended::Cut)
    }

    /// The connection, and whether it has to be readable and writable.
    pub fn link(&self) -> (BorrowedFd<'_>, bool, bool) {
        (self.link.as_fd(), self.reads(), self.link.wants_write())
    }

    /// Readable when an operation has finished.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.block.wake_fd()
    }

    /// Asks the borrower to return the device.
    pub fn release(&mut self, limit: Duration) {
        let limit_ms = limit.as_millis() as u64;
        self.post(Frame::Release { limit_ms }, Memory::NONE);
    }

    /// The medium has grown to `size` bytes.
    pub fn grow(&mut self, size: u64) {
        self.size = size;
        self.condition.size = size;
        self.failures.grow(size);
        self.post(Frame::Size { size }, Memory::NONE);
    }

    /// Counters, by name; none without a medium.
    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        let stats = &self.stats;
        if self.size == 0 {
            return Vec::new();
        }
        vec![
            ("reads", stats.reads),
            ("writes", stats.writes),
            ("bytes_read", stats.bytes_read),
            ("bytes_written", stats.bytes_written),
            ("flushes", stats.flushes),
            ("errors", stats.errors),
        ]
    }

    /// How many operations are in flight, and the most that may be.
    pub fn in_flight(&self) -> (u64, u64) {
        let busy = self.slots.iter().filter(|slot| slot.frame.is_some());
        (busy.count() as u64, self.slots.len() as u64)
    }

    /// Whether the borrower is listened to.
    fn reads(&self) -> bool {
        let in_flight = !self.block.is_idle();
        let mut reservations = self.reservations.iter();
        let admitted = reservations.all(|it| it.would_take(in_flight));
        self.has_room() && !self.block.is_held() && admitted
    }

    fn has_room(&self) -> bool {
        self.free.len() >= MOST_PARTS
    }

    fn post(&mut self, frame: Frame, memory: Memory) {
        self.link.post(frame, memory);
        self.posted += 1;
    }

    /// Receives frames, and starts what they ask for. Returns whether there were any.
    fn receive(&mut self) -> Result<bool, Ended> {
        for count in 0..BURST {
            if !self.has_room() || !self.block.may_take() || !self.is_admitted() {
                return Ok(count > 0);
            }
            // Before the answers that it explains.
            self.send_fence();
            let (slots, free, memory) = (&mut self.slots, &mut self.free, &self.memory);
            let place = |frame: &Frame| place(slots, free, memory, frame);
            let received = self.link.receive_some(place);
            match received.map_err(Ended::Cut)? {
                Some(Frame::Return) => return Err(Ended::Returned),
                Some(Frame::Host(host)) => {
                    if let Some(reservations) = &mut self.reservations {
                        reservations.set_host(host);
                    }
                    // It may have taken a while.
                    return Ok(true);
                }
                Some(Frame::Fenced { number }) => {
                    if let Some(reservations) = &mut self.reservations {
                        reservations.fenced(number);
                    }
                }
                Some(Frame::Notified { upto }) => {
                    if let Some(reservations) = &mut self.reservations {
                        reservations.set_notified(upto);
                    }
                }
                Some(frame @ Frame::Reserve { .. }) => {
                    self.start(frame);
                    return Ok(true);
                }
                Some(frame) => self.start(frame),
                None => return Ok(count > 0),
            }
        }
        Ok(true)
    }

    fn start(&mut self, frame: Frame) {
        let (tag, refusal) = match frame {
            Frame::Read { tag, offset, len } => (tag, self.outside(offset, len.into())),
            Frame::Write {
                tag, offset, len, ..
            } => (tag, self.refuses_write(offset, len.into())),
            Frame::Allocate {
                tag,
                mode,
                offset,
                len,
            } => match mode {
                PUNCH_HOLE | ZERO_RANGE => (tag, self.refuses_write(offset, len)),
                _ => (tag, Some(BlockError::Unsupported)),
            },
            Frame::Sync { tag } => (tag, None),
            Frame::Reserve { tag, len } => return self.reserve(tag, len as usize),
            Frame::Report { tag, extended, .. } => return self.report(tag, extended),
            Frame::Offloads { tag, .. } if self.block.is_of_frames() => (tag, None),
            Frame::Offloads { tag, .. } => (tag, Some(BlockError::Unsupported)),
            _ => return,
        };
        if let Some(error) = refusal.or_else(|| self.conflict(&frame)) {
            return self.answer(tag, Err(error));
        }
        let slot = &self.slots[usize::from(tag)];
        let slices = self.block.slices(tag);
        slices.clear();
        let mut left = match frame {
            Frame::Read { len, .. } | Frame::Write { len, .. } => len as usize,
            _ => 0,
        };
        for part in &slot.parts {
            let len = left.min(PART);
            slices.extend(part_of(&self.memory, *part, len));
            left -= len;
        }
        match frame {
            Frame::Read { offset, .. } => self.block.read(tag, offset),
            Frame::Write {
                offset, durable, ..
            } => {
                let durability = match durable {
                    true => Durability::Durable,
                    false => Durability::Cached,
                };
                self.block.write(tag, offset, durability);
            }
            Frame::Sync { .. } => self.block.flush(tag),
            Frame::Allocate {
                mode, offset, len, ..
            } => self.block.allocate(tag, mode, offset, len),
            Frame::Offloads { bits, discard, .. } => {
                let job = Job::Offloads { bits, discard };
                self.block.start(tag, job);
            }
            _ => {}
        }
    }

    fn outside(&self, offset: u64, len: u64) -> Option<BlockError> {
        let end = offset.checked_add(len);
        let inside = end.is_some_and(|end| end <= self.size);
        (!inside).then_some(BlockError::Medium(libc::EINVAL))
    }

    fn refuses_write(&self, offset: u64, len: u64) -> Option<BlockError> {
        match self.read_only {
            true => Some(BlockError::ReadOnly),
            false => self.outside(offset, len),
        }
    }

    /// Notes the end of an operation on the medium, and answers it.
    fn finish(
        &mut self,
        tag: Tag,
        result: Result<(), BlockError>,
        on_failed_sync: &mut dyn FnMut(),
    ) {
        let frame = self.slots[usize::from(tag)].frame;
        let direction = match frame {
            Some(Frame::Read { .. }) => MediumDirection::Read,
            _ => MediumDirection::Write,
        };
        if let Err(error) = result {
            let now = Instant::now();
            self.failed = Some(now);
            self.condition = self.block.condition();
            self.failures.failed(error, direction, self.condition, now);
            if let Some(Frame::Sync { .. }) = frame {
                on_failed_sync();
            }
        } else if self.failed.is_some_and(|at| at.elapsed() < CONDITION_AGE) {
            let condition = self.block.condition();
            self.condition = condition;
            self.failures
                .succeeded(direction, || condition, Instant::now());
        }
        self.answer(tag, result);
    }

    fn answer(&mut self, tag: Tag, result: Result<(), BlockError>) {
        self.answer_with(tag, result.map(|()| 0));
    }

    /// Answers an operation; a request with this result.
    fn answer_with(&mut self, tag: Tag, result: Result<u32, BlockError>) {
        self.block.release(tag);
        self.stats.errors += u64::from(result.is_err());
        let slot = &self.slots[usize::from(tag)];
        let Some(frame) = slot.frame else {
            return;
        };
        let bytes = match frame {
            // A frame of a network has its own length.
            Frame::Read { len, .. } | Frame::Write { len, .. } if self.block.is_of_frames() => {
                (self.block.moved(tag) as u32).min(len)
            }
            Frame::Read { len, .. } | Frame::Write { len, .. } | Frame::Report { len, .. } => len,
            _ => 0,
        };
        let stats = &mut self.stats;
        match frame {
            _ if result.is_err() => {}
            Frame::Read { .. } => {
                stats.reads += 1;
                stats.bytes_read += u64::from(bytes);
            }
            Frame::Write { .. } => {
                stats.writes += 1;
                stats.bytes_written += u64::from(bytes);
            }
            Frame::Sync { .. } => stats.flushes += 1,
            _ => {}
        }
        let (result, data) = match (result, frame) {
            (Ok(_), Frame::Read { .. } | Frame::Report { .. }) => (bytes as i32, bytes),
            (Ok(result), Frame::Reserve { .. }) => (result as i32, 0),
            (Ok(_), _) => (bytes as i32, 0),
            (Err(error), _) => (-error.errno(), 0),
        };
        let done = Frame::Done {
            tag,
            result,
            data,
            condition: self.condition,
        };
        let memory = match data {
            0 => Memory::NONE,
            // SAFETY: the slot's vectors name its parts of `self.memory`, and neither are changed before
            // the frame is sent (`release_sent`); the link is dropped before both.
            _ => unsafe { Memory::new(slot.iovecs.as_ptr(), slot.iovecs.len()) },
        };
        if data == 0 {
            self.free_slot(tag);
        } else {
            self.unsent.push_back((self.posted, tag));
        }
        self.post(done, memory);
    }

    /// Makes the memory of sent answers free. Returns whether there was any.
    fn release_sent(&mut self) -> bool {
        let before = self.unsent.len();
        while let Some(&(number, tag)) = self.unsent.front() {
            if number >= self.link.sent() {
                break;
            }
            self.unsent.pop_front();
            self.free_slot(tag);
        }
        self.unsent.len() < before
    }

    fn free_slot(&mut self, tag: Tag) {
        let slot = &mut self.slots[usize::from(tag)];
        self.free.append(&mut slot.parts);
        slot.iovecs.clear();
        slot.frame = None;
    }
}

fn part_of(memory: &Arc<SharedMemory>, part: u16, len: usize) -> Option<HostSlice> {
    memory.slice(usize::from(part) * PART, len)
}

/// Takes a slot for an operation, with memory for its data. Refuses frames that a borrower must not
/// send.
fn place(
    slots: &mut [Slot],
    free: &mut Vec<u16>,
    memory: &Arc<SharedMemory>,
    frame: &Frame,
) -> Result<Memory, FrameError> {
    let (tag, len) = match *frame {
        Frame::Read { tag, len, .. }
        | Frame::Write { tag, len, .. }
        | Frame::Reserve { tag, len }
        | Frame::Report { tag, len, .. } => (tag, len as usize),
        Frame::Sync { tag } | Frame::Allocate { tag, .. } | Frame::Offloads { tag, .. } => (tag, 0),
        Frame::Return
        | Frame::Alive
        | Frame::Host(_)
        | Frame::Fenced { .. }
        | Frame::Notified { .. } => {
            return Ok(Memory::NONE);
        }
        Frame::Done { .. }
        | Frame::Release { .. }
        | Frame::Fence { .. }
        | Frame::Size { .. }
        | Frame::Notifications { .. } => {
            return Err(FrameError::Unexpected(*frame));
        }
    };
    let slot = slots.get_mut(usize::from(tag));
    let Some(slot) = slot.filter(|slot| slot.frame.is_none()) else {
        return Err(FrameError::Unexpected(*frame));
    };
    slot.frame = Some(*frame);
    let mut left = len;
    while left > 0 {
        let part = free.pop().ok_or(FrameError::Unexpected(*frame))?;
        slot.parts.push(part);
        let len = left.min(PART);
        let slice = part_of(memory, part, len).ok_or(FrameError::Unexpected(*frame))?;
        slot.iovecs.push(libc::iovec {
            iov_base: slice.as_ptr().cast(),
            iov_len: len,
        });
        left -= len;
    }
    // SAFETY: the vectors name parts of `memory`, which outlives the link, and belong to this slot
    // until its answer is sent.
    Ok(unsafe { Memory::new(slot.iovecs.as_ptr(), slot.iovecs.len()) })
}
