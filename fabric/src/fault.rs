//! Refused DMA: the device, the access, and the translation that refused it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Iova;

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
    /// The memory behind the mapping is gone: its file shrank, or the system
    /// had no page for it.
    MemoryGone,
}

impl FaultReason {
    /// All of them, in the order of a path.
    pub const ALL: [Self; 6] = [
        Self::BusMasterDisabled,
        Self::LenderDomain,
        Self::Window,
        Self::BorrowerDomain,
        Self::Permission,
        Self::MemoryGone,
    ];

    /// Its place in [`FaultReason::ALL`].
    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for FaultReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BusMasterDisabled => "bus mastering is off",
            Self::LenderDomain => "the lender's IOMMU maps nothing there (outside every window)",
            Self::Window => "no NTB window is open there",
            Self::BorrowerDomain => {
                "the borrower's IOMMU maps nothing there (a hole in the guest's RAM)"
            }
            Self::Permission => "the memory may not be written",
            Self::MemoryGone => "the memory is gone (its file was truncated or is out of space)",
        })
    }
}

/// How many bytes, when that is known.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            bytes => write!(f, " of {bytes} bytes"),
        }
    }
}

/// One refused DMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("DMA {access:?}{} at IOVA {iova} refused: {reason}", Bytes(*len))]
pub struct Fault {
    /// First IOVA that was refused.
    pub iova: Iova,
    /// Bytes requested from there; 0 if hardware does not report it.
    pub len: u64,
    /// Direction.
    pub access: Access,
    /// Which translation refused, and why.
    pub reason: FaultReason,
}
