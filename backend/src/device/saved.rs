//! What of a device the next backend finds, and goes on with.

use farside_error_chain::Chain;
use farside_guest_layout::Gpa;
use farside_keeper::Journal;

use super::{Device, State};
use crate::records::{Saved, SavedDescription};

/// With more mappings, as of a guest behind a vIOMMU that maps each buffer, a snapshot for each change would slow it down.
const MOST_MAPPINGS: usize = 1024;

impl Device {
    /// The journal for the next client, and the state that this one finds.
    pub(crate) fn journal(&mut self) -> std::io::Result<Journal> {
        let journal = self.records.journal()?;
        self.negotiated = None;
        self.records.is_dirty = true;
        self.save();
        Ok(journal)
    }

    /// Has the next backend find the present state, from the next answer on.
    pub(super) fn save(&mut self) {
        if !(self.records.is_dirty && self.records.are_kept()) {
            return;
        }
        if self.memory.len() > MOST_MAPPINGS {
            if self.records.leave_nothing()
                && let Some(held_back) = self.line_limits.records.allow()
            {
                log::warn!(
                    "{}: over {MOST_MAPPINGS} mappings of guest memory: if the backend is killed while there are so many, the VM loses the device{held_back}",
                    self.name()
                );
            }
            return;
        }
        let setup = self.setup();
        let (described, rom) = SavedDescription::of(&self.described);
        let saved = Saved {
            device: self.settings.device.to_string(),
            lender: self.settings.lender.to_string(),
            described,
            transport: self.settings.transport,
            negotiated: self.negotiated,
            config: self.config.registers().to_vec(),
            memory: Saved::mappings(&setup.memory),
            refused: Saved::refused(&setup.memory),
            irqs: Saved::irqs(&setup.irqs),
            bars: Saved::files(&setup.bar_files),
            state: Saved::files(&setup.state).first().copied(),
            absent: self.absent,
            unplugged: self.unplugged,
            ram_taken: self.ram_taken,
            rom,
            peer_bars: Saved::peer_bars(&setup.memory),
            placed: self
                .placed
                .map(|placed| placed.map_or(0, Gpa::get))
                .to_vec(),
        };
        if let Err(error) = self.records.stage(&saved, setup)
            && let Some(held_back) = self.line_limits.records.allow()
        {
            log::error!(
                "{}: if the backend is killed now, the VM loses the device: {}{held_back}",
                self.name(),
                Chain(&error)
            );
        }
    }

    /// Goes on from what the process before has left.
    pub(super) fn take_over(&mut self, saved: &Saved) {
        self.negotiated = saved.negotiated;
        self.absent = saved.absent;
        self.unplugged = saved.unplugged;
        self.ram_taken = saved.ram_taken;
        for (placed, saved) in self.placed.iter_mut().zip(&saved.placed) {
            *placed = (*saved != 0).then(|| Gpa::new(*saved));
        }
        self.list_bars(0..6);
        let setup = self.setup();
        self.records.took_over(setup);
        if self.state == State::Leased {
            self.goes_on = true;
            self.begin_outage();
            self.is_taken_over = true;
        }
        log::info!(
            "{}: taken over from the process before, {}",
            self.name(),
            match self.state {
                State::Leased => "with its lease",
                State::Lost => "without its lease: its registers read as all ones",
                _ => "without a lease",
            }
        );
    }
}
