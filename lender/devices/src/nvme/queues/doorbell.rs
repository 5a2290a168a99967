//! Updates of tails and heads by the guest: through doorbell registers, or through shadow
//! doorbells in memory (NVM Express 1.4, 7.13).

use std::sync::atomic::{Ordering, fence};

use farside_fabric::{Fault, memory::HostSlice};

use super::{DoorbellError, Queues, distance};
use crate::{
    Dma,
    nvme::doorbells::{Doorbell, DoorbellBuffer, MappedDoorbells, Shadow},
};

impl Queues {
    /// Sets the memory of the doorbells, which the guest writes to without a trap.
    pub fn set_mapped(&mut self, memory: Option<HostSlice>) {
        self.mapped = memory.map(MappedDoorbells);
    }

    /// Whether the guest rings without a trap, and without any other notification.
    pub fn are_mapped(&self) -> bool {
        self.mapped.is_some()
    }

    /// Sets the doorbell of a new queue to 0: the page may still have that of an earlier queue of this number.
    pub(super) fn clear_doorbell(&self, doorbell: Doorbell) {
        if let Some(mapped) = &self.mapped {
            mapped.clear(doorbell);
        }
    }

    /// Enables shadow doorbells for all I/O queues. Existing queues may already be in use
    /// through their registers.
    pub fn set_buffer(
        &mut self,
        dma: &mut dyn Dma,
        mut buffer: DoorbellBuffer,
    ) -> Result<(), Fault> {
        for &id in &self.active {
            if let Some(sq) = &mut self.sqs[usize::from(id)] {
                let doorbell = Doorbell::SubmissionTail(id);
                buffer.watch(dma, doorbell, &mut sq.shadow, sq.tail)?;
            }
        }
        for &id in self.active_cqs.iter().filter(|id| **id != 0) {
            if let Some(cq) = &mut self.cqs[usize::from(id)] {
                let doorbell = Doorbell::CompletionHead(id);
                buffer.watch(dma, doorbell, &mut cq.shadow, cq.head)?;
            }
        }
        self.buffer = Some(buffer);
        self.changed = true;
        Ok(())
    }

    /// Whether what a snapshot has of the doorbells has changed since the last call.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed) | self.buffer.as_mut().is_some_and(|it| it.take_changed())
    }

    /// Handles a write to a doorbell register.
    pub fn ring(&mut self, dma: &mut dyn Dma, doorbell: Doorbell, value: u32) -> Result<(), Fault> {
        // If it does not count, the value in memory is at least as recent.
        let counts = |buffer: &Option<DoorbellBuffer>, id: u16, shadow: &Shadow| {
            let buffer = buffer.as_ref().filter(|_| id != 0);
            buffer.is_none_or(|buffer| buffer.register_counts(shadow))
        };
        let (outcome, shadow) = match doorbell {
            Doorbell::SubmissionTail(id) => match self.sqs.get_mut(usize::from(id)) {
                Some(Some(sq)) => {
                    self.changed |= sq.shadow.rung();
                    let outcome = match counts(&self.buffer, id, &sq.shadow) {
                        true => sq.set_tail(value),
                        false => Ok(()),
                    };
                    self.state.tail(id, sq.tail);
                    (outcome, Some(&mut sq.shadow))
                }
                _ => (Err(DoorbellError::InvalidRegister), None),
            },
            Doorbell::CompletionHead(id) => match self.cqs.get_mut(usize::from(id)) {
                Some(Some(cq)) => {
                    self.changed |= cq.shadow.rung();
                    let outcome = match counts(&self.buffer, id, &cq.shadow) {
                        true => cq.set_head(value),
                        false => Ok(()),
                    };
                    self.state.head(id, cq.head);
                    (outcome, Some(&mut cq.shadow))
                }
                _ => (Err(DoorbellError::InvalidRegister), None),
            },
        };
        let looked = match (&mut self.buffer, shadow) {
            (Some(buffer), Some(shadow)) if dma.is_bus_master() => {
                buffer.look_for_first_write(dma, doorbell, shadow)
            }
            _ => Ok(()),
        };
        if let Err(error) = outcome {
            self.report(error);
        }
        looked
    }

    fn report(&mut self, error: DoorbellError) {
        // Bounded: further events of this type are dropped anyway until the guest has
        // read the log for the first.
        if self.errors.len() < 8 {
            self.errors.push(error);
        }
    }

    /// Whether there are unreported doorbell errors.
    pub fn has_errors(&self) -> bool {
        !self.errors.is_empty()
    }

    /// Removes an unreported doorbell error.
    pub fn take_error(&mut self) -> Option<DoorbellError> {
        self.errors.pop()
    }

    /// Loads the tail of a submission queue from memory, if it is there. Of a shadow doorbell it keeps the event
    /// index behind the tail, so that the guest does not ring while the controller polls.
    pub fn refresh_tail(&mut self, dma: &mut dyn Dma, id: u16) -> Result<(), Fault> {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(id)) else {
            return Ok(());
        };
        let doorbell = Doorbell::SubmissionTail(id);
        let observed = match (&self.mapped, &mut self.buffer) {
            (Some(mapped), _) => mapped.load(doorbell),
            (None, Some(buffer)) if id != 0 => buffer.observe(dma, doorbell, &mut sq.shadow)?,
            _ => return Ok(()),
        };
        self.shadow_polls += 1;
        if let Some(value) = observed
            && value != u32::from(sq.tail)
        {
            match sq.set_tail(value) {
                Ok(()) => self.state.tail(id, sq.tail),
                Err(_) if sq.shadow.refuse(value) => {
                    self.errors.truncate(7);
                    self.errors.push(DoorbellError::InvalidValue);
                }
                Err(_) => {}
            }
        }
        let Some(buffer) = &mut self.buffer else {
            return Ok(());
        };
        // The value just behind the tail is the last that the guest's tail reaches.
        // Updated once per half ring, so that the cache line mostly stays with the guest.
        let stale = match sq.shadow.published() {
            None => true,
            Some(index) => distance(index, sq.tail, sq.entries) > u32::from(sq.entries) / 2,
        };
        if stale {
            let behind = if sq.tail == 0 {
                sq.entries - 1
            } else {
                sq.tail - 1
            };
            buffer.publish(dma, doorbell, &mut sq.shadow, behind)?;
        }
        Ok(())
    }

    /// Loads the head of a completion queue from memory, if it is there.
    pub fn refresh_head(&mut self, dma: &mut dyn Dma, id: u16) -> Result<(), Fault> {
        let Some(Some(cq)) = self.cqs.get_mut(usize::from(id)) else {
            return Ok(());
        };
        let doorbell = Doorbell::CompletionHead(id);
        let observed = match (&self.mapped, &mut self.buffer) {
            (Some(mapped), _) => mapped.load(doorbell),
            (None, Some(buffer)) if id != 0 => buffer.observe(dma, doorbell, &mut cq.shadow)?,
            _ => return Ok(()),
        };
        self.shadow_polls += 1;
        if let Some(value) = observed
            && value != u32::from(cq.head)
        {
            match cq.set_head(value) {
                Ok(()) => self.state.head(id, cq.head),
                Err(_) if cq.shadow.refuse(value) => self.report(DoorbellError::InvalidValue),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Publishes event indexes so that the guest rings for new commands, for room in a
    /// full completion queue and, with `line`, for consumed completions that assert the
    /// INTx line. Ends with a full fence, which orders it before the caller's loads.
    pub fn publish_events(&mut self, dma: &mut dyn Dma, line: bool) -> Result<(), Fault> {
        if self.buffer.is_none() {
            return Ok(());
        }
        for index in 0..self.active.len() {
            let id = self.active[index];
            let full = self.wants_fetch(id).filter(|&cq| !self.has_room(cq));
            if let (Some(buffer), Some(sq)) = (&mut self.buffer, &mut self.sqs[usize::from(id)]) {
                let doorbell = Doorbell::SubmissionTail(id);
                buffer.publish(dma, doorbell, &mut sq.shadow, sq.tail)?;
            }
            if let Some(cq) = full {
                self.publish_head(dma, cq)?;
            }
        }
        if line && self.line {
            for index in 0..self.active_cqs.len() {
                let id = self.active_cqs[index];
                if self.cqs[usize::from(id)]
                    .as_ref()
                    .is_some_and(|cq| cq.asserts(0))
                {
                    self.publish_head(dma, id)?;
                }
            }
        }
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn publish_head(&mut self, dma: &mut dyn Dma, id: u16) -> Result<(), Fault> {
        if id != 0
            && let (Some(buffer), Some(cq)) = (&mut self.buffer, &mut self.cqs[usize::from(id)])
        {
            let doorbell = Doorbell::CompletionHead(id);
            buffer.publish(dma, doorbell, &mut cq.shadow, cq.head)?;
        }
        Ok(())
    }
}
