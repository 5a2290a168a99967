//! Writes to registers that the device may not have served: a guest posts them, and does not write again.
//!
//! The device's process counts in the first page of its state what it has served, in all processes together. A write
//! that it has served and not counted is sent twice, which has no effect: no other access is between the two. The log is
//! in the [records](farside_keeper) of the device: the next backend goes on with it.

use farside_fabric::memory::HostSlice;
use farside_keeper::Words;
use farside_lender_protocol::{Channel, ChannelError, registers::Access, served};

/// When the count is looked at.
const MANY: u64 = 256;

/// Most writes that wait for a device. A driver rings a doorbell for each command, of which there are no more than
/// there is room for in its queues.
const MOST: u64 = 4096;

/// The number of a write that was not sent.
const UNSENT: u64 = u64::MAX;

/// Words: the first write that is kept, and the end of them.
const FIRST: usize = 0;
const END: usize = 1;
/// Of the message that is processed: [`OF_A_MESSAGE`], its turn, and how many of its writes are kept.
const MARK: usize = 2;
const OF_A_MESSAGE: u64 = 1 << 63;
/// Where the writes begin, of four words each.
const WRITES: usize = farside_keeper::LOG_WORDS - 4 * MOST as usize;

/// The writes of one device, the oldest first: those that were sent, with the number of the access, then those that wait.
#[derive(Debug)]
pub(crate) struct RegisterLog {
    words: Words,
    /// The first page of the device's state, if that outlives its process.
    page: Option<HostSlice>,
    /// The number of the next access.
    sent: u64,
    /// The first write that waits.
    waiting: u64,
    /// Writes of the message that the process before has kept.
    done: u64,
}

impl RegisterLog {
    /// What is in `words` waits for a device.
    pub(crate) fn new(words: Words) -> Self {
        let mut log = Self {
            words,
            page: None,
            sent: 0,
            waiting: 0,
            done: 0,
        };
        // No count comes near the largest number. A process that was taken over may have left anything.
        if log.first() > log.end() || log.len() > MOST || log.end() > u64::MAX / 2 {
            log.words.set(FIRST, 0);
            log.words.set(END, 0);
        }
        log.waiting = log.end();
        log
    }

    /// An empty one for a lease, whose state has this first page if it goes on.
    pub(crate) fn begin(&mut self, page: Option<HostSlice>) {
        self.clear();
        self.sent = page.as_ref().map_or(0, served);
        self.page = page;
    }

    /// A message with writes is processed, whose [turn](farside_keeper::DeviceFile::turn) this is: those that the process
    /// before has kept are not repeated, as others of the message may have followed them.
    pub(crate) fn message(&mut self, turn: u8) {
        let mark = OF_A_MESSAGE | u64::from(turn) << 32;
        let before = self.words.get(MARK);
        self.done = match before & !u64::from(u32::MAX) == mark {
            true => before & u64::from(u32::MAX),
            false => 0,
        };
        self.words.set(MARK, mark | self.done);
    }

    /// Another message is processed: the one whose writes are kept will not be processed again. Turns are few, so that one
    /// that comes later has the same.
    pub(crate) fn other_message(&mut self) {
        self.done = 0;
        if self.words.get(MARK) != 0 {
            self.words.set(MARK, 0);
        }
    }

    /// Whether the process before has kept the next write of the message.
    fn is_repeated(&mut self) -> bool {
        let is_repeated = self.done > 0;
        self.done = self.done.saturating_sub(1);
        is_repeated
    }

    /// A write of the message is kept. Until here the next process repeats it, with nothing in between.
    fn kept(&self) {
        self.words.set(MARK, self.words.get(MARK) + 1);
    }

    /// Sends an access after those that wait. Returns false if the channel is full.
    pub(crate) fn send(
        &mut self,
        channel: &mut Channel,
        access: Access,
    ) -> Result<bool, ChannelError> {
        if !self.flush(channel)? {
            return Ok(false);
        }
        // Recorded first: a backend that is killed now sends it again.
        let is_kept = self.page.is_some() && matches!(access, Access::Write { .. });
        if is_kept && self.is_repeated() {
            return Ok(true);
        }
        self.drop_served();
        let before = self.end();
        if is_kept {
            self.push(self.sent, access);
        }
        match channel.try_send(&access, &[]) {
            Ok(true) => {}
            failed => {
                if is_kept {
                    self.words.set(END, before);
                    self.waiting = before;
                }
                return failed;
            }
        }
        self.sent += 1;
        self.waiting = self.end();
        if is_kept {
            self.kept();
        }
        Ok(true)
    }

    /// Sends what waits. Returns whether all of it was sent.
    pub(crate) fn flush(&mut self, channel: &mut Channel) -> Result<bool, ChannelError> {
        while self.is_waiting() {
            let (_, access) = self.write(self.waiting);
            if !channel.try_send(&access, &[])? {
                return Ok(false);
            }
            self.words.set(place(self.waiting), self.sent);
            self.sent += 1;
            self.waiting += 1;
        }
        Ok(true)
    }

    fn drop_served(&mut self) {
        let Some(page) = self.page.as_ref().filter(|_| self.len() >= MANY) else {
            return;
        };
        self.drop_before(served(page));
        // A process that does not count harms its own VM.
        if self.len() > MOST - MANY {
            self.words.set(FIRST, self.end() - (MOST - MANY));
        }
    }

    /// Drops the writes that were sent, with a number below `served`.
    fn drop_before(&mut self, served: u64) {
        let mut first = self.first();
        while first < self.waiting && self.write(first).0 < served {
            first += 1;
        }
        self.words.set(FIRST, first);
    }

    /// The device's process has ended, which had served `served` accesses: the others wait for the next one. `page` is as
    /// for [`begin`](Self::begin).
    pub(crate) fn cut(&mut self, page: Option<HostSlice>, served: u64) {
        self.page = page;
        self.drop_before(served);
        self.waiting = self.first();
        self.sent = served;
    }

    /// Keeps a write for the next process. Returns false if there are too many.
    pub(crate) fn wait(&mut self, access: Access) -> bool {
        if self.is_repeated() {
            return true;
        }
        if self.len() >= MOST {
            return false;
        }
        self.push(UNSENT, access);
        self.kept();
        true
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting < self.end()
    }

    /// The device is reset, after all that was written.
    pub(crate) fn clear(&mut self) {
        self.words.set(FIRST, self.end());
        self.waiting = self.end();
    }

    fn first(&self) -> u64 {
        self.words.get(FIRST)
    }

    fn end(&self) -> u64 {
        self.words.get(END)
    }

    fn len(&self) -> u64 {
        self.end().saturating_sub(self.first())
    }

    fn push(&mut self, number: u64, access: Access) {
        let Access::Write {
            bar,
            offset,
            len,
            value,
        } = access
        else {
            return;
        };
        let end = self.end();
        let at = place(end);
        self.words.set(at, number);
        self.words.set(at + 1, u64::from(bar) << 8 | u64::from(len));
        self.words.set(at + 2, offset);
        self.words.set(at + 3, value);
        self.words.set(END, end + 1);
    }

    /// A write that is kept, with its number.
    fn write(&self, index: u64) -> (u64, Access) {
        let at = place(index);
        let [number, kind, offset, value] = [0, 1, 2, 3].map(|word| self.words.get(at + word));
        let access = Access::Write {
            bar: (kind >> 8) as u8,
            offset,
            len: kind as u8,
            value,
        };
        (number, access)
    }
}

/// The first word of a write.
fn place(index: u64) -> usize {
    WRITES + 4 * (index % MOST) as usize
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use farside_fabric::memory::SharedMemory;
    use farside_hand_over::samples;

    use super::*;

    fn write(value: u64) -> Access {
        Access::Write {
            bar: 0,
            offset: 0x1000,
            len: 4,
            value,
        }
    }

    fn log() -> RegisterLog {
        let file = farside_keeper::DeviceFile::new().unwrap();
        RegisterLog::new(file.log().unwrap())
    }

    fn received(channel: &mut Channel) -> Vec<Access> {
        let next = || channel.receive(Duration::ZERO).ok();
        std::iter::from_fn(next).map(|(access, _)| access).collect()
    }

    #[test]
    fn a_message_of_a_turn_that_comes_again_is_another_one() {
        let mut log = log();
        log.message(5);
        assert!(log.wait(write(7)));
        log.other_message();
        log.message(5);
        assert!(log.wait(write(8)));
        assert_eq!(log.len(), 2);
    }

    #[test]
    fn the_format_of_the_log_has_not_changed_without_its_version() {
        let file = farside_keeper::DeviceFile::new().unwrap();
        let mut log = RegisterLog::new(file.log().unwrap());
        log.message(5);
        assert!(log.wait(write(7)));
        assert!(log.wait(Access::Write {
            bar: 5,
            offset: 1 << 40,
            len: 8,
            value: u64::MAX - 1,
        }));
        let words = file.log().unwrap();
        let set = (0..words.len()).filter(|n| words.get(*n) != 0);
        let words = set.map(|n| (format!("word-{n}"), words.get(n).to_be_bytes().to_vec()));
        let version = farside_keeper::RECORDS.version();
        let path = format!(
            "{}/tests/samples/log-{version}.txt",
            env!("CARGO_MANIFEST_DIR")
        );
        samples::is_unchanged(path.as_ref(), &words.collect::<Vec<_>>());
    }

    #[test]
    fn what_was_not_served_is_sent_again_in_order_and_nothing_else() {
        let memory = SharedMemory::anonymous(4096).unwrap();
        let page = memory.slice(0, 4096).unwrap();
        let mut log = log();
        log.begin(Some(page.clone()));
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
        log.cut(Some(page.clone()), served(&page));
        assert!(log.wait(write(4)));
        let (mut ours, mut theirs) = Channel::pair().unwrap();
        assert!(log.send(&mut ours, write(5)).unwrap());
        assert_eq!(received(&mut theirs), [2, 3, 4, 5].map(write));
        // The next process has served none.
        log.cut(Some(page.clone()), served(&page));
        let (mut ours, mut theirs) = Channel::pair().unwrap();
        assert!(log.flush(&mut ours).unwrap());
        assert_eq!(received(&mut theirs), [2, 3, 4, 5].map(write));
        log.clear();
        log.cut(Some(page.clone()), served(&page));
        assert!(!log.is_waiting());
    }

    #[test]
    fn a_long_life_takes_no_memory() {
        let memory = SharedMemory::anonymous(4096).unwrap();
        let page = memory.slice(0, 4096).unwrap();
        let mut log = log();
        log.begin(Some(page.clone()));
        let (mut ours, mut theirs) = Channel::pair().unwrap();
        for n in 0..10_000 {
            assert!(log.send(&mut ours, write(n)).unwrap());
            received(&mut theirs);
            page.store_u64(0, n, std::sync::atomic::Ordering::Release);
            assert!(log.len() <= MANY);
        }
    }

    #[test]
    fn a_log_of_garbage_is_empty() {
        for (first, end) in [
            (0, MOST + 1),
            (2, 1),
            (u64::MAX - 1, u64::MAX),
            (0, 1 << 63),
        ] {
            let file = farside_keeper::DeviceFile::new().unwrap();
            let words = file.log().unwrap();
            words.set(FIRST, first);
            words.set(END, end);
            let mut log = RegisterLog::new(words);
            log.cut(None, 0);
            assert!(!log.is_waiting(), "{first}, {end}");
            assert!(log.wait(write(1)));
        }
    }

    #[test]
    fn a_message_that_is_processed_again_repeats_no_write_of_it() {
        let file = farside_keeper::DeviceFile::new().unwrap();
        let memory = SharedMemory::anonymous(4096).unwrap();
        let page = memory.slice(0, 4096);
        let mut first = RegisterLog::new(file.log().unwrap());
        first.begin(page.clone());
        let (mut ours, mut theirs) = Channel::pair().unwrap();
        first.message(7);
        for value in [5, 6] {
            assert!(first.send(&mut ours, write(value)).unwrap());
        }
        assert_eq!(received(&mut theirs), [5, 6].map(write));
        // Killed before the last write of the message: nothing of it is served.
        drop(first);
        let mut next = RegisterLog::new(file.log().unwrap());
        next.message(7);
        assert!([5, 6, 7].into_iter().all(|value| next.wait(write(value))));
        next.message(8);
        assert!(next.wait(write(5)));
        next.cut(page, 0);
        let (mut ours, mut theirs) = Channel::pair().unwrap();
        assert!(next.flush(&mut ours).unwrap());
        assert_eq!(received(&mut theirs), [5, 6, 7, 5].map(write));
    }
}
