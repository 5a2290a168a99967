//! Frames from the guest (virtio 1.2, 5.1.6.2).

use farside_fabric::Access;

use super::{MOST_SEGMENTS, Session, TRANSMIT, VirtioNet};
use crate::{
    Bus,
    block::{
        BlockError, Durability, Tag,
        medium::Direction,
        tap::{HEADER, MAX_FRAME},
    },
};

/// Most frames that are sent at a time.
pub(super) const MOST_SENDING: Tag = 256;

/// Most frames that are taken in a poll.
const BURST: usize = 64;

/// A frame that is being sent.
#[derive(Debug)]
pub(super) struct Sending {
    /// The index of its first descriptor.
    head: u16,
    ended: bool,
}

impl VirtioNet {
    /// Starts to send what the driver has put into its queue. Returns whether there was any.
    pub(super) fn send_frames(&mut self, bus: &mut Bus<'_>) -> bool {
        for count in 0..BURST {
            if !self.sending.has_room() || !self.may_run(bus) || !self.send_frame(bus) {
                return count > 0;
            }
        }
        true
    }

    fn send_frame(&mut self, bus: &mut Bus<'_>) -> bool {
        let segments = &mut self.segments;
        let Some(head) = self
            .transport
            .take_in_order(TRANSMIT, bus, segments, MOST_SEGMENTS)
        else {
            return false;
        };
        let tag = self.sending.tag();
        self.sending.push(Sending { head, ended: false });
        let slices = self.block.slices(tag);
        slices.clear();
        let len: u64 = segments.iter().map(|it| u64::from(it.len)).sum();
        let is_frame = !segments.iter().any(|it| it.writable)
            && (HEADER as u64..=MAX_FRAME as u64).contains(&len);
        let gathered = is_frame.then(|| {
            segments
                .iter()
                .try_for_each(|it| bus.dma.gather(it.at, it.len as usize, Access::Read, slices))
        });
        match (gathered, self.session) {
            (Some(Ok(())), Session::Open | Session::Opening) => {
                self.block.write(tag, 0, Durability::Cached);
            }
            (Some(Err(fault)), _) => {
                let why = format_args!("queue {TRANSMIT}: {fault}");
                self.transport.fail(why, bus.irq);
                self.sent(tag, Err(BlockError::GuestMemory));
            }
            // No frame, or nowhere to send it.
            _ => self.sent(tag, Err(BlockError::Unsupported)),
        }
        true
    }

    /// A frame was sent, or not.
    pub(super) fn sent(&mut self, tag: Tag, result: Result<(), BlockError>) {
        let moved = match result {
            Ok(()) => self.block.moved(tag),
            Err(_) => 0,
        };
        self.block.release(tag);
        if moved >= HEADER as u64 {
            self.stats.sent += 1;
            self.stats.bytes_sent += moved - HEADER as u64;
            self.succeeded(Direction::Write);
        } else {
            self.stats.dropped += 1;
        }
        if let Err(error) = result {
            self.failed(error, Direction::Write);
        }
        if let Some(frame) = self.sending.ended(tag) {
            frame.ended = true;
        }
    }

    /// Gives buffers back to the driver.
    pub(super) fn return_sent(&mut self, bus: &mut Bus<'_>) {
        if !self.transport.is_running(bus) {
            return;
        }
        while let Some((_, Sending { head, ended: true })) = self.sending.first() {
            let done = [(*head, 0)];
            self.sending.pop();
            self.transport.give_back_in_order(TRANSMIT, &done, bus);
        }
    }
}
