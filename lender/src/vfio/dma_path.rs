//! A physical function's DMA path to the borrower's memory.

use farside_fabric::{FabricError, LenderPath};
use farside_lender_protocol::RemoteError;
use farside_ntb::{Adapter, LenderNtb};
use farside_vfio::LocalPath;

use crate::refusals::{invalid, unsupported};

/// The DMA path of a physical function.
pub(super) enum DmaPath {
    /// The borrower is on this host.
    Local(LocalPath),
    /// The borrower is on the peer host of an NTB, and accesses the function's BARs through it.
    Ntb(LenderNtb),
}

impl DmaPath {
    pub(super) fn lender(&mut self) -> &mut dyn LenderPath {
        match self {
            Self::Local(path) => path,
            Self::Ntb(path) => path,
        }
    }

    /// The path on which the lender maps the borrower's memory.
    pub(super) fn local(&mut self) -> Result<&mut LocalPath, RemoteError> {
        match self {
            Self::Local(path) => Ok(path),
            Self::Ntb(_) => Err(invalid(
                "a borrower across an NTB maps its memory itself".into(),
            )),
        }
    }

    /// The path of a borrower across an NTB.
    pub(super) fn across(&mut self) -> Result<&mut LenderNtb, RemoteError> {
        match self {
            Self::Local(_) => Err(invalid(
                "a borrower on this host maps the BARs of other devices by their descriptors"
                    .into(),
            )),
            Self::Ntb(path) => Ok(path),
        }
    }

    /// How many LUT entries the NTB has, if the borrower is across one.
    pub(super) fn lut_entries(&self) -> Option<u32> {
        match self {
            Self::Local(_) => None,
            Self::Ntb(path) => Some(path.adapter().limits().lut_entries_per_vm()),
        }
    }

    /// Flushes device writes to the borrower's memory, ahead of anything that this host sends from
    /// now on.
    pub(super) fn flush(&self) {
        match self {
            // The kernel has received the interrupt, which pushed the device's writes ahead of it.
            Self::Local(_) => {}
            // They may still be in flight in the NTB, which the message with the interrupt
            // bypasses.
            Self::Ntb(path) => path.flush(),
        }
    }

    /// Stops DMA, closes all windows and unmaps all memory, as far as possible. Returns the first
    /// error.
    pub(super) fn revoke(&mut self) -> Result<(), FabricError> {
        let closed = take_down(self.lender());
        closed.and(match self {
            Self::Local(path) => path.unmap_peer_all(),
            // The borrower unmaps its memory itself.
            Self::Ntb(_) => Ok(()),
        })
    }
}

/// Stops DMA and closes all windows. Unmapping from the IOMMU also revokes access from a function
/// that ignores its command register, or whose register cannot be written, so it is done even after
/// an earlier failure.
fn take_down(path: &mut dyn LenderPath) -> Result<(), FabricError> {
    let stopped = path.set_bus_master(false);
    stopped.and(path.close_all())
}

/// This host's NTB, or an error without one.
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
    use farside_fabric::{Iova, PeerAddress, Usage, WindowUse};

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
            _: PeerAddress,
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
