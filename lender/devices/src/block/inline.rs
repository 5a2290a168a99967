//! Synchronous I/O in the device's thread, for page-cache copies.
//!
//! A cached write is a copy into the page cache: microseconds, less than passing it to
//! another thread takes. (Some file systems, ext4 among them, do not support nonblocking
//! buffered writes, so io_uring passes each to a worker, one at a time for a file.) So
//! cached writes are synchronous.
//!
//! So are reads of an image in memory (tmpfs): they are copies, too, but tmpfs does not
//! support nonblocking I/O, so io_uring would pass each to a worker. Large reads go to
//! workers nevertheless, which copy in parallel.
//!
//! If such an operation blocks, the kernel is throttling writers (or swapping the image
//! in), and I/O uses the engine for [`PAUSE`], so that the device's thread blocks at most
//! once per pause. Preemption isn't evidence of a slow medium, and workers would
//! compete for the same CPUs: check `ru_nvcsw` before switching to the engine.

use std::{
    fs::File,
    io,
    os::fd::AsFd,
    slice,
    time::{Duration, Instant},
};

use super::{Durability, RawOp, last_errno, raw};

/// An operation that takes longer than this plus [`SLOW_BYTE`] per byte has blocked or
/// was preempted; [`times_blocked`] distinguishes the two.
const SLOW: Duration = Duration::from_millis(2);

/// Time per byte of a slow copy: 250 MB/s.
const SLOW_BYTE: Duration = Duration::from_nanos(4);

/// How long I/O uses the engine after an operation has blocked.
const PAUSE: Duration = Duration::from_millis(500);

/// Maximum age of a count of [`times_blocked`], whose system call costs as much as a read
/// of 4 KiB. If the thread has slept within this time before a slow operation, the
/// operation counts as blocked.
const COUNT_AGE: Duration = Duration::from_micros(50);

/// Longest synchronous read, in bytes.
const LONGEST_READ: u64 = 128 << 10;

/// `f_type` of tmpfs and ramfs.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// State of synchronous I/O.
#[derive(Default)]
pub(super) struct Inline {
    /// The image is in memory, so reads are copies, too.
    in_memory: bool,
    /// End of the pause.
    resume: Option<Instant>,
    /// [`times_blocked`], with its time.
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

    /// Performs `op` if it is a copy and there is no pause. Returns its result: bytes, or a
    /// negative errno.
    ///
    /// # Safety
    ///
    /// The operation's `iovecs` and their memory must be allocated during the call.
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
        let waited = self.times_blocked_before(started);
        let (file, count, offset) = (raw(file), count as i32, offset as i64);
        // SAFETY: `count` valid iovecs, by this function's contract; only the kernel
        // accesses their memory, with EFAULT where it is no longer mapped. Reading
        // changes guest memory, to which there are no references.
        let bytes = unsafe {
            match write {
                true => libc::pwritev(file, iovecs, count, offset),
                false => libc::preadv(file, iovecs, count, offset),
            }
        };
        let slow = SLOW + SLOW_BYTE * u32::try_from(bytes.max(0)).unwrap_or(u32::MAX);
        let waited = started.elapsed() > slow && times_blocked() != waited;
        self.resume = waited.then(|| Instant::now() + PAUSE);
        Some(match bytes {
            0.. => bytes as i32,
            _ => last_errno(),
        })
    }

    /// [`times_blocked`] before an operation that starts `now`.
    fn times_blocked_before(&mut self, now: Instant) -> i64 {
        match self.counted {
            Some((at, waited)) if now - at < COUNT_AGE => waited,
            _ => {
                let waited = times_blocked();
                self.counted = Some((now, waited));
                waited
            }
        }
    }
}

/// Number of voluntary context switches of this thread (getrusage(2), `ru_nvcsw`):
/// excludes preemption.
fn times_blocked() -> i64 {
    // SAFETY: all zeros are a valid `rusage`, which is plain numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a valid `rusage` to write to. Cannot fail with these arguments.
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
    fn cached_writes_are_synchronous_and_durable_ones_are_not() {
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
    fn a_thread_that_slept_has_blocked() {
        let mut inline = Inline::default();
        let now = Instant::now();
        let before = inline.times_blocked_before(now);
        std::thread::sleep(Duration::from_millis(1));
        assert!(times_blocked() > before);
        // Queried again only after `COUNT_AGE`.
        assert_eq!(inline.times_blocked_before(now), before);
        assert!(inline.times_blocked_before(now + COUNT_AGE) > before);
    }

    #[test]
    fn after_a_blocked_write_the_engine_is_used() {
        let file = tempfile::tempfile().unwrap();
        let mut inline = Inline {
            resume: Some(Instant::now() + Duration::from_secs(3600)),
            ..Inline::default()
        };
        assert_eq!(write(&mut inline, &file, Durability::Cached), None);
        inline.resume = Some(Instant::now());
        assert_eq!(write(&mut inline, &file, Durability::Cached), Some(4));
    }

    /// The result, and the buffer's contents.
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
    fn small_reads_of_an_image_in_memory_are_synchronous() {
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
    fn an_image_in_memory_is_detected() {
        let memory = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC);
        assert!(Inline::new(&memory.unwrap().into()).unwrap().in_memory);
        let proc = File::open("/proc/self/stat").unwrap();
        assert!(!Inline::new(&proc).unwrap().in_memory);
    }
}
