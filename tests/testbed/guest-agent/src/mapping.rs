//! Shared mappings of device registers and memory: the only unsafe code of this crate.

use std::ffi::c_void;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};
use farside_guest_agent::Width;
use rustix::mm::{MapFlags, ProtFlags, mlock, mmap, mmap_anonymous, munmap};

/// Memory mapped by this process, unmapped on drop. Devices may change it at any time, so
/// all accesses are volatile.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and the pointer does not
// escape.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a file from `offset` on (both multiples of the page size).
    pub fn of_file(file: impl AsFd, offset: u64, len: usize) -> Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses aliases nothing.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                offset,
            )
        }
        .context("mmap")?;
        Self::owning(start, len)
    }

    /// Maps zeroed memory and locks it; `extra` may request huge pages.
    pub fn anonymous(len: usize, extra: MapFlags) -> Result<Self> {
        // SAFETY: as in `of_file`.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::POPULATE | extra,
            )
        }
        .context("mmap")?;
        let mapping = Self::owning(start, len)?;
        // SAFETY: the range is the mapping just made.
        unsafe { mlock(start, len) }.context("mlock")?;
        Ok(mapping)
    }

    fn owning(start: *mut c_void, len: usize) -> Result<Self> {
        let start = NonNull::new(start.cast()).context("mmap returned address 0")?;
        Ok(Mapping { start, len })
    }

    /// The address, for a look-up in `/proc/self/pagemap`.
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    fn at(&self, offset: usize, len: usize) -> Result<*mut u8> {
        let end = offset.checked_add(len);
        ensure!(
            end.is_some_and(|end| end <= self.len),
            "{len} bytes at {offset:#x}: the mapping has {:#x}",
            self.len
        );
        Ok(self.start.as_ptr().wrapping_add(offset))
    }

    /// One read of exactly that width.
    pub fn read(&self, offset: usize, width: Width) -> Result<u64> {
        let bytes = width.bytes() as usize;
        let at = self.at(offset, bytes)?;
        ensure!(
            offset.is_multiple_of(bytes),
            "offset {offset:#x} is not aligned to {bytes}"
        );
        // SAFETY: `at` checked that the access lies in the mapping, which lives as long as
        // self; the mapping is page-aligned and the offset is aligned. A device may change
        // the memory concurrently: hence volatile.
        Ok(unsafe {
            match width {
                Width::U8 => at.read_volatile().into(),
                Width::U16 => at.cast::<u16>().read_volatile().into(),
                Width::U32 => at.cast::<u32>().read_volatile().into(),
                Width::U64 => at.cast::<u64>().read_volatile(),
            }
        })
    }

    /// One write of exactly that width.
    pub fn write(&self, offset: usize, width: Width, value: u64) -> Result<()> {
        let bytes = width.bytes() as usize;
        let at = self.at(offset, bytes)?;
        ensure!(
            offset.is_multiple_of(bytes),
            "offset {offset:#x} is not aligned to {bytes}"
        );
        let fits = width == Width::U64 || value >> (8 * bytes) == 0;
        ensure!(fits, "value {value:#x} does not fit in {bytes} bytes");
        // SAFETY: as in `read`.
        unsafe {
            match width {
                Width::U8 => at.write_volatile(value as u8),
                Width::U16 => at.cast::<u16>().write_volatile(value as u16),
                Width::U32 => at.cast::<u32>().write_volatile(value as u32),
                Width::U64 => at.cast::<u64>().write_volatile(value),
            }
        }
        Ok(())
    }

    /// Copies bytes out.
    pub fn read_bytes(&self, offset: usize, len: usize) -> Result<Vec<u8>> {
        self.at(offset, len)?;
        (offset..offset + len)
            .map(|at| Ok(self.read(at, Width::U8)? as u8))
            .collect()
    }

    /// Copies bytes in.
    pub fn write_bytes(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.at(offset, data.len())?;
        for (i, byte) in data.iter().enumerate() {
            self.write(offset + i, Width::U8, (*byte).into())?;
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was mapped, and no pointer into it is left.
        if let Err(error) = unsafe { munmap(self.start.as_ptr().cast(), self.len) } {
            eprintln!("guest-agent: munmap: {error}");
        }
    }
}
