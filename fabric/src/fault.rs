//! Refused DMA: who was refused what, and by which of the translations.

use serde::{Deserialize, Serialize};

/// Direction of a DMA, seen from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// The device reads memory.
    Read,
    /// The device writes memory.
    Write,
}

/// Which translation refused, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultReason {
    /// Bus mastering is off.
    BusMasterDisabled,
    /// The lender's IOMMU domain has no mapping there.
    LenderDomain,
    /// No NTB window is open there.
    Window,
    /// The borrower's IOMMU domain has no mapping there.
    BorrowerDomain,
    /// It is mapped, but not for this direction.
    Permission,
    /// The memory behind the mapping is gone: its file shrank.
    MemoryGone,
}

/// One refused DMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("DMA {access:?} of {len} bytes at IOVA {iova:#x} refused: {reason:?}")]
pub struct Fault {
    /// First IOVA that was refused.
    pub iova: u64,
    /// Bytes asked for from there.
    pub len: u64,
    /// Direction.
    pub access: Access,
    /// Which translation refused, and why.
    pub reason: FaultReason,
}
