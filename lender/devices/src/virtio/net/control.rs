//! The control queue (virtio 1.2, 5.1.6.5): how many queue pairs are in use.

use farside_fabric::{Access, Fault};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, VIRTIO_NET_ERR, VIRTIO_NET_F_CTRL_VQ,
    VIRTIO_NET_F_MQ, VIRTIO_NET_OK,
};

use super::{Receiving, VirtioNet};
use crate::{Bus, virtio::queue::Segment};

/// Most commands in a poll.
const BURST: usize = 4;

/// Most descriptors of a command.
const MOST_SEGMENTS: usize = 8;

/// Class, command and number of pairs: the only command.
const LEN: usize = 4;

impl VirtioNet {
    /// Queue pairs that the driver knows of.
    pub(super) fn known_pairs(&self) -> u16 {
        match self.transport.has_feature(VIRTIO_NET_F_MQ) {
            true => self.pairs,
            false => 1,
        }
    }

    /// The control queue, which is behind those of the pairs that the driver knows of.
    pub(super) fn control_queue(&self) -> Option<u16> {
        let has_one = self.transport.has_feature(VIRTIO_NET_F_CTRL_VQ);
        has_one.then(|| 2 * self.known_pairs())
    }

    /// Executes what the driver has put into its control queue. Returns whether there was any.
    pub(super) fn execute_commands(&mut self, bus: &mut Bus<'_>) -> bool {
        let Some(queue) = self.control_queue() else {
            return false;
        };
        for count in 0..BURST {
            let segments = &mut self.segments;
            let taken = self
                .transport
                .take_in_order(queue, bus, segments, MOST_SEGMENTS);
            let Some(head) = taken else {
                return count > 0;
            };
            let segments = std::mem::take(&mut self.segments);
            let executed = self.execute(&segments, bus);
            self.segments = segments;
            match executed {
                Ok(written) => {
                    self.transport
                        .give_back_in_order(queue, &[(head, written)], bus);
                }
                Err(fault) => {
                    let why = format_args!("queue {queue}: {fault}");
                    self.transport.fail(why, bus.irq);
                }
            }
            if !self.may_run(bus) {
                return true;
            }
        }
        true
    }

    /// Executes a command, and writes its result. Returns how many bytes those are.
    fn execute(&mut self, segments: &[Segment], bus: &mut Bus<'_>) -> Result<u32, Fault> {
        let (mut command, mut len) = ([0; LEN], 0);
        let mut slices = Vec::new();
        for part in segments.iter().filter(|it| !it.writable) {
            slices.clear();
            let room = command.get_mut(len..).unwrap_or_default();
            let most = room.len().min(part.len as usize);
            bus.dma.gather(part.at, most, Access::Read, &mut slices)?;
            let mut done = 0;
            for slice in &slices {
                done += slice.read(&mut room[done..most]);
            }
            len += part.len as usize;
        }
        const PAIRS_SET: [u32; 2] = [VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET];
        let [class, number, pairs @ ..] = command;
        let pairs = u16::from_le_bytes(pairs);
        let is_known = len == LEN && [class, number].map(u32::from) == PAIRS_SET;
        let result = match is_known && (1..=self.known_pairs()).contains(&pairs) {
            true => {
                self.use_pairs(pairs);
                VIRTIO_NET_OK
            }
            false => VIRTIO_NET_ERR,
        };
        let Some(to) = segments.iter().find(|it| it.writable && it.len > 0) else {
            return Ok(0);
        };
        slices.clear();
        bus.dma.gather(to.at, 1, Access::Write, &mut slices)?;
        slices.iter().for_each(|slice| {
            slice.write(&[result as u8]);
        });
        Ok(1)
    }

    /// Frames are for these pairs from now on.
    fn use_pairs(&mut self, pairs: u16) {
        self.active = pairs;
        for frame in self.receiving.iter_mut() {
            if let Receiving::Here { pair, .. } = frame {
                *pair = (*pair).min(pairs - 1);
            }
        }
        // Before the driver knows: the next process executes the command again otherwise.
        self.save();
    }
}
