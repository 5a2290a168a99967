//! Writes to registers that the device may not have served: a guest posts them, and does not write again.
//!
//! The device's process counts what it has served in the first page of its state. A write that it has served and not
//! counted is sent twice, which has no effect: no other access is between the two.

use std::collections::VecDeque;

use farside_fabric::memory::HostSlice;
use farside_lender_protocol::{Channel, ChannelError, registers::Access, served};

/// When the count is looked at.
const MANY: usize = 256;

/// Most writes that wait for a device. A driver rings a doorbell for each command, of which there are no more than
/// there is room for in its queues.
const MOST: usize = 4096;

/// The writes of one device.
#[derive(Debug, Default)]
pub(crate) struct RegisterLog {
    /// The first page of the device's state, if that outlives its process.
    page: Option<HostSlice>,
    /// Accesses sent in all.
    sent: u64,
    /// Writes that were sent, with their number.
    unserved: VecDeque<(u64, Access)>,
    /// Writes that were not.
    waiting: VecDeque<Access>,
}

impl RegisterLog {
    /// For a lease that goes on, whose state has this first page.
    pub(crate) fn new(page: Option<HostSlice>) -> Self {
        Self {
            page,
            ..Self::default()
        }
    }

    /// Sends an access after those that wait. Returns false if the channel is full.
    pub(crate) fn send(
        &mut self,
        channel: &mut Channel,
        access: Access,
    ) -> Result<bool, ChannelError> {
        if !(self.flush(channel)? && channel.try_send(&access, &[])?) {
            return Ok(false);
        }
        self.note(access);
        Ok(true)
    }

    /// Sends what waits. Returns whether all of it was sent.
    pub(crate) fn flush(&mut self, channel: &mut Channel) -> Result<bool, ChannelError> {
        while let Some(access) = self.waiting.front().copied() {
            if !channel.try_send(&access, &[])? {
                return Ok(false);
            }
            self.waiting.pop_front();
            self.note(access);
        }
        Ok(true)
    }

    fn note(&mut self, access: Access) {
        let number = self.sent;
        self.sent += 1;
        let Some(page) = &self.page else {
            return;
        };
        if !matches!(access, Access::Write { .. }) {
            return;
        }
        self.unserved.push_back((number, access));
        if self.unserved.len() >= MANY {
            let served = served(page);
            while self.unserved.front().is_some_and(|(n, _)| *n < served) {
                self.unserved.pop_front();
            }
            // A process that does not count harms its own VM.
            while self.unserved.len() > MOST {
                self.unserved.pop_front();
            }
        }
    }

    /// The device's process has ended, which had served `served` accesses: the others wait for the next one.
    pub(crate) fn cut(&mut self, served: u64) {
        let unserved = self.unserved.drain(..).rev();
        for (_, access) in unserved.filter(|(number, _)| *number >= served) {
            self.waiting.push_front(access);
        }
        self.sent = 0;
    }

    /// Keeps a write for the next process. Returns false if there are too many.
    pub(crate) fn wait(&mut self, access: Access) -> bool {
        self.waiting.push_back(access);
        self.waiting.len() <= MOST
    }

    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The device is reset, after all that was written.
    pub(crate) fn clear(&mut self) {
        self.unserved.clear();
        self.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use farside_fabric::memory::SharedMemory;

    use super::*;

    fn write(value: u64) -> Access {
        Access::Write {
            bar: 0,
            offset: 0x1000,
            len: 4,
            value,
        }
    }

    fn received(channel: &mut Channel) -> Vec<Access> {
        let next = || channel.receive(Duration::ZERO).ok();
        std::iter::from_fn(next).map(|(access, _)| access).collect()
    }

    #[test]
    fn what_was_not_served_is_sent_again_in_order_and_nothing_else() {
        let memory = SharedMemory::anonymous(4096).unwrap();
        let page = memory.slice(0, 4096).unwrap();
        let mut log = RegisterLog::new(Some(page.clone()));
        let (mut ours, mut theirs) = Channel::pair().unwrap();
        let read = Access::Read {
            bar: 0,
            offset: 0,
            len: 4,
        };
        for access in [write(1), read, write(2), write(3)] {
            assert!(log.send(&mut ours, access).unwrap());
        }
        assert_eq!(received(&mut theirs).len(), 4);
        // The first write and the read.
        page.store_u64(0, 2, std::sync::atomic::Ordering::Release);
        log.cut(served(&page));
        assert!(log.wait(write(4)));
        let (mut ours, mut theirs) = Channel::pair().unwrap();
        page.store_u64(0, 0, std::sync::atomic::Ordering::Release);
        assert!(log.send(&mut ours, write(5)).unwrap());
        assert_eq!(received(&mut theirs), [2, 3, 4, 5].map(write));
        // The next process has served none.
        log.cut(0);
        let (mut ours, mut theirs) = Channel::pair().unwrap();
        assert!(log.flush(&mut ours).unwrap());
        assert_eq!(received(&mut theirs), [2, 3, 4, 5].map(write));
        log.clear();
        log.cut(0);
        assert!(!log.is_waiting());
    }

    #[test]
    fn a_long_life_takes_no_memory() {
        let memory = SharedMemory::anonymous(4096).unwrap();
        let page = memory.slice(0, 4096).unwrap();
        let mut log = RegisterLog::new(Some(page.clone()));
        let (mut ours, mut theirs) = Channel::pair().unwrap();
        for n in 0..10_000 {
            assert!(log.send(&mut ours, write(n)).unwrap());
            received(&mut theirs);
            page.store_u64(0, n, std::sync::atomic::Ordering::Release);
            assert!(log.unserved.len() <= MANY);
        }
    }
}
