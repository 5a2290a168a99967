//! Queues in a snapshot, and from one.

use farside_fabric::{Fault, Iova};

use super::{CompletionQueue, Queues, SubmissionQueue};
use crate::{
    Dma,
    nvme::{
        command::{CQE_SIZE, Command},
        doorbells::{DoorbellBuffer, Shadow},
        registers::MAX_QUEUE_ENTRIES,
        saved::{Saved, SavedCq, SavedSq},
    },
    state::{InFlight, StateError, Words},
};

/// Least alignment of a queue.
const PAGE: u64 = 4096;

impl Queues {
    /// Puts the queues into a snapshot.
    pub fn save(&self, saved: &mut Saved) {
        let sqs = std::iter::once(&0).chain(&self.active);
        saved.sqs = sqs
            .filter_map(|&id| {
                let sq = self.sqs[usize::from(id)].as_ref()?;
                Some(SavedSq {
                    id,
                    base: sq.base.get(),
                    entries: sq.entries,
                    cq: sq.cq,
                    shadow: sq.shadow.saved(),
                })
            })
            .collect();
        saved.cqs = self
            .active_cqs
            .iter()
            .filter_map(|&id| {
                let cq = self.cqs[usize::from(id)].as_ref()?;
                Some(SavedCq {
                    id,
                    base: cq.base.get(),
                    entries: cq.entries,
                    vector: cq.vector,
                    shadow: cq.shadow.saved(),
                })
            })
            .collect();
        saved.buffer = self.buffer.as_ref().map(DoorbellBuffer::saved);
    }

    /// Creates the queues of a snapshot, as admin commands would.
    pub fn restore(
        &mut self,
        saved: &Saved,
        words: &[Words],
        (page_size, vectors): (u64, u16),
    ) -> Result<(), StateError> {
        let invalid = StateError::Invalid;
        let word = |id: u16| words.get(usize::from(id)).copied().unwrap_or_default();
        let is_valid = |id: u16, entries: u16, base: u64| {
            let most = if id == 0 { 4096 } else { MAX_QUEUE_ENTRIES };
            (2..=most).contains(&entries.into()) && base.is_multiple_of(PAGE)
        };
        for (n, cq) in saved.cqs.iter().enumerate() {
            let is_new = self
                .cqs
                .get(usize::from(cq.id))
                .is_some_and(Option::is_none);
            if !is_new || (n == 0) != (cq.id == 0) || !is_valid(cq.id, cq.entries, cq.base) {
                return Err(invalid("a completion queue's number, size or address"));
            }
            if cq.vector.is_some_and(|vector| vector >= vectors) {
                return Err(invalid("a completion queue's vector"));
            }
            let Words { posted, head, .. } = word(cq.id);
            let entries = u64::from(cq.entries);
            if head >= entries {
                return Err(invalid("a completion queue's head"));
            }
            let queue = CompletionQueue {
                head: head as u16,
                tail: (posted % entries) as u16,
                phase: (posted / entries).is_multiple_of(2),
                posted,
                shadow: Shadow::restored(cq.shadow),
                ..CompletionQueue::new(Iova::new(cq.base), cq.entries, cq.vector)
            };
            self.cqs[usize::from(cq.id)] = Some(queue);
            self.active_cqs.push(cq.id);
        }
        for (n, sq) in saved.sqs.iter().enumerate() {
            let is_new = self
                .sqs
                .get(usize::from(sq.id))
                .is_some_and(Option::is_none);
            if !is_new || (n == 0) != (sq.id == 0) || !is_valid(sq.id, sq.entries, sq.base) {
                return Err(invalid("a submission queue's number, size or address"));
            }
            let cq = self
                .cqs
                .get_mut(usize::from(sq.cq))
                .and_then(Option::as_mut);
            let Some(cq) = cq.filter(|_| (sq.cq == 0) == (sq.id == 0)) else {
                return Err(invalid("a submission queue's completion queue"));
            };
            cq.users += 1;
            let Words { fetched, tail, .. } = word(sq.id);
            let entries = u64::from(sq.entries);
            if tail >= entries {
                return Err(invalid("a submission queue's tail"));
            }
            let queue = SubmissionQueue {
                head: (fetched % entries) as u16,
                tail: tail as u16,
                fetched,
                shadow: Shadow::restored(sq.shadow),
                ..SubmissionQueue::new(Iova::new(sq.base), sq.entries, sq.cq)
            };
            self.sqs[usize::from(sq.id)] = Some(queue);
            if sq.id != 0 {
                self.active.push(sq.id);
            }
        }
        self.buffer = match saved.buffer {
            Some(buffer)
                if buffer.values.is_multiple_of(PAGE) && buffer.events.is_multiple_of(PAGE) =>
            {
                Some(DoorbellBuffer::restored(buffer, page_size as usize))
            }
            Some(_) => return Err(invalid("the address of the doorbell buffer")),
            None => None,
        };
        Ok(())
    }

    /// Counts the commands that were in flight as fetched, and keeps those that are not done. `is_open` says
    /// which are event requests, for which no completion is reserved.
    pub fn take_in_flight(
        &mut self,
        commands: Vec<InFlight>,
        is_open: impl Fn(&InFlight) -> bool,
    ) -> Result<Vec<InFlight>, StateError> {
        let invalid = StateError::Invalid;
        let mut kept = Vec::new();
        for command in commands {
            let Some(Some(sq)) = self.sqs.get_mut(usize::from(command.queue)) else {
                return Err(invalid("a command in flight is of no queue"));
            };
            let Some(cq) = self.cqs[usize::from(sq.cq)].as_mut() else {
                return Err(invalid("a submission queue's completion queue"));
            };
            let must_replay = self
                .state
                .must_replay(&command, &mut sq.fetched, cq.posted)?;
            sq.head = (sq.fetched % u64::from(sq.entries)) as u16;
            if !must_replay {
                continue;
            }
            if !is_open(&command) {
                sq.in_flight += 1;
                cq.reserved += 1;
            }
            kept.push(command);
        }
        let is_over = |cq: &CompletionQueue| cq.used() + cq.reserved > u32::from(cq.entries) - 1;
        match self.cqs.iter().flatten().any(is_over) {
            true => Err(invalid(
                "more commands in flight than completions have room",
            )),
            false => Ok(kept),
        }
    }

    /// Whether the completion of a command is in guest memory, though it is not recorded as posted. Then it is.
    pub fn was_completed(&mut self, dma: &mut dyn Dma, command: &InFlight) -> Result<bool, Fault> {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(command.queue)) else {
            return Ok(false);
        };
        let Some(cq) = self.cqs[usize::from(sq.cq)].as_mut() else {
            return Ok(false);
        };
        if command.completion != Some(cq.posted) {
            return Ok(false);
        }
        let at = usize::from(cq.tail) * CQE_SIZE;
        // The phase tag first: it was written last.
        let last = cq.ring.load(dma, at + 12)?;
        let queue = cq.ring.load(dma, at + 8)? >> 16;
        let id = Command::from_bytes(&command.command).id();
        let is_it = (last >> 16 & 1 != 0) == cq.phase
            && last & 0xffff == u32::from(id)
            && queue == u32::from(command.queue);
        if !is_it {
            // Else it would count as done once another command is completed with this number.
            self.state.not_completed(command.entry);
            return Ok(false);
        }
        sq.in_flight = sq.in_flight.saturating_sub(1);
        cq.reserved = cq.reserved.saturating_sub(1);
        cq.advance();
        self.state.posted(sq.cq, cq.posted);
        self.state.release(command.entry);
        Ok(true)
    }

    /// Has an interrupt raised for each completion queue: one may have been lost.
    pub fn interrupt_all(&mut self) {
        self.cqs.iter_mut().flatten().for_each(|cq| cq.dirty = true);
    }
}
