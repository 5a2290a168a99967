//! Cached writes, done where they are asked for.
//!
//! A cached write is a copy into the page cache: microseconds, less than it
//! takes to hand it to another thread. (Some file systems, ext4 among them,
//! refuse nonblocking buffered writes, so io_uring gives each to a worker, one
//! at a time for a file.) So they are done at once, in the device's thread.
//!
//! Until one takes long. Then the kernel is making writers wait for the
//! medium, and writes take the engine's way for a while: the device's thread,
//! which must not block, is held up by one write in each such pause.

use std::{
    fs::File,
    time::{Duration, Instant},
};

use super::{Durability, RawOp, last_errno, raw};

/// A write that takes longer than this waited for the medium, or for a
/// processor.
const SLOW: Duration = Duration::from_millis(2);

/// How long writes take the engine's way after a slow one.
const PAUSE: Duration = Duration::from_millis(500);

/// Whether writes are quick at the moment.
#[derive(Default)]
pub(super) struct Inline {
    resume: Option<Instant>,
}

impl Inline {
    /// Does `op` now, if it is one that is quick now, and returns its result:
    /// bytes, or a negative errno.
    ///
    /// # Safety
    ///
    /// The operation's `iovecs` and the memory they name are allocated for the
    /// length of the call.
    pub(super) unsafe fn try_now(&mut self, file: &File, op: &RawOp) -> Option<i32> {
        let RawOp::Write {
            iovecs,
            count,
            offset,
            durability: Durability::Cached,
        } = *op
        else {
            return None;
        };
        let started = Instant::now();
        if self.resume.is_some_and(|resume| started < resume) {
            return None;
        }
        // SAFETY: `count` valid iovecs, by this function's contract; the
        // kernel follows them, and answers EFAULT where memory is gone.
        let bytes = unsafe { libc::pwritev(raw(file), iovecs, count as i32, offset as i64) };
        self.resume = (started.elapsed() > SLOW).then(|| Instant::now() + PAUSE);
        Some(match bytes {
            0.. => bytes as i32,
            _ => last_errno(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn write(inline: &mut Inline, file: &File, durability: Durability) -> Option<i32> {
        let data = *b"data";
        let iovec = libc::iovec {
            iov_base: data.as_ptr().cast_mut().cast(),
            iov_len: data.len(),
        };
        let op = RawOp::Write {
            iovecs: &iovec,
            count: 1,
            offset: 4,
            durability,
        };
        // SAFETY: `iovec` and `data` outlive the call.
        unsafe { inline.try_now(file, &op) }
    }

    #[test]
    fn cached_writes_are_done_at_once_and_durable_ones_are_not() {
        let file = tempfile::tempfile().unwrap();
        let mut inline = Inline::default();
        assert_eq!(write(&mut inline, &file, Durability::Durable), None);
        assert_eq!(file.metadata().unwrap().len(), 0);
        assert_eq!(write(&mut inline, &file, Durability::Cached), Some(4));
        let mut back = [0; 4];
        file.read_exact_at(&mut back, 4).unwrap();
        assert_eq!(&back, b"data");
    }

    #[test]
    fn after_a_slow_write_the_engine_has_its_turn() {
        let file = tempfile::tempfile().unwrap();
        let mut inline = Inline {
            resume: Some(Instant::now() + Duration::from_secs(3600)),
        };
        assert_eq!(write(&mut inline, &file, Durability::Cached), None);
        inline.resume = Some(Instant::now());
        assert_eq!(write(&mut inline, &file, Durability::Cached), Some(4));
    }
}
