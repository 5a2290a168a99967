//! Keeping guest RAM resident while a device may reach it.
//!
//! A device writes to physical pages, so before a window opens each page must
//! exist, and must stay. [`Pins`] maps the memory into this process, locks the
//! mapping, and has the kernel populate it, in parallel, in huge pages where the
//! memory has them. The CPU never touches a byte of it, so neither its contents
//! nor a file that shrinks matter here.
//!
//! Locking counts against `RLIMIT_MEMLOCK`, which is small for ordinary users. The
//! limit is checked first; [`PinPolicy`] selects the behaviour if it is too small.
//! Real hardware needs more than a lock (the kernel may still move a locked page):
//! there, mapping in an IOMMU domain pins as well, under the same limit.

mod error;
mod memlock;
mod populate;
mod room;

use std::{
    num::NonZeroUsize,
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use farside_error_chain::Chain;
use serde::{Deserialize, Serialize};

use crate::{
    MemoryRange, PageCounts,
    backing::Backing,
    mapping::{Mapping, Residency},
};
use memlock::may_lock;
use populate::Job;

pub use error::PinError;
pub use memlock::{MemlockTooSmall, check_memlock};
pub use room::{RoomWatch, check_room, check_room_for_more};

/// What to do when the memlock limit is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PinPolicy {
    /// Refuse. For fabrics with real hardware.
    Require,
    /// Populate without locking, and log that once. For the `soft` fabric, whose
    /// DMA goes through page tables and finds a page again.
    Prefer,
}

/// How to pin.
#[derive(Clone, Copy)]
pub struct PinOptions<'a> {
    /// What to do when the memlock limit is too small.
    pub policy: PinPolicy,
    /// How many threads populate; left out, one for each CPU, at most 16.
    pub workers: Option<NonZeroUsize>,
    /// The deadline. Checked after every 16 MiB (or huge page).
    pub deadline: Option<Instant>,
    /// Cancels when true; checked equally often.
    pub cancel: Option<&'a AtomicBool>,
    /// Asked by the workers before each chunk whether the rest fits in the
    /// host's memory, which others use, too: a [`RoomWatch`], by custom.
    pub room: Option<&'a (dyn Fn() -> Result<(), PinError> + Sync)>,
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
            room: None,
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

/// Checks the memlock limit and the host's memory for all of `ranges` together,
/// before any of them is pinned. Huge pages are never swapped and need no lock.
///
/// # Errors
/// [`PinError::TooLarge`] when they do not fit in the host's memory.
/// [`PinError::Memlock`] when the limit is too small and `policy` requires it;
/// otherwise it is logged, once. [`PinError::Map`] for a range that cannot be
/// pinned at all.
pub fn check(ranges: &[MemoryRange], policy: PinPolicy) -> Result<(), PinError> {
    check_room(ranges)?;
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
    /// Bytes requested; the mapping has whole pages of the file.
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
        let bytes_locked = lock(&mapped, options.policy)?;
        Job::new(&mapped, options, began).run()?;

        let mut report = PinReport::default();
        for range in &mapped {
            let len = range.mapping.len() as u64;
            report.bytes_pinned += range.bytes;
            report.pages += PageCounts::of(range.offset, range.offset, len, range.page_size);
            if range.hugetlb {
                report.bytes_locked += range.bytes;
            }
        }
        report.bytes_locked += bytes_locked;
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

/// Locks all of `ranges` that can be swapped. Returns how many bytes that is:
/// none, where the limit is too small and `policy` has it so.
///
/// The kernel locks what is there, and each page that comes later: populating
/// can then be done in parallel, which one `mlock` after another could not.
fn lock(ranges: &[Pinned], policy: PinPolicy) -> Result<u64, PinError> {
    let swappable = || ranges.iter().filter(|range| !range.hugetlb);
    let to_lock = swappable().map(|range| range.mapping.len() as u64).sum();
    if !may_lock(to_lock, policy)? {
        return Ok(0);
    }
    let mut locked = 0;
    for range in swappable() {
        let len = range.mapping.len();
        match range.mapping.make(Residency::Lock, 0, len) {
            Ok(()) => locked += len as u64,
            // Another process has used the limit up meanwhile, or the capability is
            // one of a container and does not count.
            Err(error) if policy == PinPolicy::Prefer => {
                log::warn!(
                    "guest memory is not all locked: {error}",
                    error = Chain(&error)
                );
                break;
            }
            Err(source) => {
                return Err(PinError::Lock {
                    offset: range.offset,
                    len: len as u64,
                    source,
                });
            }
        }
    }
    Ok(locked)
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
            // Only a hint, which depends on the system's settings.
            if let Err(error) = mapping.make(Residency::HugePages, 0, backing.len) {
                log::debug!(
                    "no transparent huge pages for guest memory: {error}",
                    error = Chain(&error)
                );
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
}
