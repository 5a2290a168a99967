//! Devices that are killed, and media that fail.

use super::{
    crash,
    failing::{Faults, Watch},
    watch::Id,
    world::{Disk, Driver, Model},
};
use crate::{
    Device,
    block::{BlockQueue, DEPTH, Image},
    virtio::VirtioBlk,
};

impl Driver {
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

impl Model for VirtioBlk {
    type World = Disk;

    fn restart(driver: &mut Driver) {
        crash::after(None);
        driver.kills += 1;
        driver.irq.line = false;
        driver.device = driver.open();
        if let Some(watch) = &driver.watch {
            watch.restarted(&driver.returned());
        }
        let state = driver.state.clone().unwrap();
        driver.device.set_state(state, true).unwrap();
        crash::after(match driver.faults {
            // Else a process might never get as far as the next.
            Some(_) => driver.kill_every.take(),
            None => driver.kill_every,
        });
    }
}
