//! The traits that a fabric implements.
//!
//! An implementation must hold to this:
//!
//! - *Nothing before it is requested.* A new domain or path has no mapping, no
//!   window, and bus mastering off.
//! - *Done when it returns.* After a map or open returned `Ok`, a DMA there is
//!   carried out; after an error, the path is as it was.
//! - *Never again after it returns.* After an unmap or close returned `Ok`, no
//!   DMA that a device has not already begun reaches the range. For what has
//!   begun, the caller quiesces the device first (hardware drains in the unmap
//!   itself; see [`crate::soft::Path::draining`] for software).
//! - *No sharing.* A path reaches the memory of its own borrow only, whatever
//!   IOVA its device uses.
//!
//! While something is mapped, the memory must stay pinned by the code that mapped
//! it ([`crate::pin`]). It stays legal to map and unmap other ranges.
//!
//! Order of setting up: pin, [`BorrowerDomain::map`],
//! [`LenderPath::open_window`], [`LenderPath::set_bus_master`]. Taking down is
//! the reverse: the device stops first, then windows go, then mappings, then
//! pins.
//!
//! Remapping can be slow in hardware (a Switchtec NTB takes 100 ms or more for
//! one window), so none of these calls belongs on an I/O path.

use serde::{Deserialize, Serialize};

use crate::{BusAddress, FabricError, Iova, MemoryRange, PageCounts, PeerAddress};

/// The IOMMU domain of the borrower's NTB endpoint, for one borrow.
///
/// With VFIO type1 `map` is a `VFIO_IOMMU_MAP_DMA`, which pins; the rules for
/// `unmap` are those of its second version.
pub trait BorrowerDomain {
    /// Maps `memory` at `at`. Both are whole pages.
    ///
    /// # Errors
    /// [`FabricError::Overlap`], [`FabricError::TooManyMappings`],
    /// [`FabricError::Memory`] when the file is shorter than the range, and
    /// what [`crate::AddressRange::new`] refuses.
    fn map(&mut self, at: PeerAddress, memory: MemoryRange) -> Result<(), FabricError>;

    /// Unmaps all mappings inside the `len` bytes at `at`.
    ///
    /// # Errors
    /// [`FabricError::SplitMapping`] when the range covers only a part of a
    /// mapping, [`FabricError::NotMapped`] when it covers none.
    fn unmap(&mut self, at: PeerAddress, len: u64) -> Result<(), FabricError>;
}

/// One borrow's path at the lender: the device's IOMMU domain and the NTB
/// windows behind it.
pub trait LenderPath {
    /// Opens a window: the `len` bytes at `iova` reach those at `peer_address`. Holes are
    /// allowed: the peer memory is not checked.
    ///
    /// # Errors
    /// [`FabricError::Limit`] when the adapter has too few resources left (the message names what
    /// would fit) or `peer_address` is not sufficiently aligned; [`FabricError::Overlap`] with
    /// another window's IOVA; and the errors of [`crate::AddressRange::new`].
    fn open_window(
        &mut self,
        iova: Iova,
        peer_address: PeerAddress,
        len: u64,
    ) -> Result<WindowUse, FabricError>;

    /// Closes the window that begins at `iova` and releases its resources.
    ///
    /// # Errors
    /// [`FabricError::NoWindow`].
    fn close_window(&mut self, iova: Iova) -> Result<(), FabricError>;

    /// Closes every window.
    ///
    /// # Errors
    /// Hardware errors; as many windows as possible are closed then.
    fn close_all(&mut self) -> Result<(), FabricError>;

    /// The resources that the path uses now.
    fn usage(&self) -> Usage;

    /// Lets the device master the bus, or stops it. Stopping is the first step
    /// of every end of a borrow.
    ///
    /// # Errors
    /// What the hardware reports.
    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError>;
}

/// The position of a window and its resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowUse {
    /// Where it begins in the lender's physical address space.
    pub bus: BusAddress,
    /// Bytes that can be reached through it.
    pub bytes: u64,
    /// First of its consecutive LUT entries.
    pub first_lut_entry: u32,
    /// Number of its LUT entries.
    pub lut_entries: u32,
}

/// The resources of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Open windows.
    pub windows: u32,
    /// Number of their LUT entries.
    pub lut_entries: u32,
    /// Bytes of IOVA that they span, holes included.
    pub window_bytes: u64,
    /// Bytes of memory mapped in the borrower's domain, if known to this side (the
    /// `soft` fabric does).
    pub bytes_mapped: u64,
    /// Pages in the lender's IOMMU domain.
    pub lender_pages: PageCounts,
    /// Pages in the borrower's IOMMU domain, if known to this side.
    pub borrower_pages: PageCounts,
}
