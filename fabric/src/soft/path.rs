//! One borrow's path: three tables, and a cache of their composed translations.

use std::{
    io,
    sync::{Arc, Weak},
};

use super::{
    adapter::{LutRun, Requester},
    iotlb::{Entry, Iotlb},
};
use crate::{
    Access, AddressRange, BorrowerDomain, BusAddress, FabricError, Fault, FaultLog, FaultReason,
    Iova, LenderPath, MemoryRange, PageCounts, PeerAddress, RangeTable, Usage, WindowUse,
    memory::{HostSlice, SharedMemory},
};

/// The path of one borrowed device's DMA, from [`Adapter::attach`] (`super::Adapter`) on. Dropping
/// it closes and releases everything.
///
/// [`Adapter::attach`]: super::Adapter::attach
#[derive(Debug)]
pub struct Path {
    bus_master: bool,
    iotlb: Iotlb,
    /// The lender's IOMMU domain of the device.
    lender: RangeTable<Iova, ToBus>,
    /// The NTB's windows, as far as they are this path's. (Those of others are
    /// out of reach anyway: `lender` maps nothing to them.)
    windows: RangeTable<BusAddress, ToPeer>,
    /// The borrower's IOMMU domain of the NTB endpoint.
    borrower: RangeTable<PeerAddress, ToMemory>,
    /// Memory that is unmapped but was still in use when it was.
    draining: Vec<Weak<SharedMemory>>,
    faults: Arc<FaultLog>,
    // Released after its windows, which hold it.
    requester: Arc<Requester>,
}

/// Translates an IOVA by the lender's IOMMU. Windows are always readable and writable; write
/// permission is checked by the borrower.
#[derive(Debug)]
struct ToBus {
    bus: BusAddress,
}

/// Translates a bus address by the NTB.
#[derive(Debug)]
struct ToPeer {
    peer_address: PeerAddress,
    lut: LutRun,
}

/// Translates a peer address by the borrower's IOMMU.
#[derive(Debug)]
struct ToMemory {
    memory: Arc<SharedMemory>,
}

impl Path {
    pub(super) fn new(device: &str, requester: Arc<Requester>) -> Self {
        Self {
            bus_master: false,
            iotlb: Iotlb::default(),
            lender: RangeTable::default(),
            windows: RangeTable::default(),
            borrower: RangeTable::default(),
            draining: Vec::new(),
            faults: Arc::new(FaultLog::new(device)),
            requester,
        }
    }

    /// The device's refused DMAs. The log outlives the path.
    pub fn faults(&self) -> &Arc<FaultLog> {
        &self.faults
    }

    /// Whether the device may master the bus.
    pub fn bus_master(&self) -> bool {
        self.bus_master
    }

    /// The number of mappings in the borrower's domain, of [`crate::MAX_MAPPINGS`].
    pub fn mappings(&self) -> usize {
        self.borrower.rows().len()
    }

    /// Maps `memory` at `at` in the borrower's domain; see
    /// [`BorrowerDomain::map`].
    ///
    /// # Errors
    /// As there.
    pub fn map_peer(&mut self, at: PeerAddress, memory: MemoryRange) -> Result<(), FabricError> {
        self.borrower.check(AddressRange::new(at, memory.len)?)?;
        let shared = SharedMemory::map_range(&memory).map_err(|source| FabricError::Memory {
            offset: memory.offset,
            len: memory.len,
            source,
        })?;
        self.map_shared(at, shared)
    }

    /// As [`Path::map_peer`], for memory that is mapped into this process already.
    ///
    /// # Errors
    /// As there.
    pub fn map_shared(
        &mut self,
        at: PeerAddress,
        memory: Arc<SharedMemory>,
    ) -> Result<(), FabricError> {
        let range = AddressRange::new(at, memory.len() as u64)?;
        // The IOTLB remembers no refusals, so what it has stays true.
        self.borrower.map(range, ToMemory { memory })
    }

    /// Unmaps all mappings inside the `len` bytes at `at`; see
    /// [`BorrowerDomain::unmap`]. Slices that were translated before keep their
    /// memory until they are dropped: quiesce the device first, or wait until
    /// [`Path::draining`] is false.
    ///
    /// # Errors
    /// As there.
    pub fn unmap_peer(&mut self, at: PeerAddress, len: u64) -> Result<(), FabricError> {
        let range = AddressRange::new(at, len)?;
        let unmapped = self.borrower.unmap(range)?;
        self.retire(unmapped);
        Ok(())
    }

    /// Unmaps all of the borrower's domain; as [`Path::unmap_peer`].
    pub fn unmap_peer_all(&mut self) {
        let unmapped = self.borrower.clear();
        self.retire(unmapped);
    }

    /// As [`Path::unmap_peer`], from a device that does not stop: what it still uses of the memory
    /// is replaced by private pages first, where a DMA in flight ends. Nothing reaches the memory
    /// afterwards.
    ///
    /// # Errors
    /// As there, and [`FabricError::InUse`] if the memory cannot be replaced, or is mapped at
    /// another peer address, too; it stays mapped then.
    pub fn seize_peer(&mut self, at: PeerAddress, len: u64) -> Result<(), FabricError> {
        self.iotlb.clear();
        let range = AddressRange::new(at, len)?;
        let taken = self.borrower.inside(range)?;
        let stays = |at: PeerAddress| at < range.start() || at >= range.end();
        for memory in in_use(taken) {
            let mut others = self.borrower.rows().iter();
            if others.any(|(row, other)| stays(row.start()) && other.memory.overlaps(memory)) {
                return Err(FabricError::InUse {
                    offset: memory.file_offset(),
                    len: memory.len() as u64,
                    source: io::Error::other("it is mapped at another peer address, too"),
                });
            }
        }
        seize(taken)?;
        self.unmap_peer(at, len)
    }

    /// As [`Path::seize_peer`], for all of the borrower's domain.
    ///
    /// # Errors
    /// As there.
    pub fn seize_peer_all(&mut self) -> Result<(), FabricError> {
        self.iotlb.clear();
        seize(self.borrower.rows())?;
        self.unmap_peer_all();
        Ok(())
    }

    /// Whether anything beside the tables holds memory that is mapped within
    /// the `len` bytes at `at`: a DMA that has begun, or a translation that the
    /// device keeps. If not, no DMA reaches it once it is unmapped.
    pub fn in_use(&mut self, at: PeerAddress, len: u64) -> bool {
        // Its entries hold memory, too.
        self.iotlb.clear();
        let inside = AddressRange::new(at, len).and_then(|range| self.borrower.inside(range));
        inside.is_ok_and(|rows| in_use(rows).next().is_some())
    }

    /// Whether an I/O still holds memory that has been unmapped since: until
    /// this is false, a DMA that had begun may reach it.
    pub fn draining(&mut self) -> bool {
        self.draining.retain(|memory| memory.strong_count() > 0);
        !self.draining.is_empty()
    }

    /// Translates the run that begins at `iova`: up to `len` bytes, fewer where
    /// a mapping or a window ends. The slice is of writable memory when
    /// `access` is a write.
    ///
    /// Neither locks nor allocates, but for faults.
    ///
    /// # Errors
    /// The refusal, already counted and logged in [`Path::faults`].
    #[inline]
    pub fn translate(
        &mut self,
        iova: Iova,
        len: usize,
        access: Access,
    ) -> Result<HostSlice, Fault> {
        let found = match self.bus_master {
            true => match self.iotlb.find(iova) {
                Some(entry) => run(entry, iova, len, access),
                None => self.walk(iova, len, access),
            },
            false => Err(FaultReason::BusMasterDisabled),
        };
        found.map_err(|reason| self.refuse(iova, len, access, reason))
    }

    /// Whether [`Path::translate`] would succeed for each part of `[iova, iova + len)`. Counts no refusal.
    pub fn reaches(&mut self, iova: Iova, len: usize, access: Access) -> bool {
        let mut done = 0;
        while self.bus_master && done < len {
            let at = iova.wrapping_add(done as u64);
            let found = match self.iotlb.find(at) {
                Some(entry) => run(entry, at, len - done, access),
                None => self.walk(at, len - done, access),
            };
            match found {
                Ok(slice) => done += slice.len(),
                Err(_) => return false,
            }
        }
        self.bus_master
    }

    /// Asks the three tables, one after the other, and remembers the answer.
    #[cold]
    fn walk(&mut self, iova: Iova, len: usize, access: Access) -> Result<HostSlice, FaultReason> {
        // Each table narrows `run` to what its mapping covers.
        let (range, to_bus) = self.lender.find(iova).ok_or(FaultReason::LenderDomain)?;
        let mut run = Around::new(*range, iova);
        let bus = to_bus.bus.checked_add(run.before);
        let bus = bus.ok_or(FaultReason::LenderDomain)?;

        let (range, to_peer) = self.windows.find(bus).ok_or(FaultReason::Window)?;
        let within = Around::new(*range, bus);
        let peer_address = to_peer.peer_address.checked_add(within.before);
        let peer_address = peer_address.ok_or(FaultReason::Window)?;
        run = run.and(within);

        let found = self.borrower.find(peer_address);
        let (range, to_memory) = found.ok_or(FaultReason::BorrowerDomain)?;
        let within = Around::new(*range, peer_address);
        let offset = within.before;
        run = run.and(within);

        let entry = Entry {
            start: Iova::new(iova.get() - run.before),
            len: run.before + run.from,
            memory: Arc::clone(&to_memory.memory),
            offset: offset - run.before,
            writable: to_memory.memory.is_writable(),
        };
        self.iotlb.insert(entry);
        let entry = self.iotlb.find(iova).ok_or(FaultReason::LenderDomain)?;
        self::run(entry, iova, len, access)
    }

    #[cold]
    fn refuse(&self, iova: Iova, len: usize, access: Access, reason: FaultReason) -> Fault {
        let fault = Fault {
            iova,
            len: len as u64,
            access,
            reason,
        };
        self.faults.record(fault);
        fault
    }

    /// Drops unmapped memory, but tracks the memory still in use.
    fn retire(&mut self, unmapped: Vec<(AddressRange<PeerAddress>, ToMemory)>) {
        self.iotlb.clear();
        self.draining.retain(|memory| memory.strong_count() > 0);
        for (_, target) in unmapped {
            let memory = Arc::downgrade(&target.memory);
            drop(target);
            if memory.strong_count() > 0 {
                self.draining.push(memory);
            }
        }
    }
}

/// The memory that is in use elsewhere.
fn in_use(
    rows: &[(AddressRange<PeerAddress>, ToMemory)],
) -> impl Iterator<Item = &Arc<SharedMemory>> {
    let memories = rows.iter().map(|(_, target)| &target.memory);
    memories.filter(|memory| Arc::strong_count(memory) > 1)
}

/// Replaces the memory that is in use elsewhere by private pages.
fn seize(rows: &[(AddressRange<PeerAddress>, ToMemory)]) -> Result<(), FabricError> {
    for memory in in_use(rows) {
        memory.make_private().map_err(|source| FabricError::InUse {
            offset: memory.file_offset(),
            len: memory.len() as u64,
            source,
        })?;
    }
    Ok(())
}

/// How far a mapping reaches around an address in it.
#[derive(Clone, Copy)]
struct Around {
    /// Bytes of it before the address.
    before: u64,
    /// Bytes of it from the address on.
    from: u64,
}

impl Around {
    fn new<A: crate::Address>(range: AddressRange<A>, at: A) -> Self {
        Self {
            before: at.get() - range.start().get(),
            from: range.end().get() - at.get(),
        }
    }

    /// What both cover.
    fn and(self, other: Self) -> Self {
        Self {
            before: self.before.min(other.before),
            from: self.from.min(other.from),
        }
    }
}

/// The run of up to `len` bytes at `iova`, which is in `entry`.
#[inline]
fn run(entry: &Entry, iova: Iova, len: usize, access: Access) -> Result<HostSlice, FaultReason> {
    if access == Access::Write && !entry.writable {
        return Err(FaultReason::Permission);
    }
    if entry.memory.is_gone() {
        return Err(FaultReason::MemoryGone);
    }
    let skip = iova.get() - entry.start.get();
    let len = (entry.len - skip).min(len as u64);
    entry
        .memory
        .slice((entry.offset + skip) as usize, len as usize)
        // Not reached: an entry is never longer than its memory.
        .ok_or(FaultReason::BorrowerDomain)
}

impl BorrowerDomain for Path {
    fn map(&mut self, at: PeerAddress, memory: MemoryRange) -> Result<(), FabricError> {
        self.map_peer(at, memory)
    }

    fn unmap(&mut self, at: PeerAddress, len: u64) -> Result<(), FabricError> {
        self.unmap_peer(at, len)
    }
}

impl LenderPath for Path {
    fn open_window(
        &mut self,
        iova: Iova,
        peer_address: PeerAddress,
        len: u64,
    ) -> Result<WindowUse, FabricError> {
        let range = AddressRange::new(iova, len)?;
        AddressRange::new(peer_address, len)?;
        self.lender.check(range)?;
        let lut = self.requester.take_window(peer_address, len)?;
        let window = lut.window;
        self.iotlb.clear();
        // The window first, then the mapping that leads to it. Entries are this path's alone, and
        // both tables have the same number of rows: what `check` found holds for both.
        self.windows.map(
            AddressRange::new(window.bus, len)?,
            ToPeer { peer_address, lut },
        )?;
        self.lender.map(range, ToBus { bus: window.bus })?;
        Ok(window)
    }

    fn close_window(&mut self, iova: Iova) -> Result<(), FabricError> {
        let found = self.lender.find(iova);
        let (range, to_bus) = found
            .filter(|(range, _)| range.start() == iova)
            .ok_or(FabricError::NoWindow { iova })?;
        let (range, bus) = (*range, to_bus.bus);
        self.iotlb.clear();
        self.lender.unmap(range)?;
        self.windows.unmap(AddressRange::new(bus, range.len())?)?;
        Ok(())
    }

    fn close_all(&mut self) -> Result<(), FabricError> {
        self.iotlb.clear();
        self.lender.clear();
        self.windows.clear();
        Ok(())
    }

    fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for (range, to_bus) in self.lender.rows() {
            let (from, to) = (range.start().get(), to_bus.bus.get());
            usage.lender_pages += PageCounts::of(from, to, range.len(), 1 << 30);
        }
        for (range, to_peer) in self.windows.rows() {
            usage.windows += 1;
            usage.lut_entries += to_peer.lut.window.lut_entries;
            usage.window_bytes += range.len();
        }
        for (range, target) in self.borrower.rows() {
            let (from, to) = (range.start().get(), target.memory.file_offset());
            let largest = target.memory.page_size();
            usage.bytes_mapped += range.len();
            usage.borrower_pages += PageCounts::of(from, to, range.len(), largest);
        }
        usage
    }

    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError> {
        self.bus_master = enabled;
        if !enabled {
            self.iotlb.clear();
        }
        Ok(())
    }
}
