//! Reservations of a shared namespace, at the lender's half of its medium.

use farside_medium::{Frame, Memory};

use super::{LentMedium, PART, part_of};
use crate::{
    block::{BlockError, Tag},
    nvme::{Group, LentReservations, MAX_REQUEST},
};

impl LentMedium {
    /// Whether reservations let an operation be received and checked now.
    pub(super) fn is_admitted(&mut self) -> bool {
        let in_flight = !self.block.is_idle();
        let reservations = self.reservations.as_mut();
        reservations.is_none_or(|it| it.take(in_flight))
    }

    /// Tells other controllers of a shared namespace if nothing is in flight.
    pub(super) fn rest(&mut self) {
        if self.block.is_idle()
            && let Some(reservations) = &mut self.reservations
        {
            reservations.rest();
        }
    }

    /// Whether reservations refuse an operation.
    pub(super) fn conflict(&self, frame: &Frame) -> Option<BlockError> {
        let group = match frame {
            Frame::Read { .. } => Group::Read,
            _ => Group::Write,
        };
        let checked = self.reservations.as_ref()?.check(group);
        checked.err().map(BlockError::Refused)
    }

    /// Executes a request of `len` bytes.
    pub(super) fn reserve(&mut self, tag: Tag, len: usize) {
        let mut request = [0; MAX_REQUEST];
        let slot = &self.slots[usize::from(tag)];
        let first = slot.parts.first();
        let slice = first.and_then(|part| part_of(&self.memory, *part, len.min(MAX_REQUEST)));
        let executed = match (&mut self.reservations, slice) {
            (Some(reservations), Some(slice)) => {
                slice.read(&mut request[..slice.len()]);
                reservations.execute(&request[..slice.len()])
            }
            _ => return self.answer(tag, Err(BlockError::Unsupported)),
        };
        match executed {
            Ok(Some(result)) => self.answer_with(tag, Ok(result)),
            Ok(None) => self.aborting = Some(tag),
            Err(status) => self.answer(tag, Err(BlockError::Refused(status))),
        }
    }

    /// Tells the borrower that what it has in flight was aborted.
    pub(super) fn send_fence(&mut self) {
        let reservations = self.reservations.as_mut();
        if let Some(number) = reservations.and_then(LentReservations::takes_fence) {
            self.post(Frame::Fence { number }, Memory::NONE);
        }
    }

    /// Sends the borrower the reservation notifications for which it waits.
    pub(super) fn send_notifications(&mut self) {
        if self.notified.is_some_and(|it| it >= self.link.sent()) {
            // A borrower that asks, and does not receive, would have them pile up.
            return;
        }
        let reservations = self.reservations.as_mut();
        if let Some(frame) = reservations.and_then(LentReservations::takes_notifications) {
            self.notified = Some(self.posted);
            self.post(frame, Memory::NONE);
        }
    }

    /// Frames that the socket has not taken as a whole.
    #[cfg(test)]
    pub(crate) fn unsent(&self) -> u64 {
        self.link.posted() - self.link.sent()
    }

    /// Answers a request that has waited for the I/O of preempted hosts. Returns whether it did.
    pub(super) fn finish_abort(&mut self) -> bool {
        self.rest();
        let reservations = self.reservations.as_mut();
        let Some(result) = reservations.and_then(LentReservations::aborted) else {
            return false;
        };
        if let Some(tag) = self.aborting.take() {
            self.answer_with(tag, result.map_err(BlockError::Refused));
        }
        true
    }

    /// Answers with the report on reservations, and zeroes after it.
    pub(super) fn report(&mut self, tag: Tag, extended: bool) {
        let report = match &self.reservations {
            Some(reservations) => reservations.report(extended),
            None => return self.answer(tag, Err(BlockError::Unsupported)),
        };
        let mut report = match report {
            Ok(report) => report,
            Err(status) => return self.answer(tag, Err(BlockError::Refused(status))),
        };
        let parts = &self.slots[usize::from(tag)].parts;
        report.resize(parts.len() * PART, 0);
        for (part, bytes) in parts.iter().zip(report.chunks(PART)) {
            if let Some(slice) = part_of(&self.memory, *part, PART) {
                slice.write(bytes);
            }
        }
        self.answer(tag, Ok(()));
    }

    /// Waits for what is in flight on the medium, after which others need not wait for this controller. Dropped instead, it is
    /// left to whoever serves the device next to say so.
    pub fn end(mut self) {
        self.block.drain();
        self.rest();
    }
}
