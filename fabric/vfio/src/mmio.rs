//! A BAR's registers, mapped into this process.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{self, MapFlags, ProtFlags};

use crate::function::Handle;

/// A part of a BAR that is mapped into this process. It keeps the function
/// open.
///
/// Loads and stores are volatile, little-endian, of exactly their width. They have bus semantics: a
/// load from a removed device returns all ones. While a reset of the function runs, they wait for
/// it.
///
/// The kernel ends a process that touches the BAR while the function's memory
/// decoding is off or it is in D3. [`Function`](crate::Function) keeps both as they
/// must be; code that writes the command or power registers by
/// [`config_write`](crate::Function::config_write) must, too.
#[derive(Debug)]
pub struct RegionMemory {
    // Unmapped on drop, before `handle`: a mapping keeps the device open.
    start: NonNull<u8>,
    len: usize,
    offset: u64,
    file_offset: u64,
    bar: u8,
    handle: Arc<Handle>,
}

// SAFETY: a mapping is not tied to the thread that made it. Nothing hands out
// a Rust reference into it; every access is one volatile load or store.
unsafe impl Send for RegionMemory {}
// SAFETY: as for `Send`; device registers have no data races in Rust's sense,
// as no reference to them exists.
unsafe impl Sync for RegionMemory {}

macro_rules! access {
    ($load:ident, $store:ident, $word:ty) => {
        /// Loads a word at `offset` of this mapping; `None` when it is not
        /// inside or not aligned.
        pub fn $load(&self, offset: u64) -> Option<$word> {
            let at = self.word(offset, size_of::<$word>())?;
            // SAFETY: validity: `word` has checked that the word is inside the
            // mapping and aligned. Aliasing: there are no references into it. What
            // the hardware does meanwhile is what volatile is for.
            Some(<$word>::from_le(unsafe {
                at.cast::<$word>().read_volatile()
            }))
        }

        /// Stores a word at `offset` of this mapping; `None`, and nothing
        /// stored, when it is not inside or not aligned.
        pub fn $store(&self, offset: u64, value: $word) -> Option<()> {
            let at = self.word(offset, size_of::<$word>())?;
            // SAFETY: as for the load.
            unsafe { at.cast::<$word>().write_volatile(value.to_le()) };
            Some(())
        }
    };
}

impl RegionMemory {
    /// Maps `len` bytes at `offset` of BAR `bar`, which begins at `file_offset`
    /// of the function's descriptor. The caller has checked all four.
    pub(crate) fn new(
        handle: Arc<Handle>,
        bar: u8,
        offset: u64,
        len: usize,
        file_offset: u64,
    ) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let from = file_offset + offset;
        // SAFETY: without MAP_FIXED the kernel picks a free place, so no memory
        // of ours is replaced. It checks length and offset.
        let start = unsafe {
            mm::mmap(
                std::ptr::null_mut(),
                len,
                prot,
                MapFlags::SHARED,
                handle.file(),
                from,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self {
            start,
            len,
            offset,
            file_offset: from,
            bar,
            handle,
        })
    }

    access!(load_u8, store_u8, u8);
    access!(load_u16, store_u16, u16);
    access!(load_u32, store_u32, u32);
    access!(load_u64, store_u64, u64);

    /// Number of the BAR.
    pub fn bar(&self) -> u8 {
        self.bar
    }

    /// Where the mapping begins in the BAR, bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Where the mapping begins in the function's descriptor, bytes.
    pub(crate) fn file_offset(&self) -> u64 {
        self.file_offset
    }

    /// Bytes mapped; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Host virtual address of the first byte, for handing to the kernel. It is valid as long as
    /// `self` lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    fn word(&self, offset: u64, size: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let inside = offset.checked_add(size)? <= self.len;
        if !inside || !offset.is_multiple_of(size) {
            return None;
        }
        // SAFETY: `offset` is inside the mapping.
        Some(unsafe { self.as_ptr().add(offset) })
    }
}

impl Drop for RegionMemory {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are those of our mmap, unmapped only here.
        // Nothing points into it but what borrowed it, and IOMMU mappings,
        // whose domain holds an `Arc` of this.
        if let Err(error) = unsafe { mm::munmap(self.start.as_ptr().cast(), self.len) } {
            log::error!("cannot unmap {:#x} bytes of a BAR: {error}", self.len);
        }
    }
}
