//! Frames from the guest (virtio 1.2, 5.1.6.2).

use farside_fabric::{Access, memory::HostSlice};

use super::{MOST_SEGMENTS, Session, VirtioNet, flows::HEADERS, transmit_queue};
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

/// Most frames of a queue that are taken in a poll.
const BURST: usize = 64;

/// A frame that is being sent.
#[derive(Debug)]
pub(super) struct Sending {
    /// The index of its first descriptor.
    head: u16,
    queue: u16,
    ended: bool,
}

impl VirtioNet {
    /// Starts to send what the driver has put into its queues. Returns whether there was any.
    pub(super) fn send_frames(&mut self, bus: &mut Bus<'_>) -> bool {
        let mut any = false;
        // A driver may still have frames in queues that are not in use any more.
        let pairs = self.known_pairs();
        for step in 0..pairs {
            let pair = (self.turn + step) % pairs;
            for _ in 0..BURST {
                if !self.sending.has_room() || !self.may_run(bus) || !self.send_frame(pair, bus) {
                    break;
                }
                any = true;
            }
        }
        self.turn = (self.turn + u16::from(any)) % pairs;
        any
    }

    fn send_frame(&mut self, pair: u16, bus: &mut Bus<'_>) -> bool {
        let queue = transmit_queue(pair);
        let segments = &mut self.segments;
        let Some(head) = self
            .transport
            .take_in_order(queue, bus, segments, MOST_SEGMENTS)
        else {
            return false;
        };
        let tag = self.sending.tag();
        self.sending.push(Sending {
            head,
            queue,
            ended: false,
        });
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
                if self.active > 1 {
                    let mut headers = [0; HEADER + HEADERS];
                    let len = copy_out(slices, &mut headers);
                    self.flows.sent(&headers[HEADER..len.max(HEADER)], pair);
                }
                self.block.write(tag, 0, Durability::Cached);
            }
            (Some(Err(fault)), _) => {
                let why = format_args!("queue {queue}: {fault}");
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
        while let Some((_, sending)) = self.sending.first().filter(|(_, it)| it.ended) {
            let (queue, done) = (sending.queue, [(sending.head, 0)]);
            self.sending.pop();
            self.transport.give_back_in_order(queue, &done, bus);
        }
    }
}

/// Copies the beginning of memory. Returns how many bytes.
fn copy_out(slices: &[HostSlice], bytes: &mut [u8]) -> usize {
    let mut done = 0;
    for slice in slices {
        done += slice.read(&mut bytes[done..]);
    }
    done
}
