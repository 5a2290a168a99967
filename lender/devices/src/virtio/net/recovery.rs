//! Resuming from the state of a process before this one: see [`crate::state`], and [`super`] for queues.

use farside_fabric::memory::HostSlice;
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_DRIVER_OK;

use super::VirtioNet;
use crate::{Bus, state::StateError, virtio::saved::Saved};

impl VirtioNet {
    /// Keeps the state in `memory`; see [`Device::set_state`](crate::Device::set_state).
    pub(super) fn keep_in(&mut self, memory: HostSlice, resume: bool) -> Result<bool, StateError> {
        let Some(restored) = self.transport.state.keep_in(memory, resume)? else {
            self.save();
            return Ok(false);
        };
        // No request is recorded: what another device has left there is not this one's.
        let done = match restored.in_flight.is_empty() {
            true => self
                .transport
                .restore(&restored.saved, &restored.words, Vec::new()),
            false => Err(StateError::Invalid(
                "requests of a network device in flight",
            )),
        };
        if done.is_err() {
            self.transport.state.detach();
        }
        done?;
        // Before its start, a driver has no queues to take up.
        self.active = restored.saved.pairs.clamp(1, self.known_pairs());
        let ran = u32::from(restored.saved.status) & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        self.recovery = ran && !restored.saved.resetting;
        self.save();
        Ok(true)
    }

    /// Saves changes of registers and queues.
    pub(super) fn save_changes(&mut self) {
        if self.transport.changed {
            self.save();
        }
    }

    pub(super) fn save(&mut self) {
        self.transport.save(Saved {
            pairs: self.active,
            ..Saved::default()
        });
    }

    /// Whether the queues can be taken up now.
    pub(super) fn can_recover(&self, bus: &mut Bus<'_>) -> bool {
        self.recovery
            && !self.quiesced
            && self
                .transport
                .can_go_on_with(0..self.transport.queue_count(), bus)
    }

    /// Takes up the queues, if the device can reach guest memory. Returns whether it did.
    pub(super) fn recover(&mut self, bus: &mut Bus<'_>) -> bool {
        if !self.can_recover(bus) {
            return false;
        }
        self.recovery = false;
        self.transport.repeat_failure(bus.irq);
        self.transport.resume_in_order(bus);
        // The frames that came meanwhile are for this driver.
        if !self.is_telling {
            self.open_session(false);
        }
        true
    }
}
