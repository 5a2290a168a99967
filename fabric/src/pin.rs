//! Keeping guest RAM resident while a device may reach it.
//!
//! A device writes to physical pages, so before a window opens each page must
//! exist, and must stay. [`Pins`] maps the memory into this process, has the
//! kernel populate it (in parallel, in huge pages where the memory has them),
//! and locks it. The CPU never touches a byte of it, so neither its contents
//! nor a file that shrinks matter here.
//!
//! Locking counts against `RLIMIT_MEMLOCK`, which is small for ordinary users.
//! It is looked at before anything else is done; [`PinPolicy`] says what then.
//! Real hardware needs more than a lock (the kernel may still move a locked
//! page): there, mapping in an IOMMU domain pins as well, under the same limit.

use std::{
    fs, io,
    num::NonZeroUsize,
    sync::{
        Mutex, Once, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    process::{Resource, getrlimit},
    thread::{CapabilitySet, capabilities},
};
use serde::{Deserialize, Serialize};

use crate::{
    MemoryRange, PageCounts, Size,
    backing::Backing,
    mapping::{Mapping, Residency},
};

/// What a worker does between two looks at the clock: some 15 ms where pages
/// must be zeroed first.
const CHUNK: usize = 64 << 20;

/// Workers beyond this many wait for each other's zeroing.
const MAX_WORKERS: usize = 16;

/// What to do when the memlock limit is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PinPolicy {
    /// Refuse. For fabrics with real hardware.
    Require,
    /// Populate without locking, and say so once in the log. For the `soft`
    /// fabric, whose DMA goes through page tables and finds a page again.
    Prefer,
}

/// How to pin.
#[derive(Clone, Copy)]
pub struct PinOptions<'a> {
    /// What to do when the memlock limit is too small.
    pub policy: PinPolicy,
    /// How many threads populate; left out, one for each CPU, at most 16.
    pub workers: Option<NonZeroUsize>,
    /// When to give up. It is looked at after every 64 MiB (or huge page).
    pub deadline: Option<Instant>,
    /// Give up when this becomes true; looked at as often.
    pub cancel: Option<&'a AtomicBool>,
    /// Called by the workers after each chunk with how far they are together.
    pub progress: Option<&'a (dyn Fn(PinProgress) + Sync)>,
}

impl PinOptions<'_> {
    /// No deadline, no cancelling, no progress.
    pub fn new(policy: PinPolicy) -> Self {
        Self {
            policy,
            workers: None,
            deadline: None,
            cancel: None,
            progress: None,
        }
    }
}

/// How far pinning is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinProgress {
    /// Bytes that are resident now.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// What is pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinReport {
    /// Bytes kept mapped and populated.
    pub bytes_pinned: u64,
    /// Bytes of them that cannot be swapped: locked, or in huge pages.
    pub bytes_locked: u64,
    /// Pages that the memory's files consist of. (Transparent huge pages are
    /// counted as what they replace.)
    pub pages: PageCounts,
    /// How long it took.
    pub elapsed: Duration,
}

/// Why memory is not pinned. None of it is, then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The memlock limit is too small, and [`PinPolicy::Require`] was asked for.
    #[error(transparent)]
    Memlock(#[from] MemlockTooSmall),
    /// A range cannot be mapped.
    #[error("cannot map {len:#x} bytes at offset {offset:#x} of guest memory: {source}")]
    Map {
        /// Offset in the file.
        offset: u64,
        /// Bytes.
        len: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The kernel could not make pages resident.
    #[error(
        "cannot populate {len:#x} bytes at offset {offset:#x} of guest memory: {source}{}",
        populate_hint(source)
    )]
    Populate {
        /// Offset in the file.
        offset: u64,
        /// Bytes.
        len: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The kernel could not lock pages, although the limit allowed it.
    #[error("cannot lock {len:#x} bytes at offset {offset:#x} of guest memory: {source}")]
    Lock {
        /// Offset in the file.
        offset: u64,
        /// Bytes.
        len: u64,
        /// What the system said.
        source: io::Error,
    },
    /// [`PinOptions::deadline`] has passed.
    #[error(
        "pinning guest memory took too long: {done} of {total} bytes were resident after \
         {elapsed:.1?}; give the VM a longer message timeout or prefault its memory"
    )]
    Deadline {
        /// Bytes that were resident.
        done: u64,
        /// Bytes in all.
        total: u64,
        /// How long it had taken.
        elapsed: Duration,
    },
    /// [`PinOptions::cancel`] became true.
    #[error("pinning guest memory was cancelled when {done} of {total} bytes were resident")]
    Cancelled {
        /// Bytes that were resident.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// A thread could not be started, or the limits not be read.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// The memlock limit does not allow what is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the memlock limit is too small to lock guest memory: RLIMIT_MEMLOCK is {}, {} are locked \
     already and {} more are needed; raise it with `ulimit -l {}` (as root, or in \
     /etc/security/limits.conf) or `LimitMEMLOCK={needed_total}` in a systemd unit, or grant \
     CAP_IPC_LOCK",
    Size(*limit), Size(*locked), Size(*needed), needed_total.div_ceil(1024)
)]
pub struct MemlockTooSmall {
    /// The limit, bytes.
    pub limit: u64,
    /// Bytes that this process has locked already.
    pub locked: u64,
    /// Bytes to be locked now.
    pub needed: u64,
    /// The smallest limit that would do, bytes.
    pub needed_total: u64,
}

fn populate_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EINVAL) => " (Linux 5.14 or newer is needed for MADV_POPULATE_WRITE)",
        Some(libc::EFAULT) => " (the file has shrunk, or no huge page is free)",
        _ => "",
    }
}

/// Looks at the memlock limit for all of `ranges` together, before any of them
/// is pinned. Huge pages are never swapped and need no lock.
///
/// # Errors
/// [`PinError::Memlock`] when the limit is too small and `policy` requires it;
/// otherwise that is said in the log, once. [`PinError::Map`] for a range that
/// cannot be pinned at all.
pub fn check(ranges: &[MemoryRange], policy: PinPolicy) -> Result<(), PinError> {
    let mut to_lock = 0;
    for range in ranges {
        let backing = Backing::check(&range.file, range.offset, range.len);
        let backing = backing.map_err(|source| PinError::Map {
            offset: range.offset,
            len: range.len,
            source,
        })?;
        if !backing.hugetlb {
            to_lock += range.len;
        }
    }
    may_lock(to_lock, policy).map(|_| ())
}

/// Whether `needed` bytes are to be locked, by the limit and the policy.
fn may_lock(needed: u64, policy: PinPolicy) -> Result<bool, PinError> {
    match (check_memlock(needed), policy) {
        (Ok(()), _) => Ok(true),
        (Err(PinError::Memlock(error)), PinPolicy::Prefer) => {
            warn_once(&error);
            Ok(false)
        }
        (Err(error), _) => Err(error),
    }
}

/// Checks that `needed` more bytes may be locked.
///
/// # Errors
/// [`PinError::Memlock`] says what is needed and how to get it.
pub fn check_memlock(needed: u64) -> Result<(), PinError> {
    let Some(limit) = getrlimit(Resource::Memlock).current else {
        return Ok(());
    };
    let capable =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    if capable {
        return Ok(());
    }
    let locked = locked_now().map_err(|source| PinError::System {
        what: "read how much memory is locked from /proc/self/status",
        source,
    })?;
    let needed_total = locked.saturating_add(needed);
    if needed_total <= limit {
        return Ok(());
    }
    Err(PinError::Memlock(MemlockTooSmall {
        limit,
        locked,
        needed,
        needed_total,
    }))
}

/// Bytes that this process has locked.
fn locked_now() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    line.and_then(|line| line.split_whitespace().next())
        .and_then(|kib| kib.parse::<u64>().ok())
        .and_then(|kib| kib.checked_mul(1024))
        .ok_or_else(|| io::Error::other("no line VmLck there"))
}

/// Memory that stays resident until this is dropped.
#[derive(Debug)]
pub struct Pins {
    // Only held: dropping a mapping unlocks and unmaps it.
    _mapped: Vec<Pinned>,
    report: PinReport,
}

#[derive(Debug)]
struct Pinned {
    mapping: Mapping,
    /// Where the mapping begins in the file.
    offset: u64,
    /// Bytes asked for; the mapping has whole pages of the file.
    bytes: u64,
    page_size: u64,
    hugetlb: bool,
    writable: bool,
}

impl Pins {
    /// Pins `ranges`. It returns when all of them are resident.
    ///
    /// # Errors
    /// See [`PinError`]. Nothing stays pinned after one.
    pub fn new(ranges: &[MemoryRange], options: &PinOptions<'_>) -> Result<Self, PinError> {
        let began = Instant::now();
        let mapped: Vec<Pinned> = ranges.iter().map(Pinned::new).collect::<Result<_, _>>()?;
        // Huge pages are never swapped and are not counted.
        let to_lock = mapped
            .iter()
            .filter(|range| !range.hugetlb)
            .map(|range| range.mapping.len() as u64)
            .sum();
        let lock = may_lock(to_lock, options.policy)?;

        let job = Job::new(&mapped, lock, options, began);
        job.run()?;

        let mut report = PinReport::default();
        for range in &mapped {
            let len = range.mapping.len() as u64;
            report.bytes_pinned += range.bytes;
            report.pages += PageCounts::of(range.offset, range.offset, len, range.page_size);
            if range.hugetlb {
                report.bytes_locked += range.bytes;
            }
        }
        report.bytes_locked += job.locked.into_inner();
        report.elapsed = began.elapsed();
        Ok(Self {
            _mapped: mapped,
            report,
        })
    }

    /// What is pinned.
    pub fn report(&self) -> PinReport {
        self.report
    }
}

fn warn_once(error: &MemlockTooSmall) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| log::warn!("guest memory is populated but not locked: {error}"));
}

impl Pinned {
    fn new(range: &MemoryRange) -> Result<Self, PinError> {
        let map_error = |source| PinError::Map {
            offset: range.offset,
            len: range.len,
            source,
        };
        let backing = Backing::check(&range.file, range.offset, range.len).map_err(map_error)?;
        let mapping = Mapping::new(&range.file, backing.offset, backing.len, range.writable)
            .map_err(map_error)?;
        if !backing.hugetlb {
            // Only a hint, and only where the system is set to take it.
            if let Err(error) = mapping.make(Residency::HugePages, 0, backing.len) {
                log::debug!("no transparent huge pages for guest memory: {error}");
            }
        }
        Ok(Self {
            mapping,
            offset: backing.offset,
            bytes: range.len,
            page_size: backing.page_size,
            hugetlb: backing.hugetlb,
            writable: range.writable,
        })
    }

    fn chunk_size(&self) -> usize {
        CHUNK.max(self.page_size as usize)
    }

    fn chunks(&self) -> usize {
        self.mapping.len().div_ceil(self.chunk_size())
    }
}

/// The work of all threads: chunks, taken one after the other.
struct Job<'a> {
    ranges: &'a [Pinned],
    /// Number of the first chunk of each range.
    first_chunk: Vec<usize>,
    chunks: usize,
    total: u64,
    options: &'a PinOptions<'a>,
    began: Instant,
    lock: AtomicBool,
    next: AtomicUsize,
    done: AtomicU64,
    locked: AtomicU64,
    failed: AtomicBool,
    error: Mutex<Option<PinError>>,
}

impl<'a> Job<'a> {
    fn new(ranges: &'a [Pinned], lock: bool, options: &'a PinOptions<'a>, began: Instant) -> Self {
        let mut chunks = 0;
        let first_chunk = ranges
            .iter()
            .map(|range| {
                let first = chunks;
                chunks += range.chunks();
                first
            })
            .collect();
        Self {
            ranges,
            first_chunk,
            chunks,
            total: ranges.iter().map(|range| range.mapping.len() as u64).sum(),
            options,
            began,
            lock: AtomicBool::new(lock),
            next: AtomicUsize::new(0),
            done: AtomicU64::new(0),
            locked: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
        }
    }

    /// Does all chunks, in this thread and others.
    fn run(&self) -> Result<(), PinError> {
        let cpus = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let workers = match self.options.workers {
            Some(workers) => workers.get(),
            None => cpus().min(MAX_WORKERS),
        };
        thread::scope(|scope| {
            // This thread is a worker, too. Fewer others than asked for make
            // it slower, not wrong.
            for _ in 1..workers.min(self.chunks) {
                let builder = thread::Builder::new().name("pin".into());
                if let Err(error) = builder.spawn_scoped(scope, || self.work()) {
                    log::warn!("pinning with fewer threads: {error}");
                    break;
                }
            }
            self.work();
        });
        let error = self
            .error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        error.map_or(Ok(()), Err)
    }

    fn work(&self) {
        while !self.failed.load(Ordering::Relaxed) {
            let chunk = self.next.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.chunks {
                return;
            }
            if let Err(error) = self.may_go_on().and_then(|()| self.pin(chunk)) {
                self.failed.store(true, Ordering::Relaxed);
                let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(error);
            }
        }
    }

    fn may_go_on(&self) -> Result<(), PinError> {
        let (done, total) = (self.done.load(Ordering::Relaxed), self.total);
        if self
            .options
            .cancel
            .is_some_and(|flag| flag.load(Ordering::Relaxed))
        {
            return Err(PinError::Cancelled { done, total });
        }
        if self.options.deadline.is_some_and(|at| Instant::now() >= at) {
            return Err(PinError::Deadline {
                done,
                total,
                elapsed: self.began.elapsed(),
            });
        }
        Ok(())
    }

    fn pin(&self, chunk: usize) -> Result<(), PinError> {
        let index = self.first_chunk.partition_point(|&first| first <= chunk) - 1;
        let range = &self.ranges[index];
        let start = (chunk - self.first_chunk[index]) * range.chunk_size();
        let len = range.chunk_size().min(range.mapping.len() - start);
        let offset = range.offset + start as u64;

        let populate = match range.writable {
            true => Residency::PopulateWrite,
            false => Residency::PopulateRead,
        };
        retry(|| range.mapping.make(populate, start, len)).map_err(|source| {
            PinError::Populate {
                offset,
                len: len as u64,
                source,
            }
        })?;
        if self.lock.load(Ordering::Relaxed) && !range.hugetlb {
            match retry(|| range.mapping.make(Residency::Lock, start, len)) {
                Ok(()) => {
                    self.locked.fetch_add(len as u64, Ordering::Relaxed);
                }
                // Somebody else has used the limit up meanwhile, or the
                // capability is one of a container and does not count.
                Err(error) if self.options.policy == PinPolicy::Prefer => {
                    if self.lock.swap(false, Ordering::Relaxed) {
                        log::warn!("guest memory is populated but not all locked: {error}");
                    }
                }
                Err(source) => {
                    return Err(PinError::Lock {
                        offset,
                        len: len as u64,
                        source,
                    });
                }
            }
        }
        let done = self.done.fetch_add(len as u64, Ordering::Relaxed) + len as u64;
        if let Some(progress) = self.options.progress {
            progress(PinProgress {
                done,
                total: self.total,
            });
        }
        Ok(())
    }
}

/// Repeats `call` when a signal has interrupted it.
fn retry(mut call: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
