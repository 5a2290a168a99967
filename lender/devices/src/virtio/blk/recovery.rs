//! Resuming from the state of a process before this one: see [`crate::state`].
//!
//! Registers and queues are restored at once; the requests in flight when the device can reach guest memory again,
//! before anything is taken from a queue. A request that was returned to the guest is done. The others are executed
//! (again), in the order in which they were taken: no request that the guest has sent depends on their return. A
//! flush is not executed again if one has failed, since the kernel reports that once: it fails. The flush at the end of
//! a durable write-zeroes request is: what it covers was zeroed again before it.

use farside_fabric::memory::HostSlice;

use super::{
    VirtioBlk,
    layout::{SECTOR, WRITEBACK},
};
use crate::{
    Bus,
    state::{Restored, StateError, has_grown},
    virtio::saved::Saved,
};

impl VirtioBlk {
    /// Keeps the state in `memory`; see [`Device::set_state`](crate::Device::set_state).
    pub(super) fn keep_in(&mut self, memory: HostSlice, resume: bool) -> Result<bool, StateError> {
        let Some(restored) = self.transport.state.keep_in(memory, resume)? else {
            self.save();
            return Ok(false);
        };
        let done = self.restore(restored);
        if done.is_err() {
            self.transport.state.detach();
        }
        done.map(|()| true)
    }

    /// Saves changes of registers and queues. Requests in flight are recorded one by one.
    pub(super) fn save_changes(&mut self) {
        if self.transport.changed {
            self.save();
        }
    }

    pub(super) fn save(&mut self) {
        self.transport.save(Saved {
            writeback: self.config[WRITEBACK],
            size: self.sectors * SECTOR,
            flush_failed: self.flush_failed,
            ..Saved::default()
        });
    }

    fn restore(&mut self, restored: Restored<Saved>) -> Result<(), StateError> {
        let Restored {
            saved,
            words,
            in_flight,
            ..
        } = restored;
        let has_grown = has_grown(saved.size, self.sectors * SECTOR)?;
        let left = self.transport.restore(&saved, &words, in_flight)?;
        if has_grown {
            self.transport.config_changed();
        }
        if left.len() > self.slots.len() {
            return Err(StateError::Invalid("more requests in flight than slots"));
        }
        if saved.resetting {
            self.save();
            return Ok(());
        }
        self.config[WRITEBACK] = saved.writeback & 1;
        self.flush_failed = saved.flush_failed;
        self.recovery = Some(left);
        Ok(())
    }

    /// Whether requests that were in flight can be taken up now.
    pub(super) fn can_recover(&self, bus: &mut Bus<'_>) -> bool {
        let requests = self.recovery.as_deref();
        !self.quiesced && requests.is_some_and(|it| self.transport.can_go_on(it, bus))
    }

    /// Takes up the requests that were in flight, if the device can reach guest memory. Returns whether it did.
    pub(super) fn recover(&mut self, bus: &mut Bus<'_>) -> bool {
        if !self.can_recover(bus) {
            return false;
        }
        let mut requests = self.recovery.take().unwrap_or_default();
        self.transport.repeat_failure(bus.irq);
        // All before any request is returned.
        requests.retain(|it| !self.transport.was_given_back(it, bus));
        if !requests.is_empty() {
            let (name, count) = (self.transport.name(), requests.len());
            log::info!("{name}: {count} requests that were in flight are taken up");
        }
        self.recovering = true;
        for it in &requests {
            // A device that needs a reset executes no requests, and returns none: the driver frees them with the reset.
            if !self.transport.needs_reset() {
                self.take_request(it.queue, Some(it), bus);
            }
        }
        self.recovering = false;
        true
    }
}
