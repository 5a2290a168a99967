//! The borrower's end of a borrow: guest RAM in the endpoint's domain, and
//! windows to the device's BARs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farside_error_chain::Chain;
use farside_fabric::memory::{MemoryId, SharedMemory};
use farside_fabric::{
    AddressRange, BorrowerDomain, FabricError, MemoryRange, PageCounts, PeerAddress, RangeTable,
    Usage,
};
use farside_vfio::Function;

use crate::adapter::LutRun;
use crate::peer_space::{PeerRange, endpoint_iova};
use crate::platform::{DomainOps, FunctionOps};
use crate::{Adapter, NtbError};

/// The memory that the borrows of this host have mapped in the endpoint's domain: the same memory at
/// the same peer address once, until no borrow maps it.
#[derive(Debug, Default)]
pub(crate) struct GuestMemory {
    rows: Mutex<RangeTable<PeerAddress, Row>>,
}

#[derive(Debug)]
struct Row {
    id: MemoryId,
    /// Each borrow that maps it has a clone, made and dropped while the rows are locked.
    holders: Arc<()>,
}

impl GuestMemory {
    fn lock(&self) -> MutexGuard<'_, RangeTable<PeerAddress, Row>> {
        // Changed in one step, after the domain.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The mappings of one borrow in the domain of this host's NTB endpoint. Dropping it unmaps what no
/// other borrow maps.
///
/// The caller allocates peer addresses from [`Adapter::peer_space`], which the borrows of all VMs
/// of this host share. Scattered host pages are contiguous there.
#[derive(Debug)]
pub struct BorrowerNtb<F: FunctionOps = Function> {
    adapter: Adapter<F>,
    mapped: RangeTable<PeerAddress, Mapped>,
}

#[derive(Debug)]
struct Mapped {
    holder: Arc<()>,
    /// For status, as the page size.
    file_offset: u64,
    page_size: u64,
}

impl<F: FunctionOps> BorrowerNtb<F> {
    /// Nothing mapped yet.
    pub fn new(adapter: &Adapter<F>) -> Self {
        Self {
            adapter: adapter.clone(),
            mapped: RangeTable::default(),
        }
    }

    /// The adapter that it goes through.
    pub fn adapter(&self) -> &Adapter<F> {
        &self.adapter
    }

    /// Whether everything that is mapped in `window`, by any borrow, is `wanted` there: whether a
    /// device that may reach that reaches nothing else through the window.
    pub fn maps_only(&self, window: &PeerRange, wanted: &[(PeerAddress, MemoryRange)]) -> bool {
        let ids = wanted.iter().filter_map(|(at, memory)| {
            // A range without an id is like no other.
            Some((*at, memory.id().ok()?))
        });
        let ids: BTreeMap<PeerAddress, MemoryId> = ids.collect();
        let rows = self.adapter.guest_memory().lock();
        let in_window = |at: PeerAddress| {
            at.offset_from(window.start())
                .is_some_and(|offset| offset < window.len())
        };
        let mut mapped = rows.rows().iter();
        mapped.all(|(range, row)| {
            !in_window(range.start()) || ids.get(&range.start()) == Some(&row.id)
        })
    }

    /// Unmaps everything that no other borrow maps. For a borrow whose windows are closed.
    ///
    /// # Errors
    /// System errors; as much as possible is unmapped then.
    pub fn unmap_all(&mut self) -> Result<(), FabricError> {
        let all: Vec<_> = self.mapped.rows().iter().map(|(range, _)| *range).collect();
        let mut result = Ok(());
        for range in all {
            let released = self.release(range);
            result = result.and(released);
        }
        result
    }

    /// Mapped bytes, and the page sizes that the IOMMU can use for them.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for (range, mapped) in self.mapped.rows() {
            let (from, to) = (range.start().get(), mapped.file_offset);
            usage.bytes_mapped += range.len();
            usage.borrower_pages += PageCounts::of(from, to, range.len(), mapped.page_size);
        }
        usage
    }

    /// Ends the use of a mapping, and unmaps it if no other borrow uses it.
    fn release(&mut self, range: AddressRange<PeerAddress>) -> Result<(), FabricError> {
        let mut rows = self.adapter.guest_memory().lock();
        let mapped = self.mapped.inside(range)?.first();
        // The row has one holder, and this borrow another.
        if mapped.is_some_and(|(_, mapped)| Arc::strong_count(&mapped.holder) == 2) {
            let domain = self.adapter.function().domain();
            domain.unmap(endpoint_iova(range.start()), range.len())?;
            rows.unmap(range)?;
        }
        self.mapped.unmap(range)?;
        Ok(())
    }
}

impl<F: FunctionOps> BorrowerDomain for BorrowerNtb<F> {
    fn map(&mut self, at: PeerAddress, memory: MemoryRange) -> Result<(), FabricError> {
        let range = AddressRange::new(at, memory.len)?;
        self.mapped.check(range)?;
        let shared = SharedMemory::map_range(&memory).map_err(|source| FabricError::Memory {
            offset: memory.offset,
            len: memory.len,
            source,
        })?;
        let id = memory.id().map_err(|source| FabricError::Memory {
            offset: memory.offset,
            len: memory.len,
            source,
        })?;
        let mut rows = self.adapter.guest_memory().lock();
        let same = rows
            .find(at)
            .filter(|(other, row)| *other == range && row.id == id);
        let holder = match same {
            Some((_, row)) => Arc::clone(&row.holders),
            None => {
                rows.check(range)?;
                let slice = shared.slice(0, shared.len());
                // Unreachable: the range covers all mappings.
                let slice = slice.ok_or(FabricError::BadRange {
                    space: "memory",
                    start: 0,
                    len: memory.len,
                })?;
                let domain = self.adapter.function().domain();
                domain.map(endpoint_iova(at), &slice, memory.writable)?;
                let holders = Arc::new(());
                let holder = Arc::clone(&holders);
                rows.map(range, Row { id, holders })?;
                holder
            }
        };
        let row = Mapped {
            holder,
            file_offset: memory.offset,
            page_size: shared.page_size(),
        };
        self.mapped.map(range, row)
    }

    /// Memory that another borrow of the VM still maps stays mapped for that one. This one's device can
    /// reach it until its window is closed or the other borrow unmaps it, too.
    fn unmap(&mut self, at: PeerAddress, len: u64) -> Result<(), FabricError> {
        let inside = self.mapped.inside(AddressRange::new(at, len)?)?;
        let ranges: Vec<_> = inside.iter().map(|(range, _)| *range).collect();
        ranges.into_iter().try_for_each(|range| self.release(range))
    }
}

impl<F: FunctionOps> Drop for BorrowerNtb<F> {
    fn drop(&mut self) {
        if let Err(error) = self.unmap_all() {
            log::error!(
                "guest RAM stays within the NTB's reach, and its peer addresses are not used again: {error}",
                error = Chain(&error)
            );
            for (range, _) in self.mapped.rows() {
                self.adapter.peer_space().keep(*range);
            }
        }
    }
}

/// A window through which this host's CPUs access memory of the peer host: a part of this host's
/// window BAR. Closed on drop; mappings of it in other processes are not translated then.
pub struct BarWindow<F: FunctionOps = Function> {
    run: LutRun<F>,
    peer_address: PeerAddress,
    len: u64,
}

impl<F: FunctionOps> Adapter<F> {
    /// Opens a window to the `len` bytes at `peer_address`, such as the peer host's
    /// [`crate::ExportedBars`].
    ///
    /// # Errors
    /// [`NtbError::LinkDown`], [`NtbError::WindowSizesDiffer`]; [`NtbError::Limit`] when the LUT
    /// has too little left, or `peer_address` is not sufficiently aligned; [`NtbError::Fabric`] for
    /// an invalid range; hardware errors.
    pub fn open_bar_window(
        &self,
        peer_address: PeerAddress,
        len: u64,
    ) -> Result<BarWindow<F>, NtbError> {
        self.check_link()?;
        AddressRange::new(peer_address, len)?;
        let run = self.open_run(None, peer_address, len)?;
        Ok(BarWindow {
            run,
            peer_address,
            len,
        })
    }
}

impl<F: FunctionOps> BarWindow<F> {
    /// Its offset in the window BAR, in bytes; see [`Adapter::bar_file`] for the BAR's offset in
    /// the descriptor.
    pub fn offset(&self) -> u64 {
        self.run.offset()
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The peer address that it translates to.
    pub fn peer_address(&self) -> PeerAddress {
        self.peer_address
    }

    /// LUT entries that it takes.
    pub fn lut_entries(&self) -> u32 {
        self.run.range().entries
    }
}

impl<F: FunctionOps> std::fmt::Debug for BarWindow<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BarWindow")
            .field("offset", &self.offset())
            .field("len", &self.len)
            .field("peer_address", &self.peer_address)
            .finish()
    }
}
