//! The fabric's calls on a domain and a function.

use std::sync::Arc;

use farside_fabric::memory::{HostSlice, SharedMemory};
use farside_fabric::{
    BorrowerDomain, FabricError, Iova, LenderPath, MemoryRange, PeerAddress, Usage, WindowUse,
};

use super::composition::{Composition, Mapper};
use crate::{Domain, Function, VfioError};

/// One borrow's path on one host: [`LenderPath`] for the lender's windows, [`BorrowerDomain`] for
/// the borrower's memory. It closes everything when it is dropped.
#[derive(Debug)]
pub struct LocalPath {
    inner: Composition<Hardware>,
}

/// A domain of this borrow's VM alone, and the function in it.
#[derive(Debug)]
struct Hardware {
    domain: Domain,
    function: Arc<Function>,
}

impl LocalPath {
    /// A path for `function`, in the domain that it was opened in. That domain
    /// must be of this borrow's VM alone, and empty but for what that has mapped for other functions, or the function be
    /// [adopted](Function::adopt): then mappings of the process before stay until bus mastering is set for the first time.
    pub fn new(function: Arc<Function>) -> Self {
        let domain = function.domain().clone();
        Self {
            inner: Composition::new(Hardware { domain, function }),
        }
    }

    /// The function.
    pub fn function(&self) -> &Arc<Function> {
        &self.inner.mapper().function
    }

    /// The domain.
    pub fn domain(&self) -> &Domain {
        &self.inner.mapper().domain
    }

    /// Whether bus mastering is enabled.
    pub fn bus_master(&self) -> bool {
        self.inner.bus_master()
    }

    /// Checks ranges of guest RAM, as (IOVA, bytes), against what the device
    /// may use on this machine. Ask before the VM boots.
    ///
    /// # Errors
    /// [`VfioError::Reserved`] names the range and what it collides with.
    pub fn check(&self, ranges: &[(Iova, u64)]) -> Result<(), VfioError> {
        self.domain().usable_iova()?.check(ranges)
    }

    /// Maps `memory` at `at`, for windows to reach; see
    /// [`BorrowerDomain::map`].
    ///
    /// # Errors
    /// As there, and what [`Domain::map`] refuses.
    pub fn map_peer(&mut self, at: PeerAddress, memory: MemoryRange) -> Result<(), FabricError> {
        self.inner.map_peer(at, memory)
    }

    /// As [`LocalPath::map_peer`], for memory that is mapped into this process already.
    ///
    /// # Errors
    /// As there.
    pub fn map_shared(
        &mut self,
        at: PeerAddress,
        memory: Arc<SharedMemory>,
    ) -> Result<(), FabricError> {
        self.inner.map_shared(at, memory)
    }

    /// Unmaps all mappings inside the `len` bytes at `at`; see
    /// [`BorrowerDomain::unmap`].
    ///
    /// # Errors
    /// As there, and what [`Domain::unmap`] refuses.
    pub fn unmap_peer(&mut self, at: PeerAddress, len: u64) -> Result<(), FabricError> {
        self.inner.unmap_peer(at, len)
    }

    /// Unmaps all that [`LocalPath::map_peer`] has mapped.
    ///
    /// # Errors
    /// What [`Domain::unmap`] refuses.
    pub fn unmap_peer_all(&mut self) -> Result<(), FabricError> {
        self.inner.unmap_peer_all()
    }
}

impl Mapper for Hardware {
    fn map(&mut self, at: Iova, memory: &HostSlice, writable: bool) -> Result<(), FabricError> {
        Ok(self.domain.map(at, memory, writable)?)
    }

    fn unmap(&mut self, at: Iova, len: u64) -> Result<(), FabricError> {
        Ok(self.domain.unmap(at, len)?)
    }

    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError> {
        if !enabled {
            let stopped = self.function.set_bus_master(false);
            // Also if its register cannot be written. A borrower may have had other ranges mapped than the process
            // before had, which cannot be told apart.
            if self.function.settle().is_err() {
                self.domain.empty()?;
            }
            return Ok(stopped?);
        }
        let was_adopted = self.function.settle()?;
        self.function.set_bus_master(true)?;
        if was_adopted {
            self.function.signal_interrupts()?;
        }
        Ok(())
    }
}

impl BorrowerDomain for LocalPath {
    fn map(&mut self, at: PeerAddress, memory: MemoryRange) -> Result<(), FabricError> {
        self.map_peer(at, memory)
    }

    fn unmap(&mut self, at: PeerAddress, len: u64) -> Result<(), FabricError> {
        self.unmap_peer(at, len)
    }
}

impl LenderPath for LocalPath {
    fn open_window(
        &mut self,
        iova: Iova,
        peer_address: PeerAddress,
        len: u64,
    ) -> Result<WindowUse, FabricError> {
        self.inner.open_window(iova, peer_address, len)
    }

    fn close_window(&mut self, iova: Iova) -> Result<(), FabricError> {
        self.inner.close_window(iova)
    }

    fn close_all(&mut self) -> Result<(), FabricError> {
        self.inner.close_all()
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }

    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError> {
        self.inner.set_bus_master(enabled)
    }
}
