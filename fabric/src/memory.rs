//! Memory of another process, mapped from a file descriptor.
//!
//! The other side can write to it at any time and may even shrink the file. So there are no
//! references into it, only copies and atomic accesses, and a slice keeps the mapping alive for as
//! long as anything (an I/O in flight included) may touch it. When the file shrinks, accesses go to
//! zero pages from then on, and [`SharedMemory::is_gone`] returns true.

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{Bytes, VolatileSlice};

use crate::{
    Access, PAGE_SIZE, backing::Backing, mapping::Mapping, quota::Charge, sigbus::Guarded,
};

/// A part of a file that is a client's memory.
#[derive(Clone, Debug)]
pub struct MemoryRange {
    /// The file.
    pub file: Arc<File>,
    /// Where the part begins in the file, bytes; a multiple of its page size.
    pub offset: u64,
    /// Bytes; a multiple of 4096.
    pub len: u64,
    /// Whether a device may write to it.
    pub writable: bool,
}

impl MemoryRange {
    /// All `len` bytes of `file`, writable.
    pub fn whole(file: impl Into<File>, len: u64) -> Self {
        Self {
            file: Arc::new(file.into()),
            offset: 0,
            len,
            writable: true,
        }
    }

    /// Which memory this is, whichever descriptor leads to it.
    ///
    /// # Errors
    /// The error of the system call; the file is not a regular one: functions of VFIO groups share an inode.
    pub fn id(&self) -> io::Result<MemoryId> {
        Ok(MemoryId {
            file: file_id(&self.file)?,
            offset: self.offset,
            len: self.len,
            writable: self.writable,
        })
    }
}

/// Two ranges with the same id are the same bytes, with the same rights, while either's file is
/// open. A part of a function's BAR has an id of its own each time it is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemoryId {
    /// Device and inode.
    file: (u64, u64),
    offset: u64,
    len: u64,
    writable: bool,
}

/// Device and inode.
fn file_id(file: &File) -> io::Result<(u64, u64)> {
    let status = rustix::fs::fstat(file)?;
    match rustix::fs::FileType::from_raw_mode(status.st_mode) {
        rustix::fs::FileType::RegularFile => Ok((status.st_dev, status.st_ino)),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Makes a memfd of `len` zero bytes whose size can never change. `name` shows
/// up in `/proc`.
pub fn create_sealed(name: &str, len: u64) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// A mapping of a shared file, for [`SharedMemory`] to be parts of.
#[derive(Debug)]
pub(crate) struct MappedFile {
    // Dropped in this order: the guard must not outlive the mapping, which counts until it is gone.
    guard: Guarded,
    mapping: Mapping,
    _charge: Option<Charge>,
    /// [`Backing::identity`].
    file: (u64, u64),
    /// The function's descriptor, if it is a part of its BAR, until the memory is made private.
    function: Mutex<Option<Arc<File>>>,
    /// Where it begins in the file.
    offset: u64,
    page_size: u64,
    writable: bool,
    /// Parts of it are private pages.
    has_private: AtomicBool,
}

impl MappedFile {
    /// Maps what `backing` describes.
    pub(crate) fn new(
        file: &File,
        backing: &Backing,
        writable: bool,
        charge: Option<Charge>,
    ) -> io::Result<Arc<Self>> {
        let mapping = Mapping::new(file, backing.offset, backing.len, writable)?;
        // Also where the file is sealed: then it cannot shrink, but the system
        // can still be out of pages.
        let guard = Guarded::new(mapping.start(), backing.len, backing.page_size as usize)?;
        Ok(Arc::new(Self {
            guard,
            mapping,
            _charge: charge,
            file: backing.identity,
            function: Mutex::new(match backing.is_function {
                true => Some(Arc::new(file.try_clone()?)),
                false => None,
            }),
            offset: backing.offset,
            page_size: backing.page_size,
            writable,
            has_private: AtomicBool::new(false),
        }))
    }

    /// Whether an access found that the file had shrunk.
    pub(crate) fn is_gone(&self) -> bool {
        self.guard.is_gone()
    }

    fn function(&self) -> MutexGuard<'_, Option<Arc<File>>> {
        // Replaced as a whole.
        self.function.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all of it is the file.
    pub(crate) fn is_whole(&self) -> bool {
        !self.is_gone() && !self.has_private.load(Ordering::Relaxed)
    }

    /// The `len` bytes at `offset` of the file, or `None` when they are not all mapped.
    pub(crate) fn part(self: Arc<Self>, offset: u64, len: u64) -> Option<Arc<SharedMemory>> {
        let skip = usize::try_from(offset.checked_sub(self.offset)?).ok()?;
        let len = usize::try_from(len).ok()?;
        let inside = skip.checked_add(len)? <= self.mapping.len();
        inside.then(|| {
            Arc::new(SharedMemory {
                mapped: self,
                skip,
                len,
                is_private: AtomicBool::new(false),
            })
        })
    }
}

/// A mapped range of a shared file.
#[derive(Debug)]
pub struct SharedMemory {
    mapped: Arc<MappedFile>,
    /// Where the range begins in the mapping.
    skip: usize,
    len: usize,
    is_private: AtomicBool,
}

impl SharedMemory {
    /// Maps `len` bytes at `offset` of `file`. The descriptor is not needed
    /// afterwards.
    ///
    /// # Errors
    /// System errors, and [`io::ErrorKind::InvalidInput`] when the file is no memory, or the range
    /// is empty, unaligned, or not all inside.
    pub fn map(file: OwnedFd, offset: u64, len: usize, writable: bool) -> io::Result<Arc<Self>> {
        Self::map_file(&file.into(), offset, len as u64, writable)
    }

    /// Maps `range`.
    ///
    /// # Errors
    /// As [`SharedMemory::map`].
    pub fn map_range(range: &MemoryRange) -> io::Result<Arc<Self>> {
        Self::map_file(&range.file, range.offset, range.len, range.writable)
    }

    /// Maps `len` new zero bytes that no other process has, rounded up to pages:
    /// for BARs and tests.
    ///
    /// # Errors
    /// What the system reports.
    pub fn anonymous(len: usize) -> io::Result<Arc<Self>> {
        let len = len.max(1).next_multiple_of(PAGE_SIZE as usize);
        Self::map(create_sealed("farside", len as u64)?, 0, len, true)
    }

    fn map_file(file: &File, offset: u64, len: u64, writable: bool) -> io::Result<Arc<Self>> {
        let backing = Backing::check(file, offset, len)?;
        let mapped = MappedFile::new(file, &backing, writable, None)?;
        Ok(Self::whole(mapped, &backing, len))
    }

    /// Maps `range`, whose check resulted in `backing`, for as long as `charge` counts.
    pub(crate) fn map_counted(
        range: &MemoryRange,
        backing: &Backing,
        charge: Charge,
    ) -> io::Result<Arc<Self>> {
        let mapped = MappedFile::new(&range.file, backing, range.writable, Some(charge))?;
        Ok(Self::whole(mapped, backing, range.len))
    }

    fn whole(mapped: Arc<MappedFile>, backing: &Backing, len: u64) -> Arc<Self> {
        Arc::new(Self {
            mapped,
            skip: backing.skip,
            len: len as usize, // no more than is mapped
            is_private: AtomicBool::new(false),
        })
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the pages it consists of.
    pub fn page_size(&self) -> u64 {
        self.mapped.page_size
    }

    /// Where it begins in the file, bytes.
    pub fn file_offset(&self) -> u64 {
        self.mapped.offset + self.skip as u64
    }

    /// Whether it is mapped for writing.
    pub fn is_writable(&self) -> bool {
        self.mapped.writable
    }

    /// Whether an access found that the file had shrunk (or that the system had no page for it),
    /// or it was [made private](Self::make_private). From then on all of it is private zero pages,
    /// which no other process sees.
    pub fn is_gone(&self) -> bool {
        self.mapped.is_gone() || self.is_private.load(Ordering::Relaxed)
    }

    /// Takes the memory from those who still hold slices of it: replaces it by private zero pages,
    /// where an I/O in flight ends. Other ranges of the same mapping must not overlap it.
    ///
    /// # Errors
    /// What the system reports, such as for a part of a huge page; nothing has changed then.
    pub(crate) fn make_private(&self) -> io::Result<()> {
        // First: a file that is mapped anew must not get these pages.
        self.mapped.has_private.store(true, Ordering::Relaxed);
        self.mapped.mapping.make_private(self.skip, self.len)?;
        self.is_private.store(true, Ordering::Relaxed);
        // A late I/O keeps the rest.
        *self.mapped.function() = None;
        Ok(())
    }

    /// Whether both are of one mapping, and overlap.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.mapped, &other.mapped)
            && self.skip < other.skip + other.len
            && other.skip < self.skip + self.len
    }

    /// The part `[offset, offset + len)`, or `None` when it is not all inside.
    pub fn slice(self: &Arc<Self>, offset: usize, len: usize) -> Option<HostSlice> {
        (offset.checked_add(len)? <= self.len()).then(|| HostSlice {
            memory: Arc::clone(self),
            offset,
            len,
        })
    }
}

/// A part of a [`SharedMemory`], which it keeps mapped. A clone costs one
/// atomic increment.
#[derive(Clone, Debug)]
pub struct HostSlice {
    memory: Arc<SharedMemory>,
    offset: usize,
    len: usize,
}

impl HostSlice {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The descriptor of the function of whose BAR it is a part, and where it begins in that, bytes.
    pub fn function(&self) -> Option<(Arc<File>, u64)> {
        let file = self.memory.mapped.function().clone()?;
        Some((file, self.memory.file_offset() + self.offset as u64))
    }

    /// Which memory this is, as [`MemoryRange::id`].
    pub fn id(&self) -> MemoryId {
        MemoryId {
            file: self.memory.mapped.file,
            offset: self.memory.file_offset() + self.offset as u64,
            len: self.len as u64,
            writable: self.memory.is_writable(),
        }
    }

    /// The memory that it is a part of.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Where it begins in [`HostSlice::memory`], bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Host virtual address of the first byte, for handing to the kernel. It
    /// is good for as long as `self` or a clone of it lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.volatile().ptr_guard_mut().as_ptr()
    }

    /// The part `[offset, offset + len)`, or `None` when it is not all inside.
    pub fn slice(&self, offset: usize, len: usize) -> Option<HostSlice> {
        (offset.checked_add(len)? <= self.len).then(|| HostSlice {
            memory: Arc::clone(&self.memory),
            offset: self.offset + offset,
            len,
        })
    }

    /// Copies from the start of the slice and returns how many bytes: all of
    /// `buf`, or as many as the slice has.
    pub fn read(&self, buf: &mut [u8]) -> usize {
        self.volatile().read(buf, 0).unwrap_or(0)
    }

    /// Copies to the start of the slice and returns how many bytes: all of
    /// `buf`, or as many as the slice has; none when it is of memory that may
    /// not be written (one translated for [`crate::Access::Write`] may).
    pub fn write(&self, buf: &[u8]) -> usize {
        let writable = self.writable();
        writable.and_then(|to| to.write(buf, 0).ok()).unwrap_or(0)
    }

    /// Loads a little-endian word at `offset`, or `None` when it is not inside
    /// or not aligned.
    pub fn load_u32(&self, offset: usize, order: Ordering) -> Option<u32> {
        self.volatile()
            .load::<u32>(offset, order)
            .ok()
            .map(u32::from_le)
    }

    /// Stores a little-endian word at `offset`, or returns `None` when it is
    /// not inside, not aligned, or not to be written.
    pub fn store_u32(&self, offset: usize, value: u32, order: Ordering) -> Option<()> {
        self.writable()?.store(value.to_le(), offset, order).ok()
    }

    /// As [`HostSlice::load_u32`], 64 bits.
    pub fn load_u64(&self, offset: usize, order: Ordering) -> Option<u64> {
        self.volatile()
            .load::<u64>(offset, order)
            .ok()
            .map(u64::from_le)
    }

    /// As [`HostSlice::store_u32`], 64 bits.
    pub fn store_u64(&self, offset: usize, value: u64, order: Ordering) -> Option<()> {
        self.writable()?.store(value.to_le(), offset, order).ok()
    }

    /// The bytes, for code that works on [`VolatileSlice`]s; `None` to write to memory that may not be
    /// written.
    pub fn volatile_for(&self, access: Access) -> Option<VolatileSlice<'_>> {
        match access {
            Access::Read => Some(self.volatile()),
            Access::Write => self.writable(),
        }
    }

    /// The bytes, when they may be written: a store to a read-only mapping
    /// would end the process.
    fn writable(&self) -> Option<VolatileSlice<'_>> {
        self.memory.is_writable().then(|| self.volatile())
    }

    fn volatile(&self) -> VolatileSlice<'_> {
        let memory = &self.memory;
        memory
            .mapped
            .mapping
            .volatile(memory.skip + self.offset, self.len)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        os::unix::{fs::FileExt, net::UnixStream},
    };

    use vm_memory::ReadVolatile;

    use super::*;

    /// A system call that has begun, as of a medium that is late, writes after the memory was taken.
    #[test]
    fn a_late_write_of_the_kernel_does_not_reach_memory_that_was_made_private() {
        const LEN: usize = 4 * PAGE_SIZE as usize;
        let file = File::from(create_sealed("ram", LEN as u64).unwrap());
        let whole = Backing::check(&file, 0, LEN as u64).unwrap();
        let mapped = MappedFile::new(&file, &whole, true, None).unwrap();
        let part = |page: u64| {
            Arc::clone(&mapped)
                .part(page * PAGE_SIZE, PAGE_SIZE)
                .unwrap()
        };
        let (taken, kept) = (part(1), part(2));
        let slice = taken.slice(8, 4).unwrap();
        let (mut medium, mut device) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let late = slice.clone();
            let read = scope.spawn(move || device.read_exact_volatile(&mut late.volatile()));
            // The first part of the data arrives; the read of the rest waits in the kernel.
            medium.write_all(b"ab").unwrap();
            let mut begun = [0; 2];
            while &begun != b"ab" {
                slice.read(&mut begun);
                std::thread::yield_now();
            }
            taken.make_private().unwrap();
            medium.write_all(b"cd").unwrap();
            read.join().unwrap().unwrap();
        });
        let mut bytes = [0; 4];
        slice.read(&mut bytes);
        assert_eq!(&bytes, b"\0\0cd", "zero pages, and the rest of the data");
        file.read_exact_at(&mut bytes, PAGE_SIZE + 8).unwrap();
        assert_eq!(&bytes, b"ab\0\0");
        assert!(taken.is_gone() && !kept.is_gone() && !mapped.is_whole());
        kept.slice(0, 1).unwrap().write(&[7]);
        file.read_exact_at(&mut bytes[..1], 2 * PAGE_SIZE).unwrap();
        assert_eq!(bytes[0], 7);
    }

    #[test]
    fn ranges_of_one_mapping_overlap_or_do_not() {
        let file = File::from(create_sealed("ram", 4 * PAGE_SIZE).unwrap());
        let whole = Backing::check(&file, 0, 4 * PAGE_SIZE).unwrap();
        let map = || MappedFile::new(&file, &whole, true, None).unwrap();
        let (mapped, other) = (map(), map());
        let part = |mapped: &Arc<MappedFile>, page: u64, pages: u64| {
            let part = Arc::clone(mapped).part(page * PAGE_SIZE, pages * PAGE_SIZE);
            part.unwrap()
        };
        let two = part(&mapped, 1, 2);
        for (page, pages, overlaps) in [(0, 1, false), (0, 2, true), (2, 2, true), (3, 1, false)] {
            assert_eq!(two.overlaps(&part(&mapped, page, pages)), overlaps);
            assert_eq!(part(&mapped, page, pages).overlaps(&two), overlaps);
            assert!(!two.overlaps(&part(&other, page, pages)));
        }
    }
}
