//! The device's implementation of [`Device`].

use std::os::fd::BorrowedFd;

use farside_fabric::memory::HostSlice;
use farside_pci::Description;

use super::{MOST_SENDING, Session, VirtioNet, receive_queue, transmit_queue};
use crate::{Bus, Device, Waiting, state, virtio::pci::BAR_SIZE};

impl Device for VirtioNet {
    fn description(&self) -> &Description {
        self.transport.description()
    }

    fn bar_read(&mut self, bar: u8, at: u64, data: &mut [u8], bus: &mut Bus<'_>) {
        data.fill(0);
        if bar == 0 && at < BAR_SIZE {
            self.transport.read(at, data, &self.config, bus);
        }
    }

    fn bar_write(&mut self, bar: u8, at: u64, data: &[u8], bus: &mut Bus<'_>) {
        if bar == 0 && at < BAR_SIZE {
            let written = self.transport.write(at, data, bus);
            self.written(written, bus);
            self.save_changes();
        }
    }

    /// BAR 0 has no sparse mmap area.
    fn set_bar_memory(&mut self, _bar: u8, _area: usize, _memory: Option<HostSlice>) {}

    fn poll(&mut self, bus: &mut Bus<'_>) -> bool {
        self.run(bus)
    }

    fn enable_notifications(&mut self, bus: &mut Bus<'_>) -> bool {
        let pending = match self.may_run(bus) {
            true => {
                let (control, pairs) = (self.control_queue(), self.known_pairs());
                let transport = &mut self.transport;
                let mut frames = false;
                for pair in 0..pairs {
                    frames |= transport.enable_notifications_of(transmit_queue(pair), 0, bus);
                }
                let frames = frames && self.sending.has_room() && self.session != Session::Off;
                // Notifications of buffers cost the guest a trap each, and are for frames that wait.
                let waits = self.receiving.first().and_then(|(_, it)| it.pair());
                let buffers = waits.filter(|_| self.session == Session::Open);
                let buffers = buffers.is_some_and(|pair| {
                    let queue = receive_queue(pair);
                    transport.enable_notifications_of(queue, self.too_few, bus)
                });
                let commands =
                    control.is_some_and(|queue| transport.enable_notifications_of(queue, 0, bus));
                let opens = self.session == Session::Off && !self.is_telling;
                frames || buffers || commands || opens
            }
            false => self.can_recover(bus),
        };
        self.save_changes();
        !pending && !self.block.is_busy()
    }

    fn waiting(&self) -> Waiting {
        match self.no_buffers {
            true => Waiting::Block,
            false => Waiting::BusyPoll,
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.block.wake_fd())
    }

    fn quiesce(&mut self, bus: &mut Bus<'_>) -> bool {
        self.quiesced = true;
        let quiet = |net: &Self| net.sending.in_flight() == 0;
        if !quiet(self) {
            self.block.hurry();
            self.turn_block(bus);
            self.transport.interrupt_driver(bus);
        }
        self.advance(bus);
        if quiet(self) {
            self.transport.forget_translations();
        }
        self.save_changes();
        quiet(self)
    }

    fn resume(&mut self, bus: &mut Bus<'_>) {
        self.quiesced = false;
        // QEMU drops a message that it has not delivered by then.
        if !bus.dma.is_bus_master() {
            self.transport.repeat_interrupts();
        }
        self.advance(bus);
        self.save_changes();
    }

    fn reset(&mut self) {
        // The owner has quiesced the device, and what is being received is in memory of the device.
        if self.sending.in_flight() > 0 {
            self.block.drain();
            self.is_telling = false;
            self.receiving.clear();
        }
        self.sending.clear();
        self.transport.power_on();
        self.end_session();
        self.recovery = false;
        self.quiesced = false;
        self.save();
    }

    fn state_bytes(&self) -> u64 {
        state::SIZE as u64
    }

    fn set_state(&mut self, memory: HostSlice, resume: bool) -> Result<bool, String> {
        let kept = self.keep_in(memory, resume);
        kept.map_err(|error| error.to_string())
    }

    fn detach_state(&mut self) {
        self.transport.state.detach();
    }

    fn problem(&self) -> Option<&str> {
        self.medium.problem()
    }

    fn in_flight(&self) -> Option<(u64, u64)> {
        Some((self.sending.in_flight() as u64, MOST_SENDING.into()))
    }

    fn stats(&self) -> Vec<(&'static str, u64)> {
        let stats = &self.stats;
        vec![
            ("frames_sent", stats.sent),
            ("frames_received", stats.received),
            ("bytes_sent", stats.bytes_sent),
            ("bytes_received", stats.bytes_received),
            ("frames_dropped", stats.dropped),
            ("notifications", stats.notifications),
        ]
    }
}
