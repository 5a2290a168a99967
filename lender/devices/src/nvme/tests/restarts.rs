//! Controllers that are killed, and media that fail.

use farside_fabric::memory::SharedMemory;

use super::{
    crash,
    failing::{Faults, Watch},
    reservations,
    watch::Id,
    world::{Driver, clone},
};
use crate::{
    Device,
    block::BlockQueue,
    nvme::{
        Nvme,
        slots::{IO_SLOTS, RESERVED_SLOTS},
    },
};

impl Driver {
    /// Has a state outlive the controller.
    pub fn keep_state(&mut self) {
        let size = self.nvme.state_bytes() as usize;
        let memory = SharedMemory::anonymous(size).unwrap();
        let state = memory.slice(0, size).unwrap();
        assert!(!self.nvme.set_state(state.clone(), false).unwrap());
        self.state = Some(state);
    }

    /// Has a medium that fails, and a watch on the controller.
    pub fn set_faults(&mut self, faults: Faults) -> Watch {
        let watch = Watch::default();
        self.faults = Some(faults);
        self.watch = Some(watch.clone());
        let watching = watch.clone();
        self.memory.on_translate = Some(Box::new(move |iova| {
            crash::point();
            watching.translate(iova.get());
        }));
        self.nvme = self.open();
        watch
    }

    pub fn faults(&self) -> Faults {
        self.faults.unwrap()
    }

    fn open(&self) -> Nvme {
        let image = clone(&self.lent);
        let (Some(faults), Some(watch)) = (self.faults, self.watch.clone()) else {
            let nvme = Nvme::with_image("disk0", &self.config, image).unwrap();
            return match self.share {
                Some(share) => reservations::share(nvme, &self.config, share),
                None => nvme,
            };
        };
        let depth = IO_SLOTS + RESERVED_SLOTS;
        let faults = Faults {
            seed: faults.seed ^ u64::from(self.kills) << 32,
            ..faults
        };
        let block = BlockQueue::faulty(image.file, faults, watch, depth);
        let medium = (image.size, image.punches_holes);
        Nvme::with_block("disk0", &self.config, block, medium).unwrap()
    }

    /// Starts another controller in place of one that was killed.
    pub fn restart(&mut self) {
        crash::after(None);
        self.kills += 1;
        if let Some(act) = &mut self.while_dead {
            act();
        }
        self.irq.line = false;
        self.nvme = self.open();
        self.nvme.set_bar_memory(0, 0, self.mapped.clone());
        if let Some(watch) = &self.watch {
            watch.restarted(&self.posted());
        }
        let state = self.state.clone().unwrap();
        // As a lease begins.
        self.nvme.reset();
        self.nvme.set_state(state, true).unwrap();
        crash::after(match self.faults {
            // Else a process might never get as far as the next.
            Some(_) => self.kill_every.take(),
            None => self.kill_every,
        });
    }

    /// The completions that the guest can see, and has not taken.
    fn posted(&self) -> Vec<Id> {
        let mut posted = Vec::new();
        for pair in &self.pairs {
            let mut pair = *pair;
            while let Some(cqe) = self.look(&mut pair) {
                posted.push((cqe.sq_id, cqe.id));
            }
        }
        posted
    }
}
