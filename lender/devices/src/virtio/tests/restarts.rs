//! Devices that are killed, and media that fail.

use farside_fabric::memory::SharedMemory;

use super::{
    crash,
    failing::{Faults, Watch},
    watch::Id,
    world::Driver,
};
use crate::{
    Device,
    block::{BlockQueue, DEPTH, Image},
    virtio::VirtioBlk,
};

impl Driver {
    /// Has a state outlive the device.
    pub fn keep_state(&mut self) {
        let size = self.device.state_bytes() as usize;
        let memory = SharedMemory::anonymous(size).unwrap();
        let state = memory.slice(0, size).unwrap();
        assert!(!self.device.set_state(state.clone(), false).unwrap());
        self.state = Some(state);
    }

    /// Has a medium that fails, and a watch on it.
    pub fn set_faults(&mut self, faults: Faults) -> Watch {
        let watch = Watch::default();
        self.faults = Some(faults);
        self.watch = Some(watch.clone());
        let watching = watch.clone();
        self.memory.on_translate = Some(Box::new(move |_| {
            crash::point();
            watching.dma();
        }));
        self.device = self.open();
        watch
    }

    pub fn faults(&self) -> Faults {
        self.faults.unwrap()
    }

    fn open(&self) -> VirtioBlk {
        let lent = &self.lent;
        let file = lent.file.try_clone().unwrap();
        let (Some(faults), Some(watch)) = (self.faults, self.watch.clone()) else {
            let image = Image { file, ..*lent };
            return VirtioBlk::with_image("disk0", &self.config, image).unwrap();
        };
        let faults = Faults {
            seed: faults.seed ^ u64::from(self.kills) << 32,
            ..faults
        };
        let block = BlockQueue::faulty(file, faults, watch, DEPTH);
        let medium = (lent.size, lent.punches_holes);
        VirtioBlk::with_block("disk0", &self.config, block, medium).unwrap()
    }

    /// Starts another device in place of one that was killed.
    pub fn restart(&mut self) {
        crash::after(None);
        self.kills += 1;
        self.irq.line = false;
        self.device = self.open();
        if let Some(watch) = &self.watch {
            watch.restarted(&self.returned());
        }
        let state = self.state.clone().unwrap();
        self.device.set_state(state, true).unwrap();
        crash::after(match self.faults {
            // Else a process might never get as far as the next.
            Some(_) => self.kill_every.take(),
            None => self.kill_every,
        });
    }

    /// The requests that the guest can see to be returned, and has not taken.
    fn returned(&self) -> Vec<Id> {
        let mut returned = Vec::new();
        for (index, queue) in (0..).zip(&self.queues) {
            let mut seen = queue.seen;
            while let Some((head, _)) = self.look(queue, seen) {
                returned.push((index, head));
                seen = seen.wrapping_add(1);
            }
        }
        returned
    }
}
