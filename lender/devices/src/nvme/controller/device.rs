//! The controller's implementation of [`Device`].

use std::{os::fd::BorrowedFd, time::Duration};

use farside_fabric::memory::HostSlice;
use farside_pci::Description;

use super::{Nvme, power_on_table};
use crate::{
    Bus, Device, ResizeError,
    nvme::{
        cmb::{Cmb, OwnFirst},
        registers::{BAR_SIZE, Registers},
        slots::{IO_SLOTS, RESERVED_SLOTS},
    },
    state,
};

impl Nvme {
    /// Acts on the bus, where addresses of the controller memory buffer are the controller's own.
    fn on<R>(&mut self, bus: &mut Bus<'_>, act: impl FnOnce(&mut Self, &mut Bus<'_>) -> R) -> R {
        let Some(own) = self.cmb.as_ref().and_then(Cmb::own) else {
            return act(self, bus);
        };
        let dma = &mut OwnFirst { own, bus: bus.dma };
        act(self, &mut Bus { dma, irq: bus.irq })
    }
}

impl Device for Nvme {
    fn description(&self) -> &Description {
        &self.description
    }

    fn bar_read(&mut self, bar: u8, at: u64, data: &mut [u8], bus: &mut Bus<'_>) {
        data.fill(0);
        if bar != 0 || at >= BAR_SIZE {
            return;
        }
        // Naturally aligned: inside one doubleword, or two whole ones.
        let mut at = at;
        for part in data.chunks_mut(4) {
            let value = self.read_dword(at & !3, bus).to_le_bytes();
            let from = (at & 3) as usize;
            let len = part.len().min(4 - from);
            part[..len].copy_from_slice(&value[from..from + len]);
            at += 4;
        }
    }

    fn bar_write(&mut self, bar: u8, at: u64, data: &[u8], bus: &mut Bus<'_>) {
        // No register supports narrower or unaligned accesses (3.1).
        if bar != 0 || at >= BAR_SIZE || at & 3 != 0 {
            return;
        }
        self.on(bus, |nvme, bus| {
            let mut at = at;
            for part in data.chunks_exact(4) {
                let value = u32::from_le_bytes([part[0], part[1], part[2], part[3]]);
                nvme.write_dword(at, value, bus);
                at += 4;
            }
            nvme.save_changes();
        });
    }

    fn set_bar_memory(&mut self, bar: u8, _area: usize, memory: Option<HostSlice>) {
        match (bar, &mut self.cmb) {
            (0, _) => self.queues.set_mapped(memory),
            (_, Some(cmb)) => cmb.set_memory(memory),
            _ => {}
        }
    }

    fn poll(&mut self, bus: &mut Bus<'_>) -> bool {
        self.on(bus, Self::run)
    }

    fn enable_notifications(&mut self, bus: &mut Bus<'_>) -> bool {
        let pending = self.on(bus, Self::enable_notifications);
        let pending = pending.unwrap_or_else(|fault| {
            self.fatal(fault);
            false
        });
        !pending && !self.block.is_busy()
    }

    fn is_polled(&self) -> bool {
        // Else it waits for a register write, or a request.
        let is_mapped = self.queues.are_mapped();
        // Other controllers wake nobody.
        self.is_aborting() || is_mapped && (self.is_running() || self.queues.asserts_line())
    }

    fn looks_again(&self) -> Option<Duration> {
        self.looks_for_notifications()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.block.wake_fd())
    }

    fn quiesce(&mut self, bus: &mut Bus<'_>) -> bool {
        self.quiesced = true;
        self.block.hurry();
        self.on(bus, |nvme, bus| {
            nvme.turn_block(bus);
            nvme.advance(bus);
            nvme.interrupt_driver(bus);
        });
        let quiet = self.slots.busy() == 0;
        self.rest();
        if quiet {
            self.queues.forget_translations();
        }
        self.save_changes();
        quiet
    }

    fn resume(&mut self, bus: &mut Bus<'_>) {
        self.quiesced = false;
        // QEMU drops a message that it has not delivered by then.
        if !bus.dma.is_bus_master() {
            self.queues.interrupt_all();
        }
        self.on(bus, Self::advance);
        self.save_changes();
    }

    fn reset(&mut self) {
        // The owner has quiesced the device: this does not block.
        self.block.drain();
        for tag in 0..IO_SLOTS + RESERVED_SLOTS {
            self.block.release(tag);
        }
        self.slots.clear();
        self.rest();
        self.forget_session();
        self.forget_abort();
        self.queues.forget_line();
        self.registers = Registers::default();
        if let Some(cmb) = &mut self.cmb {
            cmb.set_control(0);
        }
        self.msix_table = power_on_table(self.vectors());
        self.draining = false;
        self.shutdown_flush = false;
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
        self.queues.state.detach();
    }

    fn resize(&mut self, size: u64) -> Result<(), ResizeError> {
        self.grow(size)?;
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
        let most = u64::from(IO_SLOTS + RESERVED_SLOTS);
        Some((self.slots.busy() as u64, most))
    }

    fn stats(&self) -> Vec<(&'static str, u64)> {
        let stats = &self.stats;
        vec![
            ("admin_commands", stats.admin_commands),
            ("io_commands", stats.io_commands),
            ("reads", stats.reads),
            ("writes", stats.writes),
            ("bytes_read", stats.bytes_read),
            ("bytes_written", stats.bytes_written),
            ("flushes", stats.flushes),
            ("errors", stats.errors),
            ("media_errors", self.logs.media_errors()),
            ("doorbell_traps", stats.doorbell_traps),
            ("shadow_polls", self.queues.shadow_polls()),
        ]
    }
}
