//! The way of a physical function's DMA to the borrower's memory.

use std::sync::Arc;

use farside_fabric::{FabricError, FarAddress, Iova, LenderPath, MemoryRange, Usage};
use farside_lender_protocol::RemoteError;
use farside_ntb::{Adapter, ExportedBars, LenderNtb};
use farside_vfio::{Function, LocalPath};

use crate::refusals::{internal, invalid, refused, unsupported};

/// By one of the fabrics of physical functions.
pub(super) enum Way {
    /// The borrower is on this machine.
    Local(LocalPath),
    /// The borrower is on the other side of an NTB.
    Ntb { path: LenderNtb, bars: ExportedBars },
}

impl Way {
    /// For a borrower on this machine.
    pub(super) fn local(function: Arc<Function>) -> Self {
        Self::Local(LocalPath::new(function))
    }

    /// For a borrower across the NTB, whose CPUs reach the function's BARs too.
    pub(super) fn ntb(
        adapter: &Adapter,
        device: &str,
        function: Arc<Function>,
    ) -> Result<Self, RemoteError> {
        let mut path = adapter.attach(device, function).map_err(internal)?;
        let bars = path.export_bars().map_err(internal)?.clone();
        Ok(Self::Ntb { path, bars })
    }

    /// Where a BAR is for the borrower's CPUs, if they reach it.
    pub(super) fn far_bar(&self, bar: u8) -> Option<FarAddress> {
        match self {
            Self::Local(_) => None,
            Self::Ntb { bars, .. } => bars.far_of(bar),
        }
    }

    /// Stops DMA, closes all windows and unmaps all memory: as much of it as
    /// possible. Returns the first error.
    pub(super) fn close(&mut self) -> Result<(), RemoteError> {
        let closed = take_down(self.path());
        let unmapped = match self {
            Self::Local(path) => path.far_unmap_all(),
            // The borrower's own.
            Self::Ntb { .. } => Ok(()),
        };
        closed.and(unmapped).map_err(refused)
    }

    pub(super) fn set_bus_master(&mut self, enabled: bool) -> Result<(), RemoteError> {
        self.path().set_bus_master(enabled).map_err(refused)
    }

    pub(super) fn far_map(
        &mut self,
        at: FarAddress,
        memory: MemoryRange,
    ) -> Result<(), RemoteError> {
        self.local_path()?.far_map(at, memory).map_err(refused)
    }

    pub(super) fn far_unmap(&mut self, at: FarAddress, len: u64) -> Result<(), RemoteError> {
        self.local_path()?.far_unmap(at, len).map_err(refused)
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
        match self {
            Self::Local(path) => path.usage(),
            Self::Ntb { path, .. } => path.usage(),
        }
    }

    /// Sees to it that what the device has written is in the borrower's memory
    /// before anything that this host sends from now on.
    pub(super) fn flush(&self) {
        match self {
            // The kernel has taken the interrupt, which pushed the device's
            // writes ahead of it.
            Self::Local(_) => {}
            // They may still be on their way through the NTB, which the message
            // with the interrupt does not take.
            Self::Ntb { path, .. } => path.flush(),
        }
    }

    fn path(&mut self) -> &mut dyn LenderPath {
        match self {
            Self::Local(path) => path,
            Self::Ntb { path, .. } => path,
        }
    }

    fn local_path(&mut self) -> Result<&mut LocalPath, RemoteError> {
        match self {
            Self::Local(path) => Ok(path),
            Self::Ntb { .. } => Err(invalid(
                "a borrower across an NTB maps its memory itself".into(),
            )),
        }
    }
}

/// Stops DMA and closes all windows. The IOMMU's unmapping is what takes memory
/// away from a function that ignores its command register, or whose register
/// cannot be written: so it is done whatever fails before it.
fn take_down(path: &mut dyn LenderPath) -> Result<(), FabricError> {
    let stopped = path.set_bus_master(false);
    stopped.and(path.close_all())
}

/// This host's NTB, where there is one.
pub(super) fn adapter(ntb: Option<&Adapter>) -> Result<&Adapter, RemoteError> {
    ntb.ok_or_else(|| {
        unsupported(
            "this lender has no NTB: start it with `--ntb BDF`, or borrow the device on the \
             lender's own machine",
        )
    })
}

#[cfg(test)]
mod tests {
    use farside_fabric::WindowUse;

    use super::*;

    /// A path whose function's command register cannot be written.
    #[derive(Default)]
    struct Unwritable {
        closed: bool,
    }

    impl LenderPath for Unwritable {
        fn open_window(
            &mut self,
            _: Iova,
            _: FarAddress,
            _: u64,
        ) -> Result<WindowUse, FabricError> {
            unreachable!()
        }

        fn close_window(&mut self, _: Iova) -> Result<(), FabricError> {
            unreachable!()
        }

        fn close_all(&mut self) -> Result<(), FabricError> {
            self.closed = true;
            Ok(())
        }

        fn usage(&self) -> Usage {
            Usage::default()
        }

        fn set_bus_master(&mut self, _: bool) -> Result<(), FabricError> {
            let io = std::io::Error::from_raw_os_error(5);
            Err(FabricError::Other(Box::new(io)))
        }
    }

    #[test]
    fn memory_is_unmapped_although_the_command_register_cannot_be_written() {
        let mut path = Unwritable::default();
        assert!(take_down(&mut path).is_err());
        assert!(path.closed);
    }
}
