//! Frames for the guest (virtio 1.2, 5.1.6.4).

use farside_fabric::{Access, Fault, Iova, memory::HostSlice};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_ECN,
    VIRTIO_NET_HDR_GSO_NONE, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6,
};

use super::{MOST_SEGMENTS, Session, VirtioNet, flows::HEADERS, receive_queue};
use crate::{
    Bus, Dma,
    block::{
        BlockError, Tag,
        medium::Direction,
        tap::{HEADER, MAX_FRAME},
    },
    virtio::queue::Segment,
};

/// Most frames that are being received, or wait for buffers of the guest.
pub(super) const MOST_RECEIVING: Tag = 64;

/// Bytes of the memory for a frame.
pub(super) const ROOM: usize = 68 << 10;
const _: () = assert!(MAX_FRAME <= ROOM);

/// Most frames that are delivered in a poll.
const BURST: usize = 64;

/// Buffers that a frame can take: as many as a queue has.
pub(super) const MOST_BUFFERS: usize = crate::virtio::queue::MAX_SIZE as usize;

/// Offset of the number of buffers in a frame's header.
const NUM_BUFFERS: usize = 10;

/// A frame that is being received.
#[derive(Debug)]
pub(super) enum Receiving {
    Waiting,
    /// Its length, 0: none, and the queue pair that it is for.
    Here {
        len: usize,
        pair: u16,
    },
}

impl Receiving {
    /// Loses the frame.
    pub(super) fn discard(&mut self) {
        if let Self::Here { len, pair } = self {
            (*len, *pair) = (0, 0);
        }
    }

    /// The queue pair of a frame that waits for buffers.
    pub(super) fn pair(&self) -> Option<u16> {
        match self {
            Self::Waiting => None,
            Self::Here { pair, .. } => Some(*pair),
        }
    }
}

/// What became of a frame.
enum Delivery {
    Delivered,
    Dropped,
    /// The driver has to add buffers first.
    NoBuffers,
}

impl VirtioNet {
    /// Asks for as many frames as there is memory for.
    pub(super) fn start_receiving(&mut self) {
        while self.receiving.has_room() {
            let tag = self.receiving.tag();
            let room = self.room.slice(usize::from(tag) * ROOM, MAX_FRAME);
            let slices = self.block.slices(tag);
            slices.clear();
            slices.extend(room);
            self.receiving.push(Receiving::Waiting);
            self.block.read(tag, 0);
        }
    }

    /// A frame has come, or none will.
    pub(super) fn received(&mut self, tag: Tag, result: Result<(), BlockError>) {
        let len = match (result, self.session) {
            (Ok(()), Session::Open) => self.block.moved(tag) as usize,
            // It came for nobody.
            (Ok(()), _) => 0,
            (Err(error), _) => {
                if error != BlockError::Unreachable {
                    self.failed(error, Direction::Read);
                    // Asked again, it would fail again at once.
                    self.session = Session::Failed;
                }
                0
            }
        };
        let pair = match self.active > 1 && len > HEADER {
            true => self.pair_of(tag, len),
            false => 0,
        };
        if let Some(frame) = self.receiving.ended(tag) {
            *frame = Receiving::Here { len, pair };
        }
    }

    fn pair_of(&self, tag: Tag, len: usize) -> u16 {
        let mut headers = [0; HEADERS];
        let at = usize::from(tag) * ROOM + HEADER;
        let frame = self.room.slice(at, HEADERS.min(len - HEADER));
        let len = frame.map_or(0, |frame| frame.read(&mut headers));
        self.flows.pair_of(&headers[..len], self.active)
    }

    /// Delivers frames to the driver. Returns whether there was any.
    pub(super) fn deliver_frames(&mut self, bus: &mut Bus<'_>) -> bool {
        self.no_buffers = false;
        for count in 0..BURST {
            if !self.may_run(bus) || self.session != Session::Open {
                return count > 0;
            }
            let Some((tag, Receiving::Here { len, pair })) = self.receiving.first() else {
                return count > 0;
            };
            let (len, queue) = (*len, receive_queue(*pair));
            match self.deliver(tag, len, queue, bus) {
                Delivery::NoBuffers => {
                    self.no_buffers = true;
                    return count > 0;
                }
                Delivery::Delivered => {
                    self.stats.received += 1;
                    self.stats.bytes_received += (len - HEADER) as u64;
                    self.succeeded(Direction::Read);
                }
                Delivery::Dropped => self.stats.dropped += u64::from(len > 0),
            }
            self.receiving.pop();
        }
        true
    }

    fn deliver(&mut self, tag: Tag, len: usize, queue: u16, bus: &mut Bus<'_>) -> Delivery {
        let at = usize::from(tag) * ROOM;
        let Some(frame) = self.room.slice(at, len).filter(|_| len > HEADER) else {
            return Delivery::Dropped;
        };
        if !self.accepts(&frame) {
            return Delivery::Dropped;
        }
        self.given.clear();
        self.segments.clear();
        let most = match self.transport.has_feature(VIRTIO_NET_F_MRG_RXBUF) {
            true => self.transport.queue_size(queue).into(),
            false => 1,
        };
        let (mut left, mut too_long) = (len, false);
        while left > 0 && !too_long {
            let buffer = &mut self.buffer;
            let Some(head) = self
                .transport
                .take_in_order(queue, bus, buffer, MOST_SEGMENTS)
            else {
                // Those that were taken wait for more.
                self.too_few = self.given.len() as u16;
                self.transport.untake(queue, self.too_few);
                return Delivery::NoBuffers;
            };
            buffer.retain(|it| it.writable);
            let bytes: usize = buffer.iter().map(|it| it.len as usize).sum();
            self.segments.append(buffer);
            let part = bytes.min(left);
            self.given.push((head, part as u32));
            left -= part;
            too_long = left > 0 && self.given.len() >= most;
        }
        if too_long {
            self.transport.untake(queue, self.given.len() as u16);
            return Delivery::Dropped;
        }
        if !self.transport.has_feature(VIRTIO_NET_F_GUEST_CSUM) {
            // Nor that the checksum is known to be good (5.1.6.4.1).
            frame.write(&[0]);
        }
        let count = (self.given.len() as u16).to_le_bytes();
        if let Some(at) = frame.slice(NUM_BUFFERS, count.len()) {
            at.write(&count);
        }
        if let Err(fault) = copy(&frame, &self.segments, bus.dma) {
            let why = format_args!("queue {queue}: {fault}");
            self.transport.fail(why, bus.irq);
            return Delivery::Dropped;
        }
        self.transport.give_back_in_order(queue, &self.given, bus);
        Delivery::Delivered
    }

    /// Whether the driver has accepted what a frame leaves to it: one that came for a former driver may leave more.
    fn accepts(&self, frame: &HostSlice) -> bool {
        let mut header = [0; 2];
        frame.read(&mut header);
        let [flags, segments] = header.map(u32::from);
        let has = |feature| self.transport.has_feature(feature);
        let kind = match segments & !VIRTIO_NET_HDR_GSO_ECN {
            VIRTIO_NET_HDR_GSO_NONE => true,
            VIRTIO_NET_HDR_GSO_TCPV4 => has(VIRTIO_NET_F_GUEST_TSO4),
            VIRTIO_NET_HDR_GSO_TCPV6 => has(VIRTIO_NET_F_GUEST_TSO6),
            _ => false,
        };
        kind && (flags & VIRTIO_NET_HDR_F_NEEDS_CSUM == 0 || has(VIRTIO_NET_F_GUEST_CSUM))
    }
}

/// Copies a frame to the guest's buffers, which have room for it.
fn copy(frame: &HostSlice, buffers: &[Segment], dma: &mut dyn Dma) -> Result<(), Fault> {
    let mut done = 0;
    for buffer in buffers {
        let mut left = (buffer.len as usize).min(frame.len() - done);
        let mut at: Iova = buffer.at;
        while left > 0 {
            let to = dma.translate(at, left, Access::Write)?;
            let from = frame.slice(done, to.len());
            let (from, target) = (from.as_ref(), to.volatile_for(Access::Write));
            if let (Some(from), Some(target)) = (from, target)
                && let Some(from) = from.volatile_for(Access::Read)
            {
                from.copy_to_volatile_slice(target);
            }
            done += to.len();
            left -= to.len();
            at = at.wrapping_add(to.len() as u64);
        }
    }
    Ok(())
}
