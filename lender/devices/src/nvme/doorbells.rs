//! Shadow doorbells (NVM Express 1.4, 5.7 and 7.13): the guest writes its
//! doorbells to memory, and rings the register only if the write passes the
//! event index that the controller has published.
//!
//! While the controller polls, the event index stays behind the tail, so a busy guest
//! never traps. Before its owner sleeps, the controller publishes the tail as event
//! index, fences, and loads the doorbells again: either it sees the guest's next write,
//! or the guest sees the event index and rings. The fence pairs with the guest's barrier
//! between its two accesses.
//!
//! The admin queue has no shadow doorbells: drivers ring its registers (Linux and SPDK
//! both do), and a stale zero in its place must not be mistaken for a tail.
//!
//! Mapped doorbells are the registers themselves, in memory that the guest writes to without a trap. A write notifies
//! nobody, so the controller is polled.

use std::sync::atomic::Ordering;

use farside_fabric::{Access, Fault, Iova, memory::HostSlice};

use super::{
    ring::GuestRange,
    saved::{SavedBuffer, SavedShadow},
};
use crate::Dma;

/// One of the two doorbells of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbell {
    /// The tail of a submission queue.
    SubmissionTail(u16),
    /// The head of a completion queue.
    CompletionHead(u16),
}

impl Doorbell {
    /// The doorbell at `offset` bytes behind the first (CAP.DSTRD = 0).
    pub fn at(offset: u64) -> Option<Self> {
        let index = offset / 4;
        let queue = u16::try_from(index / 2).ok()?;
        Some(match index % 2 {
            0 => Self::SubmissionTail(queue),
            _ => Self::CompletionHead(queue),
        })
    }

    fn offset(self) -> usize {
        match self {
            Self::SubmissionTail(queue) => usize::from(queue) * 8,
            Self::CompletionHead(queue) => usize::from(queue) * 8 + 4,
        }
    }
}

/// The page of the doorbells in BAR 0, of a controller that has them mapped.
#[derive(Debug)]
pub struct MappedDoorbells(pub HostSlice);

impl MappedDoorbells {
    /// The value that the guest last wrote, or 0.
    pub fn load(&self, doorbell: Doorbell) -> Option<u32> {
        self.0.load_u32(doorbell.offset(), Ordering::Acquire)
    }

    /// Sets it to 0. No queue has a doorbell beyond the page.
    pub fn clear(&self, doorbell: Doorbell) {
        let _ = self.0.store_u32(doorbell.offset(), 0, Ordering::Release);
    }
}

/// The two pages of Doorbell Buffer Config.
#[derive(Debug)]
pub struct DoorbellBuffer {
    values: GuestRange,
    events: GuestRange,
    /// The guest has written to a shadow doorbell. From then on the values in memory
    /// are authoritative, and register writes only notify: they may arrive after more
    /// recent writes to memory. Until then the registers are authoritative, and a zero
    /// in memory is not a value.
    live: bool,
    base: (Iova, Iova),
    /// [`DoorbellBuffer::saved`] or [`Shadow::saved`] of a queue has changed.
    changed: bool,
}

impl DoorbellBuffer {
    /// `page_size` bytes at each of the two IOVAs.
    pub fn new(values: Iova, events: Iova, page_size: usize) -> Self {
        Self {
            values: GuestRange::new(values, page_size, Access::Read),
            events: GuestRange::new(events, page_size, Access::Write),
            live: false,
            base: (values, events),
            changed: false,
        }
    }

    /// As it is saved.
    pub fn saved(&self) -> SavedBuffer {
        SavedBuffer {
            values: self.base.0.get(),
            events: self.base.1.get(),
            live: self.live,
        }
    }

    /// What was [saved](Self::saved), of pages of `page_size` bytes.
    pub fn restored(saved: SavedBuffer, page_size: usize) -> Self {
        let (values, events) = (Iova::new(saved.values), Iova::new(saved.events));
        Self {
            live: saved.live,
            ..Self::new(values, events, page_size)
        }
    }

    /// Whether anything that is saved has changed since the last call.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// The value in memory.
    pub fn load(&mut self, dma: &mut dyn Dma, doorbell: Doorbell) -> Result<u32, Fault> {
        self.values.load(dma, doorbell.offset())
    }

    /// The value that the guest last wrote, if any.
    pub fn observe(
        &mut self,
        dma: &mut dyn Dma,
        doorbell: Doorbell,
        shadow: &mut Shadow,
    ) -> Result<Option<u32>, Fault> {
        let value = self.load(dma, doorbell)?;
        if shadow.stale == Some(value) || shadow.unwritten && value == 0 {
            return Ok(None);
        }
        let live = self.live || value != 0;
        self.changed |= shadow.unwritten || shadow.stale.is_some() || live != self.live;
        shadow.unwritten = false;
        shadow.stale = None;
        self.live = live;
        Ok(live.then_some(value))
    }

    /// Whether the value of a register write is authoritative.
    pub fn register_counts(&self, shadow: &Shadow) -> bool {
        !self.live || shadow.unwritten
    }

    /// Starts to monitor a doorbell of an existing queue, whose register value is `index`.
    pub fn watch(
        &mut self,
        dma: &mut dyn Dma,
        doorbell: Doorbell,
        shadow: &mut Shadow,
        index: u16,
    ) -> Result<(), Fault> {
        *shadow = Shadow {
            unwritten: index != 0 && self.load(dma, doorbell)? == 0,
            ..Shadow::default()
        };
        if shadow.unwritten {
            self.publish(dma, doorbell, shadow, index)?;
        }
        Ok(())
    }

    /// Publishes `index` as event index, unless it is published: the guest rings for a
    /// write that passes it.
    ///
    /// The guest compares with the value that it replaces in memory. Before its first
    /// write that is 0, so the event index must be 0, which any value passes.
    pub fn publish(
        &mut self,
        dma: &mut dyn Dma,
        doorbell: Doorbell,
        shadow: &mut Shadow,
        index: u16,
    ) -> Result<(), Fault> {
        self.look_for_first_write(dma, doorbell, shadow)?;
        let index = if shadow.unwritten { 0 } else { index };
        if shadow.published.replace(index) != Some(index) {
            self.events.store(dma, doorbell.offset(), index.into())?;
        }
        Ok(())
    }

    /// Checks for the guest's first write of a doorbell to memory. Must not be deferred:
    /// a later value may be 0 again.
    pub fn look_for_first_write(
        &mut self,
        dma: &mut dyn Dma,
        doorbell: Doorbell,
        shadow: &mut Shadow,
    ) -> Result<(), Fault> {
        if shadow.unwritten && self.load(dma, doorbell)? != 0 {
            shadow.unwritten = false;
            self.live = true;
            self.changed = true;
        }
        Ok(())
    }

    /// Drops the translations.
    pub fn forget(&mut self) {
        self.values.forget();
        self.events.forget();
    }
}

/// The controller's state of one shadow doorbell.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shadow {
    /// The value left by an earlier queue of the same number.
    stale: Option<u32>,
    /// The queue was in use through its registers when the buffer was configured, and the
    /// guest has not written to memory yet: the zero in memory is not a value.
    unwritten: bool,
    /// The last out-of-range value, so that it is reported once.
    refused: Option<u32>,
    /// The last published event index.
    published: Option<u16>,
}

impl Shadow {
    /// For a new queue, while memory holds `value`.
    pub fn for_new_queue(value: u32) -> Self {
        Self {
            stale: (value != 0).then_some(value),
            ..Self::default()
        }
    }

    /// The guest rang the register, and so has written to memory before. Returns whether that is news.
    pub fn rung(&mut self) -> bool {
        self.stale.take().is_some()
    }

    /// As it is saved: the event index is published anew.
    pub fn saved(&self) -> SavedShadow {
        SavedShadow {
            stale: self.stale,
            unwritten: self.unwritten,
        }
    }

    /// What was [saved](Self::saved).
    pub fn restored(saved: SavedShadow) -> Self {
        Self {
            stale: saved.stale,
            unwritten: saved.unwritten,
            ..Self::default()
        }
    }

    /// Records an out-of-range value. Returns whether it is a new one.
    pub fn refuse(&mut self, value: u32) -> bool {
        self.refused.replace(value) != Some(value)
    }

    pub fn published(&self) -> Option<u16> {
        self.published
    }
}
