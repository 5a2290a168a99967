//! Requests and their steps at the medium (virtio 1.2, 5.2.6).

use std::time::Instant;

use farside_fabric::Access;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR,
    VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::{
    VirtioBlk,
    layout::{MAX_DISCARD_RANGES, MAX_DISCARD_SECTORS, MAX_ZERO_SECTORS, SECTOR, WRITEBACK},
    request::{self, Extent, HEADER, RANGE, Range},
    slots::Work,
};
use crate::{
    Bus, Dma,
    block::{BlockError, Durability, Tag, medium::Direction},
    state::Entry,
    virtio::queue::Segment,
};

/// Most bytes of a request that are moved at a time: bounds the guest memory of a slot, and the copy that
/// the device's thread does.
const PART: u64 = 4 << 20;

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Io,
    Unsupported,
}

/// The result of a step.
enum Progress {
    InFlight,
    /// With the bytes of data that were written.
    Done(u64),
}

type Outcome = Result<Progress, Failure>;

impl VirtioBlk {
    /// Starts a request. A slot is free: otherwise none is taken.
    pub(super) fn start(
        &mut self,
        queue: u16,
        (head, entry): (u16, Entry),
        chain: &[Segment],
        bus: &mut Bus<'_>,
    ) -> Option<()> {
        let frame = match request::frame(chain) {
            Ok(frame) => frame,
            Err(malformed) => {
                // There is nowhere to report it.
                self.transport
                    .fail(format_args!("queue {queue}: {malformed}"), bus.irq);
                return None;
            }
        };
        let tag = self.slots.take()?;
        let slot = &mut self.slots[tag];
        (slot.queue, slot.head, slot.entry) = (queue, head, entry);
        (slot.status, slot.in_len) = (frame.status, frame.in_len);
        slot.next = (0, 0);
        slot.after = (0, 0);
        let outcome = match request::header(chain, bus.dma) {
            Ok(request) => match request.kind {
                VIRTIO_BLK_T_IN => {
                    request::data(chain, true, 0, frame.in_len, &mut self.slots[tag].data);
                    self.read(tag, request.sector, frame.in_len, bus)
                }
                VIRTIO_BLK_T_OUT => {
                    let data = &mut self.slots[tag].data;
                    request::data(chain, false, HEADER, frame.out_len, data);
                    self.write(tag, request.sector, frame.out_len, bus)
                }
                VIRTIO_BLK_T_FLUSH => self.flush(tag, bus.dma),
                VIRTIO_BLK_T_GET_ID => {
                    let len = frame.in_len.min(VIRTIO_BLK_ID_BYTES.into());
                    request::data(chain, true, 0, len, &mut self.slots[tag].data);
                    self.get_id(tag, bus.dma)
                }
                VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                    let data = &mut self.slots[tag].data;
                    request::data(chain, false, HEADER, frame.out_len, data);
                    let discard = request.kind == VIRTIO_BLK_T_DISCARD;
                    self.clear(tag, discard, frame.out_len, bus.dma)
                }
                _ => Err(Failure::Unsupported),
            },
            // The fault is counted.
            Err(_) => Err(Failure::Io),
        };
        self.conclude(tag, outcome, bus);
        Some(())
    }

    fn extent(&self, sector: u64, len: u64) -> Result<Extent, Failure> {
        Extent::new(sector, len, self.sectors).ok_or(Failure::Io)
    }

    fn read(&mut self, tag: Tag, sector: u64, len: u64, bus: &mut Bus<'_>) -> Outcome {
        self.slots[tag].rest = self.extent(sector, len)?;
        self.slots[tag].work = Work::Read;
        self.move_part(tag, bus.dma)
    }

    fn write(&mut self, tag: Tag, sector: u64, len: u64, bus: &mut Bus<'_>) -> Outcome {
        self.check_writable()?;
        self.slots[tag].rest = self.extent(sector, len)?;
        self.slots[tag].work = Work::Write;
        self.move_part(tag, bus.dma)
    }

    fn check_writable(&self) -> Result<(), Failure> {
        match self.read_only {
            true => Err(Failure::Io),
            false => Ok(()),
        }
    }

    /// Starts the next step of a request, or the one that was given up.
    fn issue(&mut self, tag: Tag, dma: &mut dyn Dma) -> Outcome {
        match (self.slots[tag].work, self.slots[tag].ranges.last()) {
            (Work::Read | Work::Write, _) => return self.move_part(tag, dma),
            (Work::Flush, _) => self.block.flush(tag),
            (Work::Zero { unmap, .. }, Some(range)) => {
                self.block.zero(tag, range.offset, range.len, unmap);
            }
            (Work::Discard, Some(range)) => self.block.punch(tag, range.offset, range.len),
            (Work::Zero { .. } | Work::Discard | Work::Free, _) => return Ok(Progress::Done(0)),
        }
        Ok(Progress::InFlight)
    }

    /// Starts the steps again that the medium has given up.
    pub(super) fn unpark(&mut self, bus: &mut Bus<'_>) {
        for tag in self.slots.unpark() {
            let outcome = self.issue(tag, bus.dma);
            self.conclude(tag, outcome, bus);
        }
    }

    /// Starts to move the next part of the data of a read or write, if there is any.
    fn move_part(&mut self, tag: Tag, dma: &mut dyn Dma) -> Outcome {
        let slot = &mut self.slots[tag];
        slot.moving = slot.rest.len.min(PART);
        if slot.moving == 0 {
            return Ok(Progress::Done(slot.in_len));
        }
        let access = match slot.work {
            Work::Read => Access::Write,
            _ => Access::Read,
        };
        let slices = self.block.slices(tag);
        slices.clear();
        let mut left = slot.moving;
        slot.after = slot.next;
        while left > 0 {
            let (index, done) = slot.after;
            // There are as many bytes as are to be moved.
            let part = slot.data.get(index).ok_or(Failure::Io)?;
            let len = left.min(u64::from(part.len - done));
            let at = part.at.wrapping_add(done.into());
            dma.gather(at, len as usize, access, slices)
                .map_err(|_| Failure::Io)?;
            left -= len;
            // No more than the part's.
            let done = done + len as u32;
            slot.after = match done == part.len {
                true => (index + 1, 0),
                false => (index, done),
            };
        }
        let offset = slot.rest.offset;
        match slot.work {
            Work::Read => self.block.read(tag, offset),
            _ => {
                let durability = self.durability();
                self.block.write(tag, offset, durability);
            }
        }
        Ok(Progress::InFlight)
    }

    /// When a write is complete (5.2.6.2): without a flush request it is at once on the medium.
    pub(super) fn durability(&self) -> Durability {
        let has = |bit| self.transport.has_feature(bit);
        let cached = match has(VIRTIO_BLK_F_CONFIG_WCE) {
            true => self.config[WRITEBACK] != 0,
            false => has(VIRTIO_BLK_F_FLUSH),
        };
        match cached {
            true => Durability::Cached,
            false => Durability::Durable,
        }
    }

    fn flush(&mut self, tag: Tag, dma: &mut dyn Dma) -> Outcome {
        self.stats.flushes += 1;
        if self.read_only {
            return Ok(Progress::Done(0));
        }
        if self.recovering && self.flush_failed {
            return Err(Failure::Io);
        }
        self.slots[tag].work = Work::Flush;
        self.issue(tag, dma)
    }

    fn get_id(&mut self, tag: Tag, dma: &mut dyn Dma) -> Outcome {
        let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
        for (to, from) in id.iter_mut().zip(self.serial.bytes()) {
            *to = from;
        }
        let mut rest = &id[..];
        for part in &self.slots[tag].data {
            let (now, later) = rest.split_at(part.len as usize);
            dma.write(part.at, now).map_err(|_| Failure::Io)?;
            rest = later;
        }
        Ok(Progress::Done((id.len() - rest.len()) as u64))
    }

    /// Discards or zeroes. All ranges are checked before any is.
    fn clear(&mut self, tag: Tag, discard: bool, len: u64, dma: &mut dyn Dma) -> Outcome {
        self.check_writable()?;
        let (most, most_sectors) = match discard {
            true => (MAX_DISCARD_RANGES, MAX_DISCARD_SECTORS),
            false => (1, MAX_ZERO_SECTORS),
        };
        if len == 0 || len > (most * RANGE) as u64 || !len.is_multiple_of(RANGE as u64) {
            return Err(Failure::Io);
        }
        let mut bytes = [0; MAX_DISCARD_RANGES * RANGE];
        let bytes = &mut bytes[..len as usize];
        let mut done = 0;
        for part in &self.slots[tag].data {
            let piece = &mut bytes[done..done + part.len as usize];
            dma.read(part.at, piece).map_err(|_| Failure::Io)?;
            done += part.len as usize;
        }
        let (ranges, _) = bytes.as_chunks::<RANGE>();
        let mut unmap = false;
        for range in ranges.iter().map(Range::from_bytes) {
            let known = match discard {
                true => 0,
                false => VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
            };
            if range.flags & !known != 0 {
                return Err(Failure::Unsupported);
            }
            if range.sectors > most_sectors {
                return Err(Failure::Io);
            }
            unmap |= range.flags != 0;
            let extent = self.extent(range.sector, u64::from(range.sectors) * SECTOR)?;
            if extent.len > 0 {
                self.slots[tag].ranges.push(extent);
            }
        }
        if self.slots[tag].ranges.is_empty() {
            return Ok(Progress::Done(0));
        }
        let durable = self.durability() == Durability::Durable;
        self.slots[tag].work = match discard {
            true => Work::Discard,
            false => Work::Zero { unmap, durable },
        };
        match discard {
            true => self.stats.discards += 1,
            false => self.stats.zeroes += 1,
        }
        self.issue(tag, dma)
    }

    pub(super) fn finish_io(
        &mut self,
        tag: Tag,
        result: Result<(), BlockError>,
        bus: &mut Bus<'_>,
    ) {
        let work = self.slots[tag].work;
        self.note_medium(work, result);
        if work == Work::Flush
            && matches!(result, Err(error) if error != BlockError::Unreachable)
            && !self.flush_failed
        {
            // Before the request is returned: executed again, it would succeed.
            self.flush_failed = true;
            self.save();
        }
        // A device that is being reset starts no further steps.
        if self.transport.is_resetting() {
            self.release(tag);
            return;
        }
        // The guest is told nothing: it has no answer that means that the driver is to try again.
        if result == Err(BlockError::Unreachable) {
            self.block.slices(tag).clear();
            self.slots.park(tag);
            return;
        }
        let outcome = self.step(tag, work, result, bus);
        self.conclude(tag, outcome, bus);
    }

    /// Handles a finished step.
    fn step(
        &mut self,
        tag: Tag,
        work: Work,
        result: Result<(), BlockError>,
        bus: &mut Bus<'_>,
    ) -> Outcome {
        // A discard is advice: a medium without holes keeps the data.
        if work == Work::Discard && matches!(result, Ok(()) | Err(BlockError::Unsupported)) {
            self.slots[tag].ranges.pop();
            return self.issue(tag, bus.dma);
        }
        result.map_err(|_| Failure::Io)?;
        let moved = self.slots[tag].moving;
        match work {
            Work::Read => self.stats.bytes_read += moved,
            Work::Write => self.stats.bytes_written += moved,
            Work::Zero { durable: true, .. } => {
                self.slots[tag].work = Work::Flush;
                return self.issue(tag, bus.dma);
            }
            _ => return Ok(Progress::Done(0)),
        }
        let slot = &mut self.slots[tag];
        slot.next = slot.after;
        slot.rest.offset += moved;
        slot.rest.len -= moved;
        if slot.rest.len > 0 {
            return self.move_part(tag, bus.dma);
        }
        match work {
            Work::Read => self.stats.reads += 1,
            _ => self.stats.writes += 1,
        }
        Ok(Progress::Done(slot.in_len))
    }

    /// Returns a request that is done: its status, then the chain.
    fn conclude(&mut self, tag: Tag, outcome: Outcome, bus: &mut Bus<'_>) {
        let (status, len) = match outcome {
            Ok(Progress::InFlight) => return,
            Ok(Progress::Done(len)) => (VIRTIO_BLK_S_OK, Some(len)),
            Err(Failure::Io) => (VIRTIO_BLK_S_IOERR, None),
            Err(Failure::Unsupported) => (VIRTIO_BLK_S_UNSUPP, None),
        };
        let slot = &self.slots[tag];
        let (queue, in_len) = (slot.queue, slot.in_len);
        let request = (slot.head, slot.entry);
        // The length is that of what was written from the first buffer on (2.7.8.2), and the status is
        // behind the data.
        let len = match len.unwrap_or(0) == in_len {
            true => in_len + 1,
            false => len.unwrap_or(0),
        };
        let at = slot.status;
        self.release(tag);
        if status != VIRTIO_BLK_S_OK {
            self.stats.errors += 1;
        }
        // Its rings are no longer used.
        if self.transport.needs_reset() {
            return;
        }
        match bus.dma.write(at, &[status as u8]) {
            // Of a chain of no more than 4 GiB.
            Ok(()) => self.transport.give_back(queue, request, len as u32, bus),
            Err(fault) => self.transport.fail(
                format_args!("queue {queue}: the status of a request: {fault}"),
                bus.irq,
            ),
        }
    }

    /// Updates the medium's state from the result of a step.
    fn note_medium(&mut self, work: Work, result: Result<(), BlockError>) {
        let direction = match work {
            Work::Read => Direction::Read,
            _ => Direction::Write,
        };
        let block = &self.block;
        match result {
            // The common case.
            Ok(()) if self.medium.problem().is_none() => {}
            Ok(()) => self
                .medium
                .succeeded(direction, || block.condition(), Instant::now()),
            Err(error) => {
                let condition = block.condition();
                self.medium
                    .failed(error, direction, condition, Instant::now());
            }
        }
    }
}
