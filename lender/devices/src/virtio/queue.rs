//! A virtqueue (virtio 1.2, 2.7): `virtio-queue`'s, in guest memory that DMA reaches.
//!
//! Each value is read once. The crate ends a descriptor chain where it is malformed or unreadable, as at
//! its end; that is told apart here by the last descriptor's `NEXT` flag.

use std::{fmt, sync::atomic::Ordering};

use farside_fabric::{Access, Fault, Iova};
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{ByteValued, Bytes, GuestAddress, VolatileSlice};

use super::memory::{KeptRange, QueueMemory};
use crate::Dma;

/// Most entries of a queue.
pub(super) const MAX_SIZE: u16 = 256;

/// The configuration of a queue, by its driver (4.1.4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueSetup {
    /// Entries.
    pub(super) size: u16,
    /// Descriptor area.
    pub(super) descriptors: u64,
    /// Driver area.
    pub(super) available: u64,
    /// Device area.
    pub(super) used: u64,
}

impl QueueSetup {
    pub(super) const RESET: Self = Self {
        size: MAX_SIZE,
        descriptors: 0,
        available: 0,
        used: 0,
    };
}

/// A buffer of a request: a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) at: Iova,
    pub(super) len: u32,
    /// Device-writable.
    pub(super) writable: bool,
}

/// Why a queue cannot be used until a reset.
#[derive(Debug)]
pub(super) enum QueueError {
    /// DMA to its rings or to an indirect table was refused.
    Fault(Fault),
    /// The driver has put something invalid there.
    Ring(virtio_queue::Error),
    /// A descriptor chain loops, leaves its table, or is longer than this.
    Chain(usize),
}

impl fmt::Display for QueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(fault) => write!(f, "{fault}"),
            Self::Ring(error) => write!(f, "{error}"),
            Self::Chain(most) => write!(
                f,
                "a descriptor chain loops, leaves its table, or has more than {most} descriptors"
            ),
        }
    }
}

/// An enabled queue.
#[derive(Debug)]
pub(super) struct VirtQueue {
    queue: Queue,
    /// Descriptor table, available ring, used ring.
    kept: [KeptRange; 3],
    /// The driver may suppress its notifications, by a flag.
    quiet: bool,
    /// Requests taken in all.
    taken: u64,
    /// Requests given back in all.
    given_back: u64,
    /// An interrupt may have been lost with the process before this one.
    interrupt_is_due: bool,
}

impl VirtQueue {
    /// # Errors
    /// An invalid size or alignment.
    pub(super) fn new(setup: &QueueSetup) -> Result<Self, virtio_queue::Error> {
        let QueueSetup {
            size,
            descriptors,
            available,
            used,
        } = *setup;
        let mut queue = Queue::new(MAX_SIZE)?;
        queue.try_set_size(size)?;
        queue.try_set_desc_table_address(GuestAddress(descriptors))?;
        queue.try_set_avail_ring_address(GuestAddress(available))?;
        queue.try_set_used_ring_address(GuestAddress(used))?;
        queue.set_ready(true);
        let entries = usize::from(size);
        // Each ring with its event index (2.7).
        let range = |at, len, access| KeptRange::new(Iova::new(at), len, access);
        Ok(Self {
            queue,
            kept: [
                range(descriptors, 16 * entries, Access::Read),
                range(available, 6 + 2 * entries, Access::Read),
                range(used, 6 + 8 * entries, Access::Write),
            ],
            quiet: false,
            taken: 0,
            given_back: 0,
            interrupt_is_due: false,
        })
    }

    /// Goes on with the queue of a process before this one, which has taken and given back so many requests.
    pub(super) fn resume_at(&mut self, taken: u64, given_back: u64) {
        self.queue.set_next_avail(taken as u16);
        self.queue.set_next_used(given_back as u16);
        (self.taken, self.given_back) = (taken, given_back);
        self.interrupt_is_due = true;
    }

    /// Has the driver interrupted again for what was given back.
    pub(super) fn repeat_interrupt(&mut self) {
        self.interrupt_is_due = true;
    }

    /// Entries.
    pub(super) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// How many requests were taken, in all.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// How many requests were given back, in all.
    pub(super) fn given_back(&self) -> u64 {
        self.given_back
    }

    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    pub(super) fn set_event_idx(&mut self, negotiated: bool) {
        self.queue.set_event_idx(negotiated);
    }

    /// Drops translations, as a quiesce requires.
    pub(super) fn forget_translations(&mut self) {
        self.kept.iter_mut().for_each(KeptRange::forget);
    }

    /// Whether its rings can be accessed.
    pub(super) fn is_reachable(&self, dma: &mut dyn Dma) -> bool {
        self.kept.iter().all(|range| range.is_reachable(dma))
    }

    fn with<R>(
        &mut self,
        dma: &mut dyn Dma,
        act: impl FnOnce(&mut Queue, &QueueMemory<'_>) -> Result<R, virtio_queue::Error>,
    ) -> Result<R, QueueError> {
        self.with_instead(dma, None, act)
    }

    /// Calls `act` with memory, in which this stands for what the guest has at that address.
    fn with_instead<R>(
        &mut self,
        dma: &mut dyn Dma,
        instead: Option<(u64, VolatileSlice<'_>)>,
        act: impl FnOnce(&mut Queue, &QueueMemory<'_>) -> Result<R, virtio_queue::Error>,
    ) -> Result<R, QueueError> {
        for range in &mut self.kept {
            range.translate(dma).map_err(QueueError::Fault)?;
        }
        let memory = QueueMemory::new(dma, &self.kept, instead);
        let result = act(&mut self.queue, &memory);
        match memory.fault() {
            Some(fault) => Err(QueueError::Fault(fault)),
            None => result.map_err(QueueError::Ring),
        }
    }

    /// Takes the next request: its buffers, of which there may be `most`. Returns the index of its first
    /// descriptor.
    pub(super) fn take(
        &mut self,
        dma: &mut dyn Dma,
        segments: &mut Vec<Segment>,
        most: usize,
    ) -> Result<Option<u16>, QueueError> {
        let head = self.take_from(dma, None, segments, most)?;
        self.taken += u64::from(head.is_some());
        Ok(head)
    }

    /// Takes the request with this first descriptor again, which a process before this one has taken.
    pub(super) fn take_again(
        &mut self,
        dma: &mut dyn Dma,
        head: u16,
        segments: &mut Vec<Segment>,
        most: usize,
    ) -> Result<(), QueueError> {
        // An available ring (2.7.6) with this request alone: the driver may have reused the request's entry. Flags,
        // index, first entry.
        let mut available = (u64::from(head) << 32 | 1 << 16).to_le();
        let available = VolatileSlice::from(available.as_mut_slice());
        self.queue.set_next_avail(0);
        let taken = self.take_from(dma, Some(available), segments, most);
        self.queue.set_next_avail(self.taken as u16);
        taken.map(drop)
    }

    fn take_from(
        &mut self,
        dma: &mut dyn Dma,
        available: Option<VolatileSlice<'_>>,
        segments: &mut Vec<Segment>,
        most: usize,
    ) -> Result<Option<u16>, QueueError> {
        segments.clear();
        // Also of a chain without descriptors.
        let mut incomplete = true;
        let available = available.map(|it| (self.queue.avail_ring(), it));
        let head = self.with_instead(dma, available, |queue, memory| {
            let chain = queue.iter(memory)?.next();
            let Some(mut chain) = chain else {
                return Ok(None);
            };
            let head = chain.head_index();
            while segments.len() < most && incomplete {
                let Some(descriptor) = chain.next() else {
                    break;
                };
                incomplete = descriptor.has_next();
                segments.push(Segment {
                    at: Iova::new(descriptor.addr().0),
                    len: descriptor.len(),
                    writable: descriptor.is_write_only(),
                });
            }
            Ok(Some(head))
        })?;
        match head {
            Some(_) if incomplete => Err(QueueError::Chain(most)),
            head => Ok(head),
        }
    }

    /// Has the last `count` requests that were taken be taken again.
    pub(super) fn untake(&mut self, count: u16) {
        self.taken -= u64::from(count);
        self.queue.set_next_avail(self.taken as u16);
    }

    /// Returns requests with so many bytes written, of which the driver sees all or none.
    pub(super) fn give_back_all(
        &mut self,
        dma: &mut dyn Dma,
        requests: &[(u16, u32)],
    ) -> Result<(), QueueError> {
        let Some((last, before)) = requests.split_last() else {
            return Ok(());
        };
        // Flags and index of the used ring (2.7.8): the driver does not see the index move before the last.
        let mut header = [0u8; 4];
        for (head, len) in before {
            let instead = Some((self.queue.used_ring(), VolatileSlice::from(&mut header[..])));
            self.with_instead(dma, instead, |queue, memory| {
                queue.add_used(memory, *head, *len)
            })?;
        }
        let (head, len) = *last;
        self.with(dma, |queue, memory| queue.add_used(memory, head, len))?;
        self.given_back += requests.len() as u64;
        Ok(())
    }

    /// Goes on with the queue of a process before this one, which has given requests back in their order: those that are
    /// not given back are taken again. Whatever the driver may have written there, only its own queue is affected.
    pub(super) fn resume(&mut self, dma: &mut dyn Dma) -> Result<(), QueueError> {
        let used = self.with(dma, |queue, memory| {
            queue.used_idx(memory, Ordering::Acquire)
        })?;
        self.resume_at(used.0.into(), used.0.into());
        Ok(())
    }

    /// Returns a request with `len` bytes written.
    pub(super) fn give_back(
        &mut self,
        dma: &mut dyn Dma,
        head: u16,
        len: u32,
    ) -> Result<(), QueueError> {
        self.with(dma, |queue, memory| queue.add_used(memory, head, len))?;
        self.given_back += 1;
        Ok(())
    }

    /// Whether a process before this one has given back one request more than it has recorded: then the used index
    /// has that. Anything else that the driver has written there is no sign of it.
    pub(super) fn has_given_back(&mut self, dma: &mut dyn Dma) -> Result<bool, QueueError> {
        let used = self.with(dma, |queue, memory| {
            queue.used_idx(memory, Ordering::Acquire)
        })?;
        let has = used.0 == (self.given_back + 1) as u16;
        if has {
            self.given_back += 1;
            self.queue.set_next_used(used.0);
        }
        Ok(has)
    }

    /// Whether the driver wants an interrupt for what was returned since the last call.
    pub(super) fn needs_interrupt(&mut self, dma: &mut dyn Dma) -> Result<bool, QueueError> {
        let wanted = self.with(dma, |queue, memory| {
            if queue.event_idx_enabled() {
                return queue.needs_notification(memory);
            }
            // The crate does not support this flag.
            let flags = memory
                .load::<u16>(GuestAddress(queue.avail_ring()), Ordering::Relaxed)
                .map_err(virtio_queue::Error::GuestMemory)?;
            Ok(u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0)
        })?;
        Ok(std::mem::take(&mut self.interrupt_is_due) || wanted)
    }

    /// Has the driver notify of requests behind the next `known` ones. Returns whether there are any.
    pub(super) fn enable_notifications(
        &mut self,
        dma: &mut dyn Dma,
        known: u16,
    ) -> Result<bool, QueueError> {
        self.quiet = false;
        let next = self.taken as u16;
        self.queue.set_next_avail(next.wrapping_add(known));
        let enabled = self.with(dma, |queue, memory| queue.enable_notification(memory));
        self.queue.set_next_avail(next);
        enabled
    }

    /// Has the driver not notify: the queue is polled.
    pub(super) fn disable_notifications(&mut self, dma: &mut dyn Dma) -> Result<(), QueueError> {
        if self.quiet {
            return Ok(());
        }
        self.quiet = true;
        self.with(dma, |queue, memory| queue.disable_notification(memory))
    }
}
