//! Memory of another process, mapped from a file descriptor.
//!
//! The other side can write to it at any time and may even shrink the file.
//! So there are no references into it, only copies and atomic accesses, and a
//! slice keeps the mapping alive for as long as anything (an I/O in flight
//! included) may touch it.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering},
};

use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

/// A mapped range of a shared file.
#[derive(Debug)]
pub struct SharedMemory {
    region: MmapRegion<()>,
}

impl SharedMemory {
    /// Maps `len` bytes at `offset` of `file`.
    pub fn map(
        file: OwnedFd,
        offset: u64,
        len: usize,
        writable: bool,
    ) -> std::io::Result<Arc<Self>> {
        use rustix::mm::{MapFlags, ProtFlags};
        let mut prot = ProtFlags::READ;
        if writable {
            prot |= ProtFlags::WRITE;
        }
        let region = MmapRegion::build(
            Some(FileOffset::new(file.into(), offset)),
            len,
            prot.bits() as i32,
            (MapFlags::SHARED | MapFlags::NORESERVE).bits() as i32,
        )
        .map_err(std::io::Error::other)?;
        Ok(Arc::new(Self { region }))
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.region.size()
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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

/// A part of a [`SharedMemory`], which it keeps mapped.
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

    /// Copies from the start of the slice; `buf` must not be longer than it.
    pub fn read(&self, buf: &mut [u8]) {
        self.volatile()
            .read_slice(buf, 0)
            .expect("caller keeps within the slice");
    }

    /// Copies to the start of the slice; `buf` must not be longer than it.
    pub fn write(&self, buf: &[u8]) {
        self.volatile()
            .write_slice(buf, 0)
            .expect("caller keeps within the slice");
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
    /// not inside or not aligned.
    pub fn store_u32(&self, offset: usize, value: u32, order: Ordering) -> Option<()> {
        self.volatile().store(value.to_le(), offset, order).ok()
    }

    fn volatile(&self) -> VolatileSlice<'_> {
        self.memory
            .region
            .get_slice(self.offset, self.len)
            .expect("checked when the slice was made")
    }
}
