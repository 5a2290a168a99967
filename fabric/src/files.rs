//! The memory files of one borrower.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use crate::{
    FabricError, MemoryRange, SharedQuota,
    backing::Backing,
    memory::{MappedFile, SharedMemory},
};

/// The files that a borrower shares as memory, within its [`Quota`](crate::Quota).
///
/// A file is mapped for writing once, whole, however many ranges of it are mapped: a mapping of a
/// domain then costs no mapping of this process. It stays mapped as long as any of those ranges. A
/// range for reading only, such as firmware in guest RAM, is mapped by itself: the file would count
/// twice. So is a part of a function's BAR.
#[derive(Debug)]
pub struct SharedFiles {
    quota: SharedQuota,
    /// Those mapped for writing, by file system and inode number.
    mapped: BTreeMap<(u64, u64), Weak<MappedFile>>,
}

impl SharedFiles {
    /// No files yet.
    pub fn new(quota: SharedQuota) -> Self {
        Self {
            quota,
            mapped: BTreeMap::new(),
        }
    }

    /// Maps `range`.
    ///
    /// # Errors
    /// [`FabricError::Quota`], and [`FabricError::Memory`] with the errors of
    /// [`SharedMemory::map`].
    pub fn map(&mut self, range: &MemoryRange) -> Result<Arc<SharedMemory>, FabricError> {
        let (offset, len) = (range.offset, range.len);
        let failed = |source| FabricError::Memory {
            offset,
            len,
            source,
        };
        let backing = Backing::check(&range.file, offset, len).map_err(failed)?;
        if !range.writable || backing.is_function {
            let charge = self.quota.take(backing.len as u64)?;
            return SharedMemory::map_counted(range, &backing, charge).map_err(failed);
        }
        let key = backing.identity;
        let mapped = self.mapped.get(&key).and_then(Weak::upgrade);
        // A file that has shrunk or grown is mapped anew, as is one of which parts were taken away.
        let mapped = mapped.filter(|mapped| mapped.is_whole());
        if let Some(part) = mapped.and_then(|mapped| mapped.part(offset, len)) {
            return Ok(part);
        }
        let whole = Backing::check(&range.file, 0, backing.file_size).map_err(failed)?;
        let charge = self.quota.take(whole.len as u64)?;
        let mapped = MappedFile::new(&range.file, &whole, true, Some(charge));
        let mapped = mapped.map_err(failed)?;
        self.mapped.retain(|_, mapped| mapped.strong_count() > 0);
        self.mapped.insert(key, Arc::downgrade(&mapped));
        // Not reached: the file was at least as large when its size was read.
        let short = || failed(std::io::ErrorKind::UnexpectedEof.into());
        mapped.part(offset, len).ok_or_else(short)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, sync::Arc};

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::{Budget, PAGE_SIZE, QuotaError};

    const MIB: u64 = 1 << 20;

    fn file(len: u64) -> Arc<File> {
        let fd = memfd_create("files", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        Arc::new(fd.into())
    }

    fn part(file: &Arc<File>, offset: u64, len: u64) -> MemoryRange {
        MemoryRange {
            file: Arc::clone(file),
            offset,
            len,
            writable: true,
        }
    }

    fn budget(bytes: u64, mappings: usize) -> (SharedFiles, SharedQuota) {
        let quota = SharedQuota::from(Budget { bytes, mappings }.shared_by(1));
        (SharedFiles::new(quota.clone()), quota)
    }

    #[test]
    fn a_file_is_mapped_once_however_many_parts_are_mapped() {
        let (mut files, quota) = budget(MIB, 1);
        let ram = file(MIB);
        let mut parts: Vec<_> = (0..MIB / PAGE_SIZE)
            .map(|n| {
                // Each from a descriptor of its own, as they arrive.
                let again = Arc::new(ram.try_clone().unwrap());
                files.map(&part(&again, n * PAGE_SIZE, PAGE_SIZE)).unwrap()
            })
            .collect();
        assert_eq!(
            quota.used_of().0,
            Budget {
                bytes: MIB,
                mappings: 1
            }
        );
        for (n, part) in (0u64..).zip(&parts) {
            part.slice(0, 1).unwrap().write(&[n as u8]);
            assert_eq!(part.file_offset(), n * PAGE_SIZE);
        }
        let all = files.map(&part(&ram, 0, MIB)).unwrap();
        let mut found = [0];
        all.slice(7 * PAGE_SIZE as usize, 1)
            .unwrap()
            .read(&mut found);
        assert_eq!(found, [7]);
        drop(all);
        let last = parts.pop();
        parts.clear();
        assert_eq!(quota.used_of().0.mappings, 1);
        drop(last);
        assert_eq!(
            quota.used_of().0,
            Budget {
                bytes: 0,
                mappings: 0
            }
        );
    }

    #[test]
    fn more_than_the_quota_is_refused_before_it_is_mapped() {
        let (mut files, quota) = budget(2 * MIB, 2);
        // The whole file counts, not the part.
        let error = files.map(&part(&file(3 * MIB), 0, PAGE_SIZE)).unwrap_err();
        let bytes = matches!(error, FabricError::Quota(QuotaError::Bytes { .. }));
        assert!(bytes, "{error}");
        let held: Vec<_> = (0..2)
            .map(|_| files.map(&part(&file(PAGE_SIZE), 0, PAGE_SIZE)).unwrap())
            .collect();
        let error = files
            .map(&part(&file(PAGE_SIZE), 0, PAGE_SIZE))
            .unwrap_err();
        let count = matches!(
            error,
            FabricError::Quota(QuotaError::Files { limit: 2, .. })
        );
        assert!(count, "{error}");
        drop(held);
        assert_eq!(quota.used_of().0.mappings, 0);
        files.map(&part(&file(2 * MIB), 0, PAGE_SIZE)).unwrap();
        // A failed mapping does not count.
        files.map(&part(&file(MIB), MIB, PAGE_SIZE)).unwrap_err();
        assert_eq!(quota.used_of().0.mappings, 0);
    }

    #[test]
    fn a_file_that_has_grown_or_shrunk_is_mapped_anew() {
        let (mut files, quota) = budget(16 * MIB, 4);
        let ram = file(MIB);
        let first = files.map(&part(&ram, 0, MIB)).unwrap();
        ftruncate(&ram, 2 * MIB).unwrap();
        let second = files.map(&part(&ram, MIB, MIB)).unwrap();
        assert_eq!(
            quota.used_of().0,
            Budget {
                bytes: 3 * MIB,
                mappings: 2
            }
        );
        ftruncate(&ram, 0).unwrap();
        second.slice(0, 1).unwrap().write(&[1]);
        assert!(second.is_gone());
        ftruncate(&ram, MIB).unwrap();
        let third = files.map(&part(&ram, 0, MIB)).unwrap();
        third.slice(0, 1).unwrap().write(&[3]);
        assert!(!third.is_gone() && !first.is_gone());
    }

    #[test]
    fn memory_that_is_mapped_for_reading_is_not_written() {
        let (mut files, quota) = budget(16 * MIB, 4);
        let ram = file(MIB);
        let rom = MemoryRange {
            writable: false,
            ..part(&ram, 0, PAGE_SIZE)
        };
        let writable = files.map(&part(&ram, 0, PAGE_SIZE)).unwrap();
        let rom = files.map(&rom).unwrap();
        assert_eq!(rom.slice(0, 1).unwrap().write(&[1]), 0);
        assert_eq!(writable.slice(0, 1).unwrap().write(&[1]), 1);
        assert_eq!(
            quota.used_of().0,
            Budget {
                bytes: MIB + PAGE_SIZE,
                mappings: 2
            }
        );
    }
}
