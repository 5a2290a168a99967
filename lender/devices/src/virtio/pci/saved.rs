//! Registers and queues in a snapshot, and from one.

use virtio_bindings::{virtio_config::VIRTIO_F_VERSION_1, virtio_ring::VIRTIO_RING_F_EVENT_IDX};

use super::{DRIVER_OK, FEATURES_OK, NEEDS_RESET, NO_VECTOR, Transport};
use crate::{
    Bus, Interrupts,
    state::{InFlight, StateError, Words},
    virtio::{
        queue::{QueueSetup, VirtQueue},
        saved::{Saved, SavedQueue},
    },
};

/// The index of the first descriptor of a request that was in flight, which was checked.
pub(super) fn head(it: &InFlight) -> u16 {
    u16::from_le_bytes([it.command[0], it.command[1]])
}

impl Transport {
    /// Saves registers and queues with what `of_device` adds.
    pub(in crate::virtio) fn save(&mut self, of_device: Saved) {
        self.changed = false;
        if !self.state.is_kept() {
            return;
        }
        let queues = (0..).zip(&self.queues);
        let queues = queues.map(|(index, state)| SavedQueue {
            index,
            size: state.setup.size,
            descriptors: state.setup.descriptors,
            available: state.setup.available,
            used: state.setup.used,
            vector: state.vector,
            enabled: state.queue.is_some(),
        });
        let reset = |it: &SavedQueue| *it == SavedQueue::reset(it.index);
        let saved = Saved {
            accepted: self.accepted,
            device_feature_select: self.device_feature_select,
            driver_feature_select: self.driver_feature_select,
            config_vector: self.config_vector,
            status: self.status,
            resetting: self.resetting,
            queue_select: self.queue_select,
            queues: queues.filter(|it| !reset(it)).collect(),
            msix_table: self.msix_table.to_vec(),
            generation: self.generation,
            ..of_device
        };
        self.state.save(saved);
    }

    /// Restores registers and queues of a device that was reset. Returns the requests that are left.
    pub(in crate::virtio) fn restore(
        &mut self,
        saved: &Saved,
        words: &[Words],
        in_flight: Vec<InFlight>,
    ) -> Result<Vec<InFlight>, StateError> {
        let invalid = StateError::Invalid;
        let vectors = self.description.msix_vectors;
        let is_vector = |vector| vector < vectors || vector == NO_VECTOR;
        if saved.msix_table.len() != self.msix_table.len() {
            return Err(invalid("the size of the MSI-X table"));
        }
        self.msix_table.copy_from_slice(&saved.msix_table);
        self.generation = saved.generation;
        if saved.resetting {
            // Nothing is in flight any more.
            self.forget_session();
            return Ok(Vec::new());
        }
        let is_negotiated = saved.status & FEATURES_OK != 0;
        let is_offered = saved.accepted & !self.offered == 0;
        if is_negotiated && !(is_offered && saved.accepted >> VIRTIO_F_VERSION_1 & 1 != 0) {
            return Err(invalid("the features"));
        }
        if saved.status & DRIVER_OK != 0 && !is_negotiated {
            return Err(invalid("the status"));
        }
        if !is_vector(saved.config_vector) {
            return Err(invalid("the vector of the configuration"));
        }
        self.accepted = saved.accepted;
        self.device_feature_select = saved.device_feature_select;
        self.driver_feature_select = saved.driver_feature_select;
        self.config_vector = saved.config_vector;
        self.status = saved.status;
        self.queue_select = saved.queue_select;
        // An interrupt may have been lost. It does no harm if the configuration has not changed.
        self.config_changed = saved.status & DRIVER_OK != 0;
        for queue in &saved.queues {
            self.restore_queue(queue, words, is_vector(queue.vector))?;
        }
        let mut left = Vec::new();
        for it in in_flight {
            let queue = self.queues.get(usize::from(it.queue));
            let Some(queue) = queue.and_then(|state| state.queue.as_ref()) else {
                return Err(invalid("a request in flight is of no queue"));
            };
            let (mut taken, given_back) = (queue.taken(), queue.given_back());
            let (request, size) = (u64::from(head(&it)).to_le_bytes(), queue.size());
            if it.command[..8] != request || head(&it) >= size {
                return Err(invalid("the first descriptor of a request"));
            }
            let must_replay = self.state.must_replay(&it, &mut taken, given_back)?;
            if let Some(queue) = &mut self.queues[usize::from(it.queue)].queue {
                queue.resume_at(taken, given_back);
            }
            if must_replay {
                left.push(it);
            }
        }
        // Of a device that needs a reset none is given back.
        left.retain(|_| saved.status & (DRIVER_OK | NEEDS_RESET) == DRIVER_OK);
        Ok(left)
    }

    fn restore_queue(
        &mut self,
        saved: &SavedQueue,
        words: &[Words],
        is_vector: bool,
    ) -> Result<(), StateError> {
        let invalid = StateError::Invalid;
        let event_idx = self.has_feature(VIRTIO_RING_F_EVENT_IDX);
        let Words {
            fetched, posted, ..
        } = words
            .get(usize::from(saved.index))
            .copied()
            .unwrap_or_default();
        let Some(state) = self.queues.get_mut(usize::from(saved.index)) else {
            return Err(invalid("the number of a queue"));
        };
        if !is_vector {
            return Err(invalid("the vector of a queue"));
        }
        state.setup = QueueSetup {
            size: saved.size,
            descriptors: saved.descriptors,
            available: saved.available,
            used: saved.used,
        };
        state.vector = saved.vector;
        state.queue = match saved.enabled {
            true => {
                let queue = VirtQueue::new(&state.setup);
                let mut queue = queue.map_err(|_| invalid("the size or address of a queue"))?;
                if posted > fetched {
                    return Err(invalid("a counter of a queue"));
                }
                queue.set_event_idx(event_idx);
                queue.resume_at(fetched, posted);
                Some(queue)
            }
            false => None,
        };
        // An interrupt may have been lost.
        state.returned = saved.enabled;
        Ok(())
    }

    /// Interrupts the driver for a failure, which a process before this one may not have done.
    pub(in crate::virtio) fn repeat_failure(&mut self, irq: &mut dyn Interrupts) {
        if self.needs_reset() {
            self.interrupt_failure(irq);
        }
    }

    /// Whether a process before this one was running, whose requests and interrupts can be taken up now. Their data is
    /// not considered: its addresses are in descriptors, which the guest may have changed. A request whose data cannot
    /// be reached fails, as any does.
    pub(in crate::virtio) fn can_go_on(&self, requests: &[InFlight], bus: &mut Bus<'_>) -> bool {
        self.can_go_on_with(requests.iter().map(|it| it.queue), bus)
    }

    /// The same of these queues.
    pub(in crate::virtio) fn can_go_on_with(
        &self,
        mut queues: impl Iterator<Item = u16>,
        bus: &mut Bus<'_>,
    ) -> bool {
        self.status & DRIVER_OK != 0
            && !self.resetting
            && bus.dma.is_bus_master()
            && queues.all(|index| {
                let state = self.queues.get(usize::from(index));
                let queue = state.filter(|it| !it.is_demanded);
                let queue = queue.and_then(|state| state.queue.as_ref());
                queue.is_none_or(|queue| queue.is_reachable(bus.dma))
            })
    }
}
