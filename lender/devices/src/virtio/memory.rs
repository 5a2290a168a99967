//! Guest memory as `virtio-queue` accesses it: [`GuestMemory`] over [`Dma`].
//!
//! Each access is by IOVA and is translated as any DMA of a model: before bus-master enable nothing is
//! reachable, and what is refused is counted as a fault. `vm-memory`'s own `IommuMemory` would need all
//! guest memory as regions, and a second IOTLB beside the fabric's.

use std::{
    cell::{Cell, OnceCell, RefCell},
    iter::FusedIterator,
};

use farside_fabric::{Access, Fault, Iova, memory::HostSlice};
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryMmap, Permissions, VolatileSlice,
    bitmap::BS, guest_memory::GuestMemorySliceIterator,
};

use crate::{Dma, state::crash_point};

/// Bytes that are translated at once, at most: descriptors of a table are read one by one.
const STEP: usize = 4096;

/// A structure with repeated accesses, such as a ring. Its translation is kept until the device is
/// quiesced, as [`Dma::translate`] allows.
#[derive(Debug)]
pub(super) struct KeptRange {
    base: Iova,
    len: usize,
    access: Access,
    /// Contiguous in host memory, each, and in order.
    pieces: Vec<HostSlice>,
}

impl KeptRange {
    /// The range `[base, base + len)`, of which nothing is translated yet.
    pub(super) fn new(base: Iova, len: usize, access: Access) -> Self {
        Self {
            base,
            len,
            access,
            pieces: Vec::new(),
        }
    }

    /// Drops the translation, as a quiesce requires.
    pub(super) fn forget(&mut self) {
        self.pieces.clear();
    }

    /// Whether it is translated, or can be.
    pub(super) fn is_reachable(&self, dma: &mut dyn Dma) -> bool {
        let is_gone = |piece: &HostSlice| piece.memory().is_gone();
        let is_kept = !self.pieces.is_empty() && !self.pieces.iter().any(is_gone);
        is_kept || dma.reaches(self.base, self.len, self.access)
    }

    /// Translates the range unless it is.
    pub(super) fn translate(&mut self, dma: &mut dyn Dma) -> Result<(), Fault> {
        // Taken away while the device could not be quiesced.
        if self.pieces.iter().any(|piece| piece.memory().is_gone()) {
            self.pieces.clear();
        }
        match self.pieces.is_empty() {
            true => dma.gather(self.base, self.len, self.access, &mut self.pieces),
            false => Ok(()),
        }
    }

    /// Up to `len` bytes at `at`, if they are in the range and the access is its.
    fn find(&self, at: u64, len: usize, access: Access) -> Option<VolatileSlice<'_>> {
        if access != self.access {
            return None;
        }
        let mut skip = usize::try_from(at.checked_sub(self.base.get())?).ok()?;
        for piece in &self.pieces {
            match skip.checked_sub(piece.len()) {
                Some(behind) => skip = behind,
                None => return part(piece, skip, len, access),
            }
        }
        None
    }
}

/// Up to `len` bytes of `slice` from `skip` on.
fn part(slice: &HostSlice, skip: usize, len: usize, access: Access) -> Option<VolatileSlice<'_>> {
    let len = len.min(slice.len().checked_sub(skip)?);
    slice.volatile_for(access)?.subslice(skip, len).ok()
}

/// A translation, and those made later.
struct Found {
    at: u64,
    access: Access,
    slice: HostSlice,
    next: OnceCell<Box<Found>>,
}

/// Guest memory for a few accesses to a queue.
pub(super) struct QueueMemory<'a> {
    dma: RefCell<&'a mut dyn Dma>,
    kept: &'a [KeptRange],
    /// Memory that stands for what the guest has at this address.
    instead: Option<(u64, VolatileSlice<'a>)>,
    /// Other translations, which the slices that are handed out borrow.
    found: OnceCell<Box<Found>>,
    fault: Cell<Option<Fault>>,
}

impl<'a> QueueMemory<'a> {
    pub(super) fn new(
        dma: &'a mut dyn Dma,
        kept: &'a [KeptRange],
        instead: Option<(u64, VolatileSlice<'a>)>,
    ) -> Self {
        Self {
            dma: RefCell::new(dma),
            kept,
            instead,
            found: OnceCell::new(),
            fault: Cell::new(None),
        }
    }

    /// The last access that was refused.
    pub(super) fn fault(&self) -> Option<Fault> {
        self.fault.get()
    }

    /// 1 to `len` bytes at `at`.
    fn piece(&self, at: u64, len: usize, access: Access) -> Option<VolatileSlice<'_>> {
        crash_point();
        if let Some((from, slice)) = &self.instead
            && let Some(skip) = at.checked_sub(*from).map(|skip| skip as usize)
            && skip < slice.len()
        {
            return slice.subslice(skip, len.min(slice.len() - skip)).ok();
        }
        let mut kept = self.kept.iter();
        if let Some(slice) = kept.find_map(|range| range.find(at, len, access)) {
            return Some(slice);
        }
        let mut last = &self.found;
        while let Some(found) = last.get() {
            let skip = at
                .checked_sub(found.at)
                .and_then(|n| usize::try_from(n).ok());
            match skip {
                Some(skip) if access == found.access && skip < found.slice.len() => {
                    return part(&found.slice, skip, len, access);
                }
                _ => last = &found.next,
            }
        }
        let step = len.max(STEP - (at as usize & (STEP - 1)));
        let slice = self.dma.borrow_mut().translate(Iova::new(at), step, access);
        match slice {
            Ok(slice) => {
                let found = last.get_or_init(|| {
                    Box::new(Found {
                        at,
                        access,
                        slice,
                        next: OnceCell::new(),
                    })
                });
                part(&found.slice, 0, len, access)
            }
            Err(fault) => {
                self.fault.set(Some(fault));
                None
            }
        }
    }
}

fn access_of(permissions: Permissions) -> Access {
    match permissions.has_write() {
        true => Access::Write,
        false => Access::Read,
    }
}

impl GuestMemory for QueueMemory<'_> {
    /// There is none.
    type PhysicalMemory = GuestMemoryMmap<()>;
    type Bitmap = ();

    fn check_range(&self, at: GuestAddress, count: usize, access: Permissions) -> bool {
        let mut slices = Slices {
            memory: self,
            at: at.0,
            left: count,
            access: access_of(access),
        };
        slices.all(|slice| slice.is_ok())
    }

    fn get_slices<'a>(
        &'a self,
        at: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, BS<'a, ()>>, GuestMemoryError> {
        Ok(Slices {
            memory: self,
            at: at.0,
            left: count,
            access: access_of(access),
        })
    }
}

/// The host memory behind a range, piece by piece.
struct Slices<'a, 'd> {
    memory: &'a QueueMemory<'d>,
    at: u64,
    left: usize,
    access: Access,
}

impl<'a> Iterator for Slices<'a, '_> {
    type Item = Result<VolatileSlice<'a>, GuestMemoryError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        match self.memory.piece(self.at, self.left, self.access) {
            Some(slice) => {
                self.at = self.at.wrapping_add(slice.len() as u64);
                self.left -= slice.len();
                Some(Ok(slice))
            }
            None => {
                self.left = 0;
                Some(Err(GuestMemoryError::InvalidGuestAddress(GuestAddress(
                    self.at,
                ))))
            }
        }
    }
}

impl FusedIterator for Slices<'_, '_> {}

impl<'a> GuestMemorySliceIterator<'a, ()> for Slices<'a, '_> {}
