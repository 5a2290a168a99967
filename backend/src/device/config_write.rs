//! Writes to configuration space and their effects.

use farside_backend_api::BarAddress;
use farside_config_space::{Edge, Effect, GuestBarAddress, Staged};

use super::{
    Device,
    pending::{RegisterRead, Task},
};
use crate::borrow::{Event, State, worker::Job};

impl Device {
    /// Stages a write, and performs its effects before it becomes visible.
    pub(super) fn write_config(&mut self, offset: u64, data: &[u8]) {
        let staged = self.config.stage(offset, data);
        let mut tasks = Vec::new();
        if staged.effects().reset().is_some() {
            tasks.push(Task::Event(Event::FunctionReset));
        } else {
            match staged.dma() {
                Edge::Rising => tasks.push(Task::Event(Event::EnableBusMaster)),
                Edge::Falling => tasks.push(Task::Event(Event::DisableBusMaster)),
                Edge::Steady => {}
            }
        }
        for effect in staged.effects().iter() {
            if let Effect::CommandChanged { intx_disable, .. } = effect
                && intx_disable != Edge::Steady
            {
                let disable = Job::SetIntxDisable(intx_disable == Edge::Rising);
                tasks.push(Task::Work(disable));
            }
        }
        for &(piece, value) in staged.forwarded() {
            tasks.push(Task::Read(RegisterRead::ConfigWrite { piece, value }));
        }
        tasks.push(Task::Commit(Box::new(staged)));
        for task in tasks.into_iter().rev() {
            self.pending.then.push_front(task);
        }
    }

    /// Commits a write, without the bus-master bit if that was refused.
    pub(super) fn commit_config(&mut self, mut staged: Staged) {
        if staged.dma() == Edge::Rising && self.state != State::Ready {
            if let Some(held_back) = self.line_limits.bus_master.allow() {
                log::error!(
                    "{}: bus-master enable is refused; the device cannot DMA{held_back}",
                    self.name()
                );
            }
            staged.refuse_bus_master();
        }
        let effects = self.config.commit(staged);
        if effects.reset().is_none() {
            let moved = effects.iter().filter_map(|effect| match effect {
                Effect::BarMoved(bar) => Some(bar),
                _ => None,
            });
            self.list_bars(moved);
        }
        for effect in effects {
            match effect {
                Effect::BarMoved(bar) => match self.config.bar_address(bar) {
                    Some(address) => log::debug!("{}: BAR {bar} at {address:?}", self.name()),
                    None => log::debug!("{}: BAR {bar} off", self.name()),
                },
                // Also reset here: interrupts from the lender may still be in flight.
                Effect::Reset(_) => self.vectors.reset(),
                _ => {}
            }
        }
        self.vectors.set_intx_disabled(self.config.intx_disabled());
    }

    /// The addresses that the guest assigned to the memory BARs.
    pub(super) fn bar_addresses(&self) -> Vec<BarAddress> {
        (0..6)
            .filter_map(|bar| {
                let GuestBarAddress::Memory(gpa) = self.config.bar_address(bar)? else {
                    return None;
                };
                let size = self
                    .described
                    .description
                    .bars
                    .get(usize::from(bar))?
                    .as_ref()?
                    .size;
                Some(BarAddress { bar, gpa, size })
            })
            .collect()
    }
}
