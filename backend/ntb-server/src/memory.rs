//! The DMA mappings of a VM.
//!
//! A VM with a vIOMMU maps thousands of single pages of one file: the file is mapped
//! once, whole, and the pages are slices of that mapping.

use std::{
    collections::BTreeMap,
    fs::File,
    os::fd::OwnedFd,
    sync::{Arc, Weak},
};

use farside_daemon::RateLimit;
use farside_fabric::{
    Iova,
    memory::{HostSlice, SharedMemory},
};
use farside_vfio_user::{DmaMap, DmaUnmap};
use rustix::{
    fs::{OFlags, fcntl_getfl, fstat},
    io::Errno,
};

/// Most mappings. Bounds memory. Above the negotiated `max_dma_maps`, which QEMU
/// exceeds for a VM with a vIOMMU. Enough for 4 GiB in pages of 4 KiB.
const MAX_MAPPINGS: usize = 1 << 20;

/// Most files that are mapped at once. Bounds this process's mappings; QEMU has one file
/// for each memory backend, and at most 256 memory slots.
const MAX_FILES: usize = 512;

/// All mappings, by IOVA.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    mappings: BTreeMap<u64, Mapping>,
    files: BTreeMap<FileKey, Weak<SharedMemory>>,
    /// The mapping that was hit last.
    last: Option<(u64, Mapping)>,
    /// Limits log lines on memory that cannot be mapped.
    unmappable: RateLimit,
}

#[derive(Clone, Debug)]
struct Mapping {
    len: u64,
    readable: bool,
    writable: bool,
    /// `None`: reachable by DMA commands only.
    memory: Option<HostSlice>,
}

/// Device, inode and access mode.
type FileKey = (u64, u64, u32);

/// The result of a look-up.
#[derive(Debug)]
pub(crate) enum Found<'a> {
    /// Shared memory.
    Shared {
        memory: &'a HostSlice,
        /// Offset of the access in `memory`.
        offset: usize,
    },
    /// Mapped without permission for the access.
    Denied,
    /// Reachable by DMA commands to the VMM, if at all.
    Unknown,
}

/// The direction of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

impl Memory {
    /// Handles a `DMA_MAP`.
    pub(crate) fn map(&mut self, map: DmaMap) -> Result<(), Errno> {
        if self.overlaps(map.address, map.size) {
            return Err(Errno::EXIST);
        }
        if self.mappings.len() >= MAX_MAPPINGS {
            return Err(Errno::NOSPC);
        }
        let (address, len) = (map.address, map.size);
        let (readable, writable) = (map.readable, map.writable);
        let memory = match map.fd {
            Some(fd) => self.share(fd, map.offset, len),
            None => None,
        };
        self.last = None;
        let mapping = Mapping {
            len,
            readable,
            writable,
            memory,
        };
        self.mappings.insert(address, mapping);
        Ok(())
    }

    /// Handles a `DMA_UNMAP` of all whole mappings within the range. An empty range is
    /// no error: QEMU unmaps the whole address space of a vIOMMU, and ranges that it
    /// never mapped, and prints a line for each refusal.
    pub(crate) fn unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        self.last = None;
        let DmaUnmap::Range { address, size } = unmap else {
            self.mappings.clear();
            return Ok(());
        };
        let last = address + (size - 1); // the range was checked not to wrap
        let before = self.mappings.range(..address).next_back();
        if before.is_some_and(|(start, mapping)| start + (mapping.len - 1) >= address) {
            return Err(Errno::INVAL);
        }
        let inside = self.mappings.range(address..=last);
        if let Some((start, mapping)) = inside.clone().next_back()
            && start + (mapping.len - 1) > last
        {
            return Err(Errno::INVAL);
        }
        let inside: Vec<u64> = inside.map(|(start, _)| *start).collect();
        for start in inside {
            self.mappings.remove(&start);
        }
        Ok(())
    }

    /// Removes all mappings. The limit of log lines stays: a VMM that connects again
    /// must not get a new allowance.
    pub(crate) fn clear(&mut self) {
        *self = Self {
            unmappable: std::mem::take(&mut self.unmappable),
            ..Self::default()
        };
    }

    /// Number of mappings, and number of shared ones.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let shared = self.mappings.values().filter(|m| m.memory.is_some());
        (self.mappings.len(), shared.count())
    }

    /// Looks up an IOVA. Mappings are page-aligned, so an access that does not cross a
    /// page is entirely inside the mapping of its first byte.
    pub(crate) fn find(&mut self, iova: Iova, access: Access) -> Found<'_> {
        let address = iova.get();
        let hit = matches!(&self.last, Some((start, mapping))
            if address.wrapping_sub(*start) < mapping.len);
        if !hit {
            let before = self.mappings.range(..=address).next_back();
            let found = before.filter(|(start, mapping)| address - *start < mapping.len);
            let Some((start, mapping)) = found else {
                return Found::Unknown;
            };
            self.last = Some((*start, mapping.clone()));
        }
        let Some((start, mapping)) = &self.last else {
            return Found::Unknown;
        };
        let allowed = match access {
            Access::Read => mapping.readable,
            Access::Write => mapping.writable,
        };
        match &mapping.memory {
            _ if !allowed => Found::Denied,
            Some(memory) => Found::Shared {
                memory,
                // Below the slice's length, a usize.
                offset: (address - start) as usize,
            },
            None => Found::Unknown,
        }
    }

    fn overlaps(&self, address: u64, size: u64) -> bool {
        let last = address + (size - 1); // checked not to wrap
        let before = self.mappings.range(..=last).next_back();
        before.is_some_and(|(start, mapping)| start + (mapping.len - 1) >= address)
    }

    /// Maps the memory behind a descriptor. Failure is no error: DMA commands to the VMM
    /// reach the memory, too.
    fn share(&mut self, fd: OwnedFd, offset: u64, len: u64) -> Option<HostSlice> {
        let shared = self.try_share(fd, offset, len);
        if let Err(error) = &shared
            && let Some(held_back) = self.unmappable.allow()
        {
            log::warn!(
                "cannot map memory of {len:#x} bytes at file offset {offset:#x} ({error}): each access to it needs a DMA command{held_back}"
            );
        }
        shared.ok()
    }

    fn try_share(&mut self, fd: OwnedFd, offset: u64, len: u64) -> std::io::Result<HostSlice> {
        let stat = fstat(&fd)?;
        let mode = fcntl_getfl(&fd)? & OFlags::RWMODE;
        let key = (stat.st_dev, stat.st_ino, mode.bits());
        let slice = |memory: &Arc<SharedMemory>| {
            memory.slice(usize::try_from(offset).ok()?, usize::try_from(len).ok()?)
        };
        let known = self.files.get(&key).and_then(Weak::upgrade);
        if let Some(slice) = known.as_ref().and_then(slice) {
            return Ok(slice);
        }
        self.files.retain(|_, file| file.strong_count() != 0);
        if self.files.len() >= MAX_FILES {
            return Err(std::io::Error::other(format!(
                "memory is in more than {MAX_FILES} files"
            )));
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let whole = SharedMemory::map(
            File::from(fd).into(),
            0,
            usize::try_from(size).map_err(std::io::Error::other)?,
            mode != OFlags::RDONLY,
        )?;
        self.files.insert(key, Arc::downgrade(&whole));
        slice(&whole)
            .ok_or_else(|| std::io::Error::other(format!("the file has only {size:#x} bytes")))
    }
}

#[cfg(test)]
mod tests {
    use farside_fabric::memory::create_sealed;

    use super::*;

    const PAGE: u64 = 4096;

    fn map(address: u64, size: u64, fd: Option<(&OwnedFd, u64)>) -> DmaMap {
        DmaMap {
            address,
            size,
            offset: fd.map_or(0, |(_, offset)| offset),
            readable: true,
            writable: true,
            fd: fd.map(|(fd, _)| fd.try_clone().unwrap()),
        }
    }

    fn unmap(address: u64, size: u64) -> DmaUnmap {
        DmaUnmap::Range { address, size }
    }

    /// File offset of an address.
    fn file_offset(memory: &mut Memory, address: u64) -> Option<usize> {
        match memory.find(Iova::new(address), Access::Write) {
            Found::Shared { memory, offset } => Some(memory.offset() + offset),
            Found::Denied | Found::Unknown => None,
        }
    }

    #[test]
    fn thousands_of_pages_of_one_file_are_one_mapping_of_it() {
        const PAGES: u64 = 20_000;
        let file = create_sealed("test", PAGES * PAGE).unwrap();
        let mut memory = Memory::default();
        // Backwards, so that no two are contiguous in both.
        for page in 0..PAGES {
            let offset = (PAGES - 1 - page) * PAGE;
            memory
                .map(map(page * PAGE, PAGE, Some((&file, offset))))
                .unwrap();
        }
        assert_eq!(memory.files.len(), 1);
        let whole = memory.files.values().next().unwrap().upgrade().unwrap();
        assert_eq!(Arc::strong_count(&whole), PAGES as usize + 1);
        for page in [0, 1, 77, PAGES - 1] {
            let offset = file_offset(&mut memory, page * PAGE + 5);
            assert_eq!(offset, Some(((PAGES - 1 - page) * PAGE) as usize + 5));
        }
        drop(whole);
        memory.unmap(unmap(0, PAGES * PAGE)).unwrap();
        assert!(memory.files.values().all(|file| file.upgrade().is_none()));
    }

    #[test]
    fn a_file_that_has_grown_is_mapped_again() {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, PAGE).unwrap();
        let mut memory = Memory::default();
        memory.map(map(0, PAGE, Some((&file, 0)))).unwrap();
        rustix::fs::ftruncate(&file, 2 * PAGE).unwrap();
        memory.map(map(PAGE, PAGE, Some((&file, PAGE)))).unwrap();
        assert_eq!(file_offset(&mut memory, PAGE + 1), Some(PAGE as usize + 1));
        assert_eq!(file_offset(&mut memory, 1), Some(1));
    }

    #[test]
    fn memory_that_cannot_be_mapped_is_left_to_the_vmm() {
        let file = create_sealed("test", PAGE).unwrap();
        let mut memory = Memory::default();
        memory.map(map(0, PAGE, None)).unwrap();
        memory.map(map(PAGE, PAGE, Some((&file, PAGE)))).unwrap();
        let device = std::fs::File::open("/dev/zero").unwrap().into();
        memory.map(map(2 * PAGE, PAGE, Some((&device, 0)))).unwrap();
        for address in [0, PAGE, 2 * PAGE, 3 * PAGE] {
            assert!(matches!(
                memory.find(Iova::new(address), Access::Read),
                Found::Unknown
            ));
        }
        assert_eq!(memory.counts(), (3, 0));
    }

    #[test]
    fn the_flags_of_a_mapping_hold() {
        let file = create_sealed("test", PAGE).unwrap();
        let mut memory = Memory::default();
        let read_only = DmaMap {
            writable: false,
            ..map(0, PAGE, Some((&file, 0)))
        };
        memory.map(read_only).unwrap();
        assert!(matches!(
            memory.find(Iova::new(0), Access::Read),
            Found::Shared { .. }
        ));
        assert!(matches!(
            memory.find(Iova::new(0), Access::Write),
            Found::Denied
        ));
    }

    #[test]
    fn overlaps_and_halves_are_refused() {
        let mut memory = Memory::default();
        memory.map(map(2 * PAGE, 2 * PAGE, None)).unwrap();
        for address in [PAGE, 2 * PAGE, 3 * PAGE] {
            let error = memory.map(map(address, 2 * PAGE, None));
            assert_eq!(error, Err(Errno::EXIST));
        }
        memory.map(map(0, 2 * PAGE, None)).unwrap();
        memory.map(map(u64::MAX - PAGE + 1, PAGE, None)).unwrap();
        for (address, size) in [(0, PAGE), (PAGE, 2 * PAGE), (3 * PAGE, PAGE)] {
            assert_eq!(memory.unmap(unmap(address, size)), Err(Errno::INVAL));
        }
        memory.unmap(unmap(8 * PAGE, PAGE)).unwrap();
        assert_eq!(memory.counts().0, 3);
        memory.unmap(unmap(0, 4 * PAGE)).unwrap();
        assert_eq!(memory.counts().0, 1);
        memory.unmap(DmaUnmap::All).unwrap();
        assert_eq!(memory.counts().0, 0);
    }

    #[test]
    fn unmapping_invalidates_the_last_hit() {
        let file = create_sealed("test", 2 * PAGE).unwrap();
        let mut memory = Memory::default();
        memory.map(map(0, PAGE, Some((&file, 0)))).unwrap();
        assert_eq!(file_offset(&mut memory, 8), Some(8));
        memory.unmap(unmap(0, PAGE)).unwrap();
        assert_eq!(file_offset(&mut memory, 8), None);
        memory.map(map(0, PAGE, Some((&file, PAGE)))).unwrap();
        assert_eq!(file_offset(&mut memory, 8), Some(PAGE as usize + 8));
    }
}
