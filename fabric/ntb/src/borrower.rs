//! The borrower's end of a borrow: guest RAM in the endpoint's domain, and
//! windows to the device's BARs.

use farside_error_chain::Chain;
use farside_fabric::memory::SharedMemory;
use farside_fabric::{
    AddressRange, BorrowerDomain, FabricError, MemoryRange, PageCounts, PeerAddress, RangeTable,
    Usage,
};
use farside_vfio::Function;

use crate::adapter::LutRun;
use crate::peer_space::endpoint_iova;
use crate::platform::{DomainOps, FunctionOps};
use crate::{Adapter, NtbError};

/// The mappings of one borrow in the domain of this host's NTB endpoint. Dropping it unmaps
/// everything.
///
/// The caller allocates peer addresses from [`Adapter::peer_space`], which the borrows of all VMs
/// of this host share. Scattered host pages are contiguous there.
#[derive(Debug)]
pub struct BorrowerNtb<F: FunctionOps = Function> {
    adapter: Adapter<F>,
    mapped: RangeTable<PeerAddress, Mapped>,
}

/// For status.
#[derive(Debug)]
struct Mapped {
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

    /// Unmaps everything.
    ///
    /// # Errors
    /// System errors; as much as possible is unmapped then.
    pub fn unmap_all(&mut self) -> Result<(), FabricError> {
        let all: Vec<_> = self.mapped.rows().iter().map(|(range, _)| *range).collect();
        let mut result = Ok(());
        for range in all {
            let unmapped = self.unmap_row(range);
            result = result.and(unmapped);
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

    fn unmap_row(&mut self, range: AddressRange<PeerAddress>) -> Result<(), FabricError> {
        let domain = self.adapter.function().domain();
        domain.unmap(endpoint_iova(range.start()), range.len())?;
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
        let slice = shared.slice(0, shared.len());
        // Unreachable: the range covers all mappings.
        let slice = slice.ok_or(FabricError::BadRange {
            space: "memory",
            start: 0,
            len: memory.len,
        })?;
        let domain = self.adapter.function().domain();
        domain.map(endpoint_iova(at), &slice, memory.writable)?;
        let row = Mapped {
            file_offset: memory.offset,
            page_size: shared.page_size(),
        };
        self.mapped.map(range, row)
    }

    fn unmap(&mut self, at: PeerAddress, len: u64) -> Result<(), FabricError> {
        let inside = self.mapped.inside(AddressRange::new(at, len)?)?;
        let ranges: Vec<_> = inside.iter().map(|(range, _)| *range).collect();
        ranges
            .into_iter()
            .try_for_each(|range| self.unmap_row(range))
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
