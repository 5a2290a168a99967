//! Checks that the memory to populate fits in the host's free memory.

use std::{
    collections::BTreeMap,
    io,
    sync::Mutex,
    time::{Duration, Instant},
};

use rustix::fs::fstat;

use super::PinError;
use crate::{
    MemoryRange,
    backing::Backing,
    host_memory::{HostMemory, Pages},
};

/// The requested memory of one file.
struct Wanted {
    pages: Pages,
    bytes: u64,
    resident: u64,
    size: u64,
}

impl Wanted {
    /// Bytes to populate, if the resident pages are among the requested ones.
    fn absent(&self) -> u64 {
        // Parts of one huge page are counted more than once.
        self.bytes.min(self.size).saturating_sub(self.resident)
    }

    /// The same, if the resident pages are elsewhere in the file.
    fn absent_of_more(&self) -> u64 {
        self.bytes.min(self.size.saturating_sub(self.resident))
    }
}

/// Checks that all pages of `ranges` that are not resident yet fit in the
/// memory that the host has left now. `ranges` are all that is used of their
/// files: what is resident of a file is taken to be in them.
///
/// # Errors
/// [`PinError::TooLarge`], with the numbers; [`PinError::Map`] for a range that
/// cannot be pinned at all.
pub fn check_room(ranges: &[MemoryRange]) -> Result<(), PinError> {
    check(ranges, Wanted::absent)
}

/// [`check_room`] while memory is populated, by several threads: as often as takes a tenth of the
/// time, since it scans every range.
pub struct RoomWatch<'a> {
    ranges: &'a [MemoryRange],
    next: Mutex<Instant>,
}

/// Shortest time between two checks of a [`RoomWatch`]: a host populates some
/// 40 MB meanwhile, which is less than what is kept in reserve.
const WATCH_STEP: Duration = Duration::from_millis(10);

impl<'a> RoomWatch<'a> {
    /// For ranges that have been checked just now.
    pub fn new(ranges: &'a [MemoryRange]) -> Self {
        Self {
            ranges,
            next: Mutex::new(Instant::now() + WATCH_STEP),
        }
    }

    /// Checks, if it is time to.
    ///
    /// # Errors
    /// As [`check_room`].
    pub fn check(&self) -> Result<(), PinError> {
        // One thread scans for all.
        let Ok(mut next) = self.next.try_lock() else {
            return Ok(());
        };
        let began = Instant::now();
        if began < *next {
            return Ok(());
        }
        check_room(self.ranges)?;
        let took = began.elapsed();
        *next = began + took + (took * 9).max(WATCH_STEP);
        Ok(())
    }
}

/// As [`check_room`], for one part more of a file of which other parts are in
/// use already.
///
/// # Errors
/// As [`check_room`].
pub fn check_room_for_more(range: &MemoryRange) -> Result<(), PinError> {
    check(std::slice::from_ref(range), Wanted::absent_of_more)
}

fn check(ranges: &[MemoryRange], absent: fn(&Wanted) -> u64) -> Result<(), PinError> {
    check_against(HostMemory::read, ranges, absent)
}

fn check_against(
    host: impl FnOnce() -> HostMemory,
    ranges: &[MemoryRange],
    absent: fn(&Wanted) -> u64,
) -> Result<(), PinError> {
    if needs(ranges, absent)?.is_empty() {
        return Ok(());
    }
    // Read before what is absent: guest and workers populate pages meanwhile,
    // and a page that is taken in between must not count as absent, too.
    let host = host();
    for (pages, bytes) in needs(ranges, absent)? {
        host.room_for(bytes, pages)?;
    }
    Ok(())
}

/// Bytes to populate, by kind of page.
fn needs(
    ranges: &[MemoryRange],
    absent: fn(&Wanted) -> u64,
) -> Result<Vec<(Pages, u64)>, PinError> {
    let mut needs: Vec<(Pages, u64)> = Vec::new();
    for file in files(ranges)? {
        let bytes = absent(&file);
        match needs.iter_mut().find(|(pages, _)| *pages == file.pages) {
            Some((_, sum)) => *sum = sum.saturating_add(bytes),
            None => needs.push((file.pages, bytes)),
        }
    }
    needs.retain(|(_, bytes)| *bytes > 0);
    Ok(needs)
}

/// What is wanted of each file that is made of base pages.
fn files(ranges: &[MemoryRange]) -> Result<impl Iterator<Item = Wanted>, PinError> {
    let mut files: BTreeMap<(u64, u64), Wanted> = BTreeMap::new();
    for range in ranges {
        let error = |source: io::Error| PinError::Map {
            offset: range.offset,
            len: range.len,
            source,
        };
        let backing = Backing::check(&range.file, range.offset, range.len).map_err(error)?;
        // QEMU reserves a file's huge pages when it maps it. An empty pool
        // fails populating, and no process; and while a page is zeroed it is
        // neither free nor in the file, so a pool of just the size would
        // seem too small.
        if backing.hugetlb {
            continue;
        }
        let status = fstat(&range.file).map_err(|errno| error(errno.into()))?;
        let number = |value| u64::try_from(value).unwrap_or(0);
        let file = files
            .entry((status.st_dev, status.st_ino))
            .or_insert(Wanted {
                pages: Pages::Base,
                bytes: 0,
                resident: number(status.st_blocks).saturating_mul(512),
                size: number(status.st_size),
            });
        file.bytes = file.bytes.saturating_add(backing.len as u64);
    }
    Ok(files.into_values())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{SharedMemory, create_sealed};

    const GIB: u64 = 1 << 30;
    /// More than any host has.
    const TOO_MUCH: u64 = 1 << 50;

    fn part(of: &MemoryRange, offset: u64, len: u64) -> MemoryRange {
        MemoryRange {
            offset,
            len,
            ..of.clone()
        }
    }

    fn sparse(len: u64) -> MemoryRange {
        MemoryRange::whole(create_sealed("ram", len).unwrap(), len)
    }

    fn is_too_large(result: Result<(), PinError>) -> bool {
        match result {
            Ok(()) => false,
            Err(PinError::TooLarge(_)) => true,
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn a_page_that_is_populated_during_the_check_is_not_missed_twice() {
        const LEN: u64 = 8 << 20;
        const RESERVE: u64 = 64 << 20;
        let ram = sparse(LEN);
        // The host has just enough, and the guest populates a part of it now.
        let host = || {
            let memory = SharedMemory::map_range(&part(&ram, 0, LEN / 2)).unwrap();
            let half = memory.slice(0, memory.len()).unwrap();
            assert_eq!(half.write(&vec![1; memory.len()]), memory.len());
            HostMemory::read_with(|path| {
                let left = (RESERVE + LEN / 2) >> 10;
                (path == "proc/meminfo").then(|| format!("MemAvailable: {left} kB\n"))
            })
        };
        check_against(host, std::slice::from_ref(&ram), Wanted::absent).unwrap();
    }

    #[test]
    fn what_no_host_has_is_refused_and_what_it_has_is_not() {
        let ram = sparse(TOO_MUCH);
        assert!(is_too_large(check_room(std::slice::from_ref(&ram))));
        assert!(is_too_large(check_room_for_more(&ram)));
        // The parts count together.
        let half = TOO_MUCH / 2;
        let parts = [part(&ram, 0, half), part(&ram, half, half)];
        assert!(is_too_large(check_room(&parts)));
        assert!(!is_too_large(check_room(&[part(&ram, 0, 4096)])));
        assert!(!is_too_large(check_room(&[])));
    }

    #[test]
    fn what_is_resident_is_not_counted() {
        let wanted = |resident| Wanted {
            pages: Pages::Base,
            bytes: 2 * GIB,
            resident,
            size: 4 * GIB,
        };
        // By the file's blocks, as they are for a file that is all there.
        let ram = sparse(1 << 20);
        rustix::io::pwrite(&*ram.file, &[1; 8192], 4096).unwrap();
        let file = files(std::slice::from_ref(&ram)).unwrap().next().unwrap();
        assert_eq!(
            (file.bytes, file.resident, file.size),
            (1 << 20, 8192, 1 << 20)
        );
        let absent = |resident| {
            let wanted = wanted(resident);
            (wanted.absent() / GIB, wanted.absent_of_more() / GIB)
        };
        assert_eq!(absent(0), (2, 2));
        assert_eq!(absent(GIB), (1, 2));
        assert_eq!(absent(3 * GIB), (0, 1));
        assert_eq!(absent(4 * GIB), (0, 0));
    }

    #[test]
    fn a_file_that_is_not_in_memory_is_refused() {
        // Of sysfs.
        let file = std::fs::File::open("/sys/kernel/uevent_seqnum").unwrap();
        let range = MemoryRange::whole(file, 4096);
        let Err(PinError::Map { source, .. }) = files(&[range]).map(|_| ()) else {
            panic!("accepted");
        };
        assert!(source.to_string().contains("not in memory"), "{source}");
    }
}
