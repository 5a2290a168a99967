//! The device's implementation of [`Device`].

use std::os::fd::BorrowedFd;

use farside_fabric::memory::HostSlice;
use farside_pci::Description;

use super::VirtioBlk;
use crate::{Bus, Device, ResizeError, Waiting, block::DEPTH, state, virtio::pci::BAR_SIZE};

impl Device for VirtioBlk {
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
        // Without room, a completion wakes the device; beyond its limits, a timer does.
        let pending = match self.may_take(bus) {
            true => {
                self.transport.enable_notifications(bus)
                    && self.slots.has_room()
                    && self.block.may_take()
            }
            false => self.can_recover(bus),
        };
        self.save_changes();
        !pending && !self.block.is_busy()
    }

    fn waiting(&self) -> Waiting {
        match self.naps > 0 && self.slots.in_flight() == 0 {
            true => Waiting::Nap,
            false => Waiting::BusyPoll,
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.block.wake_fd())
    }

    fn quiesce(&mut self, bus: &mut Bus<'_>) -> bool {
        self.quiesced = true;
        self.block.hurry();
        self.turn_block(bus);
        self.interrupt_driver(bus);
        self.advance(bus);
        let quiet = self.slots.in_flight() == 0;
        if quiet {
            self.transport.forget_translations();
        }
        self.save_changes();
        quiet
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
        // The owner has quiesced the device: this does not block.
        self.block.drain();
        for tag in 0..DEPTH {
            self.block.release(tag);
        }
        self.slots.clear();
        self.transport.power_on();
        self.forget_session();
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

    fn resize(&mut self, size: u64) -> Result<(), ResizeError> {
        if !self.grow(size)? {
            // The driver may have missed the interrupt for a former order.
            self.transport.repeat_config_change();
        }
        self.save_changes();
        Ok(())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.block.sync()
    }

    fn problem(&self) -> Option<&str> {
        self.medium.problem()
    }

    fn in_flight(&self) -> Option<(u64, u64)> {
        Some((self.slots.busy() as u64, DEPTH.into()))
    }

    fn stats(&self) -> Vec<(&'static str, u64)> {
        let stats = &self.stats;
        vec![
            ("requests", stats.requests),
            ("reads", stats.reads),
            ("writes", stats.writes),
            ("bytes_read", stats.bytes_read),
            ("bytes_written", stats.bytes_written),
            ("flushes", stats.flushes),
            ("discards", stats.discards),
            ("zeroes", stats.zeroes),
            ("errors", stats.errors),
            ("notifications", stats.notifications),
        ]
    }
}
