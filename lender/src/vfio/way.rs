//! The way of a physical function's DMA to the borrower's memory.

use std::sync::Arc;

use farside_control::RemoteError;
use farside_fabric::{FabricError, FarAddress, Iova, LenderPath, MemoryRange, Usage};
use farside_vfio::{Function, LocalPath};

use crate::refusals::refused;

/// By one of the fabrics of physical functions.
pub(super) enum Way {
    /// The borrower is on this machine.
    Local(LocalPath),
}

impl Way {
    /// For a borrower on this machine.
    pub(super) fn local(function: Arc<Function>) -> Self {
        Self::Local(LocalPath::new(function))
    }

    /// Stops DMA, closes all windows and unmaps all memory.
    pub(super) fn close(&mut self) -> Result<(), RemoteError> {
        let Self::Local(path) = self;
        let close = |path: &mut LocalPath| -> Result<(), FabricError> {
            path.set_bus_master(false)?;
            path.close_all()?;
            path.far_unmap_all()
        };
        close(path).map_err(refused)
    }

    pub(super) fn set_bus_master(&mut self, enabled: bool) -> Result<(), RemoteError> {
        self.path().set_bus_master(enabled).map_err(refused)
    }

    pub(super) fn far_map(
        &mut self,
        at: FarAddress,
        memory: MemoryRange,
    ) -> Result<(), RemoteError> {
        let Self::Local(path) = self;
        path.far_map(at, memory).map_err(refused)
    }

    pub(super) fn far_unmap(&mut self, at: FarAddress, len: u64) -> Result<(), RemoteError> {
        let Self::Local(path) = self;
        path.far_unmap(at, len).map_err(refused)
    }

    /// Returns the LUT entries that the window takes.
    pub(super) fn open_window(
        &mut self,
        iova: Iova,
        far: FarAddress,
        len: u64,
    ) -> Result<u32, RemoteError> {
        let window = self.path().open_window(iova, far, len);
        window.map(|window| window.lut_entries).map_err(refused)
    }

    pub(super) fn close_window(&mut self, iova: Iova) -> Result<(), RemoteError> {
        self.path().close_window(iova).map_err(refused)
    }

    pub(super) fn usage(&self) -> Usage {
        let Self::Local(path) = self;
        path.usage()
    }

    /// Sees to it that what the device has written is in the borrower's memory
    /// before anything that this host sends from now on.
    pub(super) fn flush(&self) {
        // On one machine the kernel has taken the interrupt, which pushed the
        // device's writes ahead of it.
    }

    fn path(&mut self) -> &mut dyn LenderPath {
        let Self::Local(path) = self;
        path
    }
}
