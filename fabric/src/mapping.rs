//! An owned `mmap` of a shared file.
//!
//! The file belongs to another process, too: its contents can change at any time,
//! so no reference to them is ever made, and it can shrink, so a CPU access can
//! raise SIGBUS (see [`crate::sigbus`]; system calls get `EFAULT` instead).
#![allow(unsafe_code)]

use std::{fs::File, io, ptr::NonNull};

use rustix::mm::{self, MapFlags, MlockFlags, ProtFlags};
use vm_memory::VolatileSlice;

/// Mapped bytes; unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is not tied to the thread that made it. Nothing hands out
// a Rust reference into it; accesses are volatile or atomic, and the methods
// that take `&self` change only which pages are resident.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

/// Operations on resident pages. None of them changes their contents.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Residency {
    /// Back every page with memory, as a write would.
    PopulateWrite,
    /// Back every page with memory, as a read would.
    PopulateRead,
    /// Use huge pages where the file's memory can.
    HugePages,
    /// Keep every page in memory from the moment that it is there. All count
    /// against the memlock limit at once.
    Lock,
}

impl Mapping {
    /// Maps `len` bytes at `offset` of `file`, shared.
    pub(crate) fn new(file: &File, offset: u64, len: usize, writable: bool) -> io::Result<Self> {
        let mut prot = ProtFlags::READ;
        prot.set(ProtFlags::WRITE, writable);
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED the kernel picks a free place, so no memory of ours is
        // replaced. Length and offset are checked by the kernel. The module documentation covers
        // concurrent changes of the file.
        let start = unsafe { mm::mmap(std::ptr::null_mut(), len, prot, flags, file, offset)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { start, len })
    }

    /// Host virtual address of the first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The `len` bytes at `offset`, for volatile access; no bytes when they
    /// are not all inside.
    pub(crate) fn volatile(&self, offset: usize, len: usize) -> VolatileSlice<'_> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        let (offset, len) = if inside { (offset, len) } else { (0, 0) };
        // SAFETY: validity and length: the bytes are inside the mapping,
        // checked above. Lifetime: the slice borrows the mapping, which
        // unmaps on drop only. Aliasing: other processes and threads may
        // change the bytes at any time; VolatileSlice makes only volatile and
        // atomic accesses and no references. Truncation: the owner of an
        // accessed mapping has registered it with `sigbus`.
        unsafe { VolatileSlice::new(self.start().add(offset), len) }
    }

    /// Replaces the `len` bytes at `offset`, whole pages, by private zero pages. No access to this
    /// part of the file comes after it, be it by a thread or by a system call that has begun, unless
    /// that has pinned the file's pages (direct I/O).
    pub(crate) fn make_private(&self, offset: usize, len: usize) -> io::Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: validity and length: inside the mapping, checked above, so MAP_FIXED replaces
        // nothing else; the kernel refuses parts of pages. Aliasing: there are no references into
        // the mapping; other threads and system calls see either the file or zeroes. The
        // replacement is readable and writable, as its accesses need, and `drop` unmaps it.
        unsafe { mm::mmap_anonymous(self.start().add(offset).cast(), len, prot, flags) }
            .map(|_| ())
            .map_err(io::Error::from)
    }

    /// Changes the residency of the `len` bytes at `offset`, both whole pages.
    pub(crate) fn make(&self, what: Residency, offset: usize, len: usize) -> io::Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let advice = match what {
            Residency::PopulateWrite => mm::Advice::LinuxPopulateWrite,
            Residency::PopulateRead => mm::Advice::LinuxPopulateRead,
            Residency::HugePages => mm::Advice::LinuxHugepage,
            Residency::Lock => {
                let flags = MlockFlags::ONFAULT;
                // SAFETY: validity and length: inside the mapping, checked
                // above. Locking changes no contents and needs no exclusive
                // access, nor that the file is as long.
                return unsafe { mm::mlock_with(self.start().add(offset).cast(), len, flags) }
                    .map_err(io::Error::from);
            }
        };
        // SAFETY: as for mlock; none of these advices discards or changes
        // contents.
        unsafe { mm::madvise(self.start().add(offset).cast(), len, advice) }
            .map_err(io::Error::from)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are those of our mmap, unmapped only here.
        // Everything that points into it borrows the mapping, or (pointers
        // given to the kernel) is documented to live shorter.
        if let Err(error) = unsafe { mm::munmap(self.start().cast(), self.len) } {
            log::error!("cannot unmap {:#x} bytes: {error}", self.len);
        }
    }
}
