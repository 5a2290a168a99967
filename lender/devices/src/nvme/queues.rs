//! Submission and completion queues (NVM Express 1.4, 4.1).
//!
//! Fetching a command reserves an entry of its completion queue; without a free entry no
//! command is fetched. So a completion never waits, and a guest that does not consume
//! its completions is not served and uses no memory.

mod doorbell;
mod saved;

use farside_fabric::{Access, Fault, Iova};

use super::{
    command::{CQE_SIZE, Command, Completion, SQE_SIZE},
    doorbells::{Doorbell, DoorbellBuffer, MappedDoorbells, Shadow},
    ring::GuestRange,
    saved::Saved,
    status::Status,
};
use crate::{
    Dma, Interrupts,
    state::{Entry, State},
};

/// A submission queue.
#[derive(Debug)]
pub struct SubmissionQueue {
    /// The completion queue it posts to.
    pub cq: u16,
    base: Iova,
    entries: u16,
    head: u16,
    tail: u16,
    /// Commands fetched in all.
    fetched: u64,
    /// Commands fetched and not completed, without event requests.
    in_flight: u32,
    /// The Delete command that waits for the queue's commands.
    deletion: Option<(u16, Entry)>,
    ring: GuestRange,
    shadow: Shadow,
}

impl SubmissionQueue {
    /// A queue of `entries` (2 to 65,535) at `base`.
    pub fn new(base: Iova, entries: u16, cq: u16) -> Self {
        Self {
            cq,
            base,
            entries,
            head: 0,
            tail: 0,
            fetched: 0,
            in_flight: 0,
            deletion: None,
            ring: GuestRange::new(base, usize::from(entries) * SQE_SIZE, Access::Read),
            shadow: Shadow::default(),
        }
    }

    /// Moves the tail. Fails if `value` is out of range.
    fn set_tail(&mut self, value: u32) -> Result<(), DoorbellError> {
        match u16::try_from(value) {
            Ok(tail) if tail < self.entries => {
                self.tail = tail;
                Ok(())
            }
            _ => Err(DoorbellError::InvalidValue),
        }
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct CompletionQueue {
    base: Iova,
    entries: u16,
    /// The guest has consumed the entries before it.
    head: u16,
    tail: u16,
    phase: bool,
    /// Completions posted in all.
    posted: u64,
    /// Entries reserved for commands in flight.
    reserved: u32,
    /// Number of submission queues that post to it.
    users: u16,
    /// The interrupt vector; `None` when interrupts are disabled (IEN).
    vector: Option<u16>,
    /// Completions were posted since the last interrupt.
    dirty: bool,
    ring: GuestRange,
    shadow: Shadow,
}

impl CompletionQueue {
    /// A queue of `entries` (2 to 65,535) at `base`.
    pub fn new(base: Iova, entries: u16, vector: Option<u16>) -> Self {
        Self {
            base,
            entries,
            head: 0,
            tail: 0,
            phase: true,
            posted: 0,
            reserved: 0,
            users: 0,
            vector,
            dirty: false,
            ring: GuestRange::new(base, usize::from(entries) * CQE_SIZE, Access::Write),
            shadow: Shadow::default(),
        }
    }

    /// Counts a completion that is posted.
    fn advance(&mut self) {
        self.posted += 1;
        self.tail = next(self.tail, self.entries);
        if self.tail == 0 {
            self.phase = !self.phase;
        }
        self.dirty = true;
    }

    /// Entries posted and not consumed.
    fn used(&self) -> u32 {
        distance(self.head, self.tail, self.entries)
    }

    /// Whether another entry can be reserved.
    fn has_room(&self) -> bool {
        self.used() + self.reserved < u32::from(self.entries) - 1
    }

    /// Moves the head. Fails if `value` is out of range or beyond the posted entries.
    fn set_head(&mut self, value: u32) -> Result<(), DoorbellError> {
        match u16::try_from(value) {
            Ok(head)
                if head < self.entries
                    && distance(self.head, head, self.entries) <= self.used() =>
            {
                self.head = head;
                Ok(())
            }
            _ => Err(DoorbellError::InvalidValue),
        }
    }

    fn asserts(&self, mask: u32) -> bool {
        let Some(vector) = self.vector else {
            return false;
        };
        let masked = vector < 32 && mask >> vector & 1 != 0;
        self.head != self.tail && !masked
    }
}

/// Steps from `from` to `to` in a ring.
fn distance(from: u16, to: u16, entries: u16) -> u32 {
    let (from, to) = (u32::from(from), u32::from(to));
    if to >= from {
        to - from
    } else {
        to + u32::from(entries) - from
    }
}

fn next(index: u16, entries: u16) -> u16 {
    if index + 1 == entries { 0 } else { index + 1 }
}

/// An invalid doorbell write (asynchronous error events, figure 148).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoorbellError {
    /// The queue does not exist.
    InvalidRegister,
    /// The value is invalid for the queue.
    InvalidValue,
}

/// All queues of a controller; number 0 is the admin pair.
#[derive(Debug)]
pub struct Queues {
    sqs: Vec<Option<SubmissionQueue>>,
    cqs: Vec<Option<CompletionQueue>>,
    /// Existing submission queues, without the admin queue.
    active: Vec<u16>,
    /// Existing completion queues.
    active_cqs: Vec<u16>,
    buffer: Option<DoorbellBuffer>,
    /// Of a borrowed controller whose doorbells are mapped.
    mapped: Option<MappedDoorbells>,
    errors: Vec<DoorbellError>,
    shadow_polls: u64,
    line: bool,
    /// Where this outlives the process.
    pub state: State<Saved>,
    /// What a snapshot has of the doorbells has changed.
    changed: bool,
}

impl Queues {
    /// Room for the admin pair and `pairs` I/O pairs.
    pub fn new(pairs: u16) -> Self {
        let count = usize::from(pairs) + 1;
        Self {
            sqs: (0..count).map(|_| None).collect(),
            cqs: (0..count).map(|_| None).collect(),
            active: Vec::with_capacity(count),
            active_cqs: Vec::with_capacity(count),
            buffer: None,
            mapped: None,
            errors: Vec::new(),
            shadow_polls: 0,
            line: false,
            state: State::default(),
            changed: false,
        }
    }

    /// Deletes all queues, as a reset does.
    pub fn clear(&mut self) {
        self.sqs.iter_mut().for_each(|sq| *sq = None);
        self.cqs.iter_mut().for_each(|cq| *cq = None);
        self.active.clear();
        self.active_cqs.clear();
        self.buffer = None;
        self.errors.clear();
    }

    /// Whether the INTx line is asserted.
    pub fn asserts_line(&self) -> bool {
        self.line
    }

    /// Resets the stored level of the INTx line: a function reset has deasserted it.
    pub fn forget_line(&mut self) {
        self.line = false;
    }

    /// Drops all translations, as a quiesce requires.
    pub fn forget_translations(&mut self) {
        self.sqs
            .iter_mut()
            .flatten()
            .for_each(|sq| sq.ring.forget());
        self.cqs
            .iter_mut()
            .flatten()
            .for_each(|cq| cq.ring.forget());
        if let Some(buffer) = &mut self.buffer {
            buffer.forget();
        }
    }

    /// Whether any I/O queue exists.
    pub fn has_io_queues(&self) -> bool {
        self.active_cqs.iter().any(|&id| id != 0)
    }

    /// The existing I/O submission queue number `index`.
    pub fn io_queue(&self, index: usize) -> Option<u16> {
        self.active.get(index).copied()
    }

    /// Number of existing I/O submission queues.
    pub fn io_queues(&self) -> usize {
        self.active.len()
    }

    /// Loads of doorbells in memory since power-on.
    pub fn shadow_polls(&self) -> u64 {
        self.shadow_polls
    }

    /// Whether submission queue `id` exists.
    pub fn has_sq(&self, id: u16) -> bool {
        self.sqs.get(usize::from(id)).is_some_and(Option::is_some)
    }

    /// Installs the admin pair.
    pub fn create_admin(&mut self, sq: SubmissionQueue, mut cq: CompletionQueue) {
        cq.users = 1;
        self.state.new_sq(0);
        self.state.new_cq(0);
        self.clear_doorbell(Doorbell::SubmissionTail(0));
        self.clear_doorbell(Doorbell::CompletionHead(0));
        self.sqs[0] = Some(sq);
        self.cqs[0] = Some(cq);
        self.active_cqs.push(0);
    }

    /// Checks that `id` is a valid I/O queue number without a queue.
    fn unused<T>(queues: &[Option<T>], id: u16) -> Result<usize, Status> {
        match queues.get(usize::from(id)) {
            Some(None) if id != 0 => Ok(usize::from(id)),
            _ => Err(Status::INVALID_QUEUE_ID),
        }
    }

    /// Checks the number of a completion queue to be created (5.3).
    pub fn check_new_cq(&self, id: u16) -> Result<(), Status> {
        Self::unused(&self.cqs, id).map(drop)
    }

    /// Checks the numbers of a submission queue to be created and of its
    /// completion queue (5.4).
    pub fn check_new_sq(&self, id: u16, cq: u16) -> Result<(), Status> {
        Self::unused(&self.sqs, id)?;
        match self.cqs.get(usize::from(cq)) {
            // 0 and out-of-range identifiers are an invalid queue identifier; a valid one
            // without a queue is an invalid completion queue (5.4, CQID).
            _ if cq == 0 => Err(Status::INVALID_QUEUE_ID),
            None => Err(Status::INVALID_QUEUE_ID),
            Some(None) => Err(Status::INVALID_CQ),
            Some(Some(_)) => Ok(()),
        }
    }

    /// Adds an I/O completion queue.
    pub fn create_cq(
        &mut self,
        dma: &mut dyn Dma,
        id: u16,
        mut cq: CompletionQueue,
    ) -> Result<(), Fault> {
        if let Some(buffer) = &mut self.buffer {
            let doorbell = Doorbell::CompletionHead(id);
            cq.shadow = Shadow::for_new_queue(buffer.load(dma, doorbell)?);
            // The head is loaded only rarely. The guest must ring for its first move,
            // so that the value is not mistaken for the stale one.
            buffer.publish(dma, doorbell, &mut cq.shadow, 0)?;
        }
        self.clear_doorbell(Doorbell::CompletionHead(id));
        self.state.new_cq(id);
        self.cqs[usize::from(id)] = Some(cq);
        self.active_cqs.push(id);
        Ok(())
    }

    /// Adds an I/O submission queue whose numbers were checked.
    pub fn create_sq(
        &mut self,
        dma: &mut dyn Dma,
        id: u16,
        mut sq: SubmissionQueue,
    ) -> Result<(), Fault> {
        if let Some(buffer) = &mut self.buffer {
            sq.shadow = Shadow::for_new_queue(buffer.load(dma, Doorbell::SubmissionTail(id))?);
        }
        if let Some(cq) = &mut self.cqs[usize::from(sq.cq)] {
            cq.users += 1;
        }
        self.clear_doorbell(Doorbell::SubmissionTail(id));
        self.state.new_sq(id);
        self.sqs[usize::from(id)] = Some(sq);
        self.active.push(id);
        Ok(())
    }

    /// Removes a completion queue that no submission queue uses (5.5).
    pub fn delete_cq(&mut self, id: u16) -> Result<(), Status> {
        match self.cqs.get(usize::from(id)) {
            Some(Some(cq)) if id != 0 => {
                if cq.users > 0 {
                    return Err(Status::INVALID_QUEUE_DELETION);
                }
            }
            _ => return Err(Status::INVALID_QUEUE_ID),
        }
        self.cqs[usize::from(id)] = None;
        self.active_cqs.retain(|&other| other != id);
        Ok(())
    }

    /// Stops fetching from a submission queue, to delete it for the admin
    /// command `command_id` (5.6). [`Queues::take_deleted`] completes the deletion.
    pub fn start_delete_sq(
        &mut self,
        id: u16,
        command_id: u16,
        entry: Entry,
    ) -> Result<(), Status> {
        match self.sqs.get_mut(usize::from(id)) {
            Some(Some(sq)) if id != 0 && sq.deletion.is_none() => {
                sq.deletion = Some((command_id, entry));
                Ok(())
            }
            _ => Err(Status::INVALID_QUEUE_ID),
        }
    }

    /// Removes a submission queue that is being deleted and has no commands in flight.
    /// Returns the identifier of the Delete command, and its entry.
    pub fn take_deleted(&mut self) -> Option<(u16, Entry)> {
        let index = self.active.iter().position(|&id| {
            self.sqs[usize::from(id)]
                .as_ref()
                .is_some_and(|sq| sq.deletion.is_some() && sq.in_flight == 0)
        })?;
        let id = self.active.remove(index);
        let sq = self.sqs[usize::from(id)].take()?;
        if let Some(cq) = &mut self.cqs[usize::from(sq.cq)] {
            cq.users = cq.users.saturating_sub(1);
        }
        sq.deletion
    }

    /// The completion queue of a submission queue from which a command may be fetched,
    /// if the completion queue has room.
    fn wants_fetch(&self, id: u16) -> Option<u16> {
        let sq = self.sqs.get(usize::from(id))?.as_ref()?;
        (sq.head != sq.tail && sq.deletion.is_none()).then_some(sq.cq)
    }

    fn has_room(&self, cq: u16) -> bool {
        self.cqs[usize::from(cq)]
            .as_ref()
            .is_some_and(CompletionQueue::has_room)
    }

    /// Whether [`Queues::fetch`] would return a command.
    pub fn can_fetch(&mut self, dma: &mut dyn Dma, id: u16) -> Result<bool, Fault> {
        let Some(cq) = self.wants_fetch(id) else {
            return Ok(false);
        };
        if !self.has_room(cq) {
            self.refresh_head(dma, cq)?;
        }
        Ok(self.has_room(cq))
    }

    /// Fetches the next command of a submission queue, records it and reserves its completion entry.
    pub fn fetch(&mut self, dma: &mut dyn Dma, id: u16) -> Result<Option<(Command, Entry)>, Fault> {
        if !self.can_fetch(dma, id)? {
            return Ok(None);
        }
        let Some(sq) = self.sqs[usize::from(id)].as_mut() else {
            return Ok(None);
        };
        let mut bytes = [0; SQE_SIZE];
        sq.ring
            .read(dma, usize::from(sq.head) * SQE_SIZE, &mut bytes)?;
        let Some(entry) = self.state.record(id, sq.fetched, &bytes) else {
            return Ok(None);
        };
        sq.head = next(sq.head, sq.entries);
        sq.fetched += 1;
        self.state.fetched(id, sq.fetched);
        sq.in_flight += 1;
        if let Some(cq) = &mut self.cqs[usize::from(sq.cq)] {
            cq.reserved += 1;
        }
        Ok(Some((Command::from_bytes(&bytes), entry)))
    }

    /// Releases the reserved completion entry of a fetched command, for an event request,
    /// which may stay open indefinitely.
    pub fn release_completion(&mut self, id: u16) {
        if let Some(Some(sq)) = self.sqs.get_mut(usize::from(id)) {
            sq.in_flight = sq.in_flight.saturating_sub(1);
            if let Some(cq) = &mut self.cqs[usize::from(sq.cq)] {
                cq.reserved = cq.reserved.saturating_sub(1);
            }
        }
    }

    /// Reserves a completion entry for an event request. Returns whether there was room.
    pub fn reserve_completion(&mut self, id: u16) -> bool {
        if let Some(Some(sq)) = self.sqs.get_mut(usize::from(id))
            && let Some(cq) = &mut self.cqs[usize::from(sq.cq)]
            && cq.has_room()
        {
            sq.in_flight += 1;
            cq.reserved += 1;
            return true;
        }
        false
    }

    /// Posts the completion of a fetched command.
    pub fn complete(
        &mut self,
        dma: &mut dyn Dma,
        sq_id: u16,
        (command_id, entry): (u16, Entry),
        result: u32,
        status: Status,
    ) -> Result<(), Fault> {
        let Some(Some(sq)) = self.sqs.get_mut(usize::from(sq_id)) else {
            return Ok(());
        };
        sq.in_flight = sq.in_flight.saturating_sub(1);
        let Some(cq) = self.cqs[usize::from(sq.cq)].as_mut() else {
            return Ok(());
        };
        cq.reserved = cq.reserved.saturating_sub(1);
        let completion = Completion {
            result,
            sq_head: sq.head,
            sq_id,
            command_id,
            status,
        };
        self.state.completing(entry, cq.posted);
        cq.ring.publish(
            dma,
            usize::from(cq.tail) * CQE_SIZE,
            &completion.front(),
            completion.last(cq.phase),
        )?;
        cq.advance();
        self.state.posted(sq.cq, cq.posted);
        self.state.release(entry);
        Ok(())
    }

    /// Raises one interrupt for each queue with completions posted since the last call,
    /// and sets the level of the line.
    pub fn interrupt(&mut self, irq: &mut dyn Interrupts, mask: u32) {
        for &id in &self.active_cqs {
            if let Some(cq) = &mut self.cqs[usize::from(id)]
                && std::mem::take(&mut cq.dirty)
                && let Some(vector) = cq.vector
            {
                irq.raise(vector);
            }
        }
        self.update_line(irq, mask);
    }

    /// Sets the level of the INTx line if it has changed: asserted while an
    /// unmasked queue has entries that the guest has not consumed (7.5.1).
    pub fn update_line(&mut self, irq: &mut dyn Interrupts, mask: u32) {
        let level = self
            .active_cqs
            .iter()
            .filter_map(|&id| self.cqs[usize::from(id)].as_ref())
            .any(|cq| cq.asserts(mask));
        if level != self.line {
            self.line = level;
            irq.set_intx(level);
        }
    }

    /// Loads the shadow head doorbells of the queues that assert the INTx line.
    pub fn refresh_asserting(&mut self, dma: &mut dyn Dma, mask: u32) -> Result<(), Fault> {
        if !self.line || self.buffer.is_none() && self.mapped.is_none() {
            return Ok(());
        }
        for index in 0..self.active_cqs.len() {
            let id = self.active_cqs[index];
            if self.cqs[usize::from(id)]
                .as_ref()
                .is_some_and(|cq| cq.asserts(mask))
            {
                self.refresh_head(dma, id)?;
            }
        }
        Ok(())
    }
}
