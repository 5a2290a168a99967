//! Requests are taken from queues, and given back.

use super::{ISR_QUEUE, QueueState, Transport, saved};
use crate::{
    Bus, Dma,
    state::{Entry, InFlight},
    virtio::queue::{QueueError, Segment, VirtQueue},
};

impl Transport {
    /// Number of queues, also of those that are not enabled.
    pub(in crate::virtio) fn queue_count(&self) -> u16 {
        self.queues.len() as u16
    }

    /// Entries of queue `index`; 0 while it is not enabled.
    pub(in crate::virtio) fn queue_size(&self, index: u16) -> u16 {
        let state = self.queues.get(usize::from(index));
        let queue = state.and_then(|state| state.queue.as_ref());
        queue.map_or(0, VirtQueue::size)
    }

    /// Calls `act` with queue `index`, if it is enabled, and reachable unless that is demanded. On an error
    /// the device needs a reset.
    fn with_queue<R>(
        &mut self,
        index: u16,
        bus: &mut Bus<'_>,
        act: impl FnOnce(&mut VirtQueue, &mut dyn Dma) -> Result<R, QueueError>,
    ) -> Option<R> {
        let state = self.queues.get_mut(usize::from(index))?;
        let queue = state.queue.as_mut()?;
        if !state.is_demanded && !queue.is_reachable(bus.dma) {
            return None;
        }
        match act(queue, bus.dma) {
            Ok(result) => {
                state.is_demanded = false;
                Some(result)
            }
            Err(error) => {
                self.fail(format_args!("queue {index}: {error}"), bus.irq);
                None
            }
        }
    }

    /// A queue that cannot be reached is an error of the driver from now on, until it was.
    fn demand(&mut self, index: u16) {
        if let Some(state) = self.queues.get_mut(usize::from(index)) {
            state.is_demanded = true;
        }
    }

    /// Takes the next request of queue `index` and records it, or takes one that was in flight `again`: see
    /// [`VirtQueue::take`].
    pub(in crate::virtio) fn take(
        &mut self,
        index: u16,
        again: Option<&InFlight>,
        bus: &mut Bus<'_>,
        segments: &mut Vec<Segment>,
        most: usize,
    ) -> Option<(u16, Entry)> {
        if let Some(it) = again {
            let head = saved::head(it);
            self.demand(index);
            self.with_queue(index, bus, |queue, dma| {
                queue.take_again(dma, head, segments, most)
            })?;
            return Some((head, it.entry));
        }
        let (head, taken) = self.with_queue(index, bus, |queue, dma| {
            let Some(head) = queue.take(dma, segments, most)? else {
                return Ok(None);
            };
            queue.disable_notifications(dma)?;
            Ok(Some((head, queue.taken())))
        })??;
        let request = u64::from(head).to_le_bytes();
        // There are more entries than slots.
        let entry = self.state.record(index, taken - 1, &request)?;
        self.state.fetched(index, taken);
        Some((head, entry))
    }

    /// Takes the next request of queue `index`, of which no record is kept: requests of the queue are given back in
    /// their order, and what is not is taken again after the end of this process.
    pub(in crate::virtio) fn take_in_order(
        &mut self,
        index: u16,
        bus: &mut Bus<'_>,
        segments: &mut Vec<Segment>,
        most: usize,
    ) -> Option<u16> {
        self.with_queue(index, bus, |queue, dma| {
            let head = queue.take(dma, segments, most)?;
            if head.is_some() {
                queue.disable_notifications(dma)?;
            }
            Ok(head)
        })?
    }

    /// Has the last `count` requests of queue `index` that were taken be taken again.
    pub(in crate::virtio) fn untake(&mut self, index: u16, count: u16) {
        let state = self.queues.get_mut(usize::from(index));
        if let Some(queue) = state.and_then(|state| state.queue.as_mut()) {
            queue.untake(count);
        }
    }

    /// Returns requests of queue `index` with so many bytes written, all at once.
    pub(in crate::virtio) fn give_back_in_order(
        &mut self,
        index: u16,
        requests: &[(u16, u32)],
        bus: &mut Bus<'_>,
    ) {
        self.demand(index);
        let done = self.with_queue(index, bus, |queue, dma| queue.give_back_all(dma, requests));
        if done.is_some() {
            self.queues[usize::from(index)].returned = true;
        }
    }

    /// Goes on with the queues of a process before this one, whose requests are given back in their order.
    pub(in crate::virtio) fn resume_in_order(&mut self, bus: &mut Bus<'_>) {
        for index in 0..self.queue_count() {
            self.demand(index);
            self.with_queue(index, bus, VirtQueue::resume);
        }
    }

    /// Returns a request with `len` bytes written; [`Transport::interrupt_driver`] interrupts the driver.
    pub(in crate::virtio) fn give_back(
        &mut self,
        index: u16,
        (head, entry): (u16, Entry),
        len: u32,
        bus: &mut Bus<'_>,
    ) {
        // The driver has put the request there.
        self.demand(index);
        let state = self.queues.get(usize::from(index));
        let Some(queue) = state.and_then(|state| state.queue.as_ref()) else {
            return;
        };
        self.state.completing(entry, queue.given_back());
        let given_back = self.with_queue(index, bus, |queue, dma| {
            queue.give_back(dma, head, len)?;
            Ok(queue.given_back())
        });
        if let Some(given_back) = given_back {
            self.state.posted(index, given_back);
            self.state.release(entry);
            self.queues[usize::from(index)].returned = true;
        }
    }

    /// Whether a request that was in flight was given back, though that is not recorded. Then it is.
    pub(in crate::virtio) fn was_given_back(&mut self, it: &InFlight, bus: &mut Bus<'_>) -> bool {
        let given_back = self.queues.get(usize::from(it.queue));
        let given_back = given_back.and_then(|state| Some(state.queue.as_ref()?.given_back()));
        if given_back.is_none() || it.completion != given_back {
            return false;
        }
        self.demand(it.queue);
        let found = self.with_queue(it.queue, bus, |queue, dma| {
            let has = queue.has_given_back(dma)?;
            Ok(has.then_some(queue.given_back()))
        });
        match found {
            Some(Some(given_back)) => {
                self.state.posted(it.queue, given_back);
                self.state.release(it.entry);
                true
            }
            Some(None) => {
                // Otherwise it would count as done once another request is given back with this number.
                self.state.not_completed(it.entry);
                false
            }
            // Nothing is known of it. The device needs a reset.
            None => false,
        }
    }

    /// Raises the interrupts of queues whose requests were returned.
    pub(in crate::virtio) fn interrupt_driver(&mut self, bus: &mut Bus<'_>) {
        for index in 0..self.queue_count() {
            let QueueState {
                returned, vector, ..
            } = self.queues[usize::from(index)];
            if !returned {
                continue;
            }
            if let Some(wanted) = self.with_queue(index, bus, VirtQueue::needs_interrupt) {
                self.queues[usize::from(index)].returned = false;
                if wanted {
                    self.interrupt(ISR_QUEUE, vector, bus.irq);
                }
            }
        }
    }

    /// Has the driver interrupted again, once the device is running: it may have missed the interrupts before.
    pub(in crate::virtio) fn repeat_interrupts(&mut self) {
        for state in &mut self.queues {
            if let Some(queue) = &mut state.queue {
                queue.repeat_interrupt();
                state.returned = true;
            }
        }
        self.repeat_config_change();
    }

    /// Has the driver notify. Returns whether there are requests already.
    pub(in crate::virtio) fn enable_notifications(&mut self, bus: &mut Bus<'_>) -> bool {
        let mut pending = false;
        for index in 0..self.queue_count() {
            pending |= self.enable_notifications_of(index, 0, bus);
        }
        pending
    }

    /// The same of queue `index`, for requests behind the next `known` ones.
    pub(in crate::virtio) fn enable_notifications_of(
        &mut self,
        index: u16,
        known: u16,
        bus: &mut Bus<'_>,
    ) -> bool {
        let enabled = self.with_queue(index, bus, |queue, dma| {
            queue.enable_notifications(dma, known)
        });
        enabled.unwrap_or(false)
    }

    /// Drops translations, as a quiesce requires.
    pub(in crate::virtio) fn forget_translations(&mut self) {
        for queue in self.queues.iter_mut().filter_map(|it| it.queue.as_mut()) {
            queue.forget_translations();
        }
    }
}
