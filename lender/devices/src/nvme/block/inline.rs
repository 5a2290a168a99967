//! Copies, done where they are asked for.
//!
//! A cached write is a copy into the page cache: microseconds, less than it
//! takes to hand it to another thread. (Some file systems, ext4 among them,
//! refuse nonblocking buffered writes, so io_uring gives each to a worker, one
//! at a time for a file.) So they are done at once, in the device's thread.
//!
//! So are reads of an image in memory (tmpfs): that is all a copy too, but tmpfs
//! knows no nonblocking I/O, so io_uring would give each to a worker. Large ones
//! are given to workers all the same, which copy side by side.
//!
//! Until one takes long because it waited. Then the kernel is making writers wait
//! for the medium (or has to swap the image in), and I/O takes the engine's way for
//! a while: the device's thread, which must not block, is held up by one operation
//! in each such pause. One that was only kept from its processor says nothing of
//! the medium; workers would want processors too.

use std::{
    fs::File,
    io,
    os::fd::AsFd,
    slice,
    time::{Duration, Instant},
};

use super::{Durability, RawOp, last_errno, raw};

/// An operation that takes longer than this, and [`SLOW_BYTE`] for each byte,
/// waited for the medium or for a processor; [`times_waited`] tells which.
const SLOW: Duration = Duration::from_millis(2);

/// The time of a byte for a machine that copies slowly: 250 MB/s.
const SLOW_BYTE: Duration = Duration::from_nanos(4);

/// How long I/O takes the engine's way after a slow one.
const PAUSE: Duration = Duration::from_millis(500);

/// How old a count of [`times_waited`] may be: it costs as much as a read of 4 KiB.
/// A slow operation before which the thread slept as recently counts as having
/// waited.
const COUNT_AGE: Duration = Duration::from_micros(50);

/// The longest read, bytes.
const LONGEST_READ: u64 = 128 << 10;

/// `f_type` of tmpfs and ramfs.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// Whether copies are quick at the moment.
#[derive(Default)]
pub(super) struct Inline {
    /// Reads are copies too.
    in_memory: bool,
    resume: Option<Instant>,
    /// [`times_waited`], and when that was.
    counted: Option<(Instant, i64)>,
}

impl Inline {
    /// For I/O on this file.
    pub(super) fn new(file: &File) -> io::Result<Self> {
        let kind = rustix::fs::fstatfs(file.as_fd())?.f_type;
        Ok(Self {
            in_memory: IN_MEMORY.contains(&kind),
            ..Self::default()
        })
    }

    /// Does `op` now, if it is one that is quick now, and returns its result:
    /// bytes, or a negative errno.
    ///
    /// # Safety
    ///
    /// The operation's `iovecs` and the memory they name are allocated for the
    /// length of the call.
    pub(super) unsafe fn try_now(&mut self, file: &File, op: &RawOp) -> Option<i32> {
        let (write, iovecs, count, offset) = match *op {
            RawOp::Write {
                iovecs,
                count,
                offset,
                durability: Durability::Cached,
            } => (true, iovecs, count, offset),
            RawOp::Read {
                iovecs,
                count,
                offset,
            } if self.in_memory => (false, iovecs, count, offset),
            _ => return None,
        };
        if !write {
            // SAFETY: `count` valid iovecs, by this function's contract.
            let iovecs = unsafe { slice::from_raw_parts(iovecs, count as usize) };
            let len: u64 = iovecs.iter().map(|iovec| iovec.iov_len as u64).sum();
            if len > LONGEST_READ {
                return None;
            }
        }
        let started = Instant::now();
        if self.resume.is_some_and(|resume| started < resume) {
            return None;
        }
        let waited = self.times_waited_before(started);
        let (file, count, offset) = (raw(file), count as i32, offset as i64);
        // SAFETY: `count` valid iovecs, by this function's contract; the
        // kernel follows them, and answers EFAULT where memory is gone. Reading
        // changes guest memory, of which there are no references.
        let bytes = unsafe {
            match write {
                true => libc::pwritev(file, iovecs, count, offset),
                false => libc::preadv(file, iovecs, count, offset),
            }
        };
        let slow = SLOW + SLOW_BYTE * u32::try_from(bytes.max(0)).unwrap_or(u32::MAX);
        let waited = started.elapsed() > slow && times_waited() != waited;
        self.resume = waited.then(|| Instant::now() + PAUSE);
        Some(match bytes {
            0.. => bytes as i32,
            _ => last_errno(),
        })
    }

    /// [`times_waited`] before an operation that starts `now`.
    fn times_waited_before(&mut self, now: Instant) -> i64 {
        match self.counted {
            Some((at, waited)) if now - at < COUNT_AGE => waited,
            _ => {
                let waited = times_waited();
                self.counted = Some((now, waited));
                waited
            }
        }
    }
}

/// How often this thread has slept (getrusage(2), `ru_nvcsw`): the processor that
/// another thread took from it is not counted.
fn times_waited() -> i64 {
    // SAFETY: all zeros are a valid `rusage`, which is plain numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a `rusage` to be written. Fails for other arguments only.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    usage.ru_nvcsw
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
    fn a_thread_that_slept_has_waited() {
        let mut inline = Inline::default();
        let now = Instant::now();
        let before = inline.times_waited_before(now);
        std::thread::sleep(Duration::from_millis(1));
        assert!(times_waited() > before);
        // Asked again only when that may be out of date.
        assert_eq!(inline.times_waited_before(now), before);
        assert!(inline.times_waited_before(now + COUNT_AGE) > before);
    }

    #[test]
    fn after_a_slow_write_the_engine_has_its_turn() {
        let file = tempfile::tempfile().unwrap();
        let mut inline = Inline {
            resume: Some(Instant::now() + Duration::from_secs(3600)),
            ..Inline::default()
        };
        assert_eq!(write(&mut inline, &file, Durability::Cached), None);
        inline.resume = Some(Instant::now());
        assert_eq!(write(&mut inline, &file, Durability::Cached), Some(4));
    }

    /// The result, and what is in the buffer afterwards.
    fn read(inline: &mut Inline, file: &File, len: usize) -> (Option<i32>, Vec<u8>) {
        let mut data = vec![0; len];
        let iovec = libc::iovec {
            iov_base: data.as_mut_ptr().cast(),
            iov_len: len,
        };
        let op = RawOp::Read {
            iovecs: &iovec,
            count: 1,
            offset: 1,
        };
        // SAFETY: `iovec` and `data` outlive the call.
        let result = unsafe { inline.try_now(file, &op) };
        (result, data)
    }

    #[test]
    fn reads_are_done_at_once_where_they_are_small_copies() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"abcde", 0).unwrap();
        let in_memory = |in_memory| Inline {
            in_memory,
            ..Inline::default()
        };
        assert_eq!(read(&mut in_memory(false), &file, 4).0, None);
        let small = read(&mut in_memory(true), &file, 4);
        assert_eq!(small, (Some(4), b"bcde".to_vec()));
        let longest = LONGEST_READ as usize;
        assert_eq!(read(&mut in_memory(true), &file, longest).0, Some(4));
        assert_eq!(read(&mut in_memory(true), &file, longest + 1).0, None);
    }

    #[test]
    fn an_image_in_memory_is_known() {
        let memory = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC);
        assert!(Inline::new(&memory.unwrap().into()).unwrap().in_memory);
        let proc = File::open("/proc/self/stat").unwrap();
        assert!(!Inline::new(&proc).unwrap().in_memory);
    }
}
