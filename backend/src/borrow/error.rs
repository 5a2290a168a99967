//! Errors of the DMA path between a device and guest RAM.

use farside_fabric::{FabricError, pin::PinError};
use farside_lender_protocol::{CallError, ErrorKind};
use farside_ntb::NtbError;

use super::memory_limit::TooMuchMemory;

/// The DMA path to guest RAM could not be created or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PathError {
    #[error(transparent)]
    Lender(#[from] CallError),
    #[error("cannot pin guest RAM")]
    Pin(#[from] PinError),
    #[error(transparent)]
    Memory(#[from] TooMuchMemory),
    #[error("cannot bring guest RAM within the NTB's reach")]
    Map(#[from] FabricError),
    #[error(transparent)]
    Ntb(#[from] NtbError),
}

impl PathError {
    /// Whether the request exceeded a limit; in that case it had no effect.
    pub(crate) fn is_limit(&self) -> bool {
        match self {
            Self::Lender(CallError::Refused(error)) => error.kind == ErrorKind::Limit,
            Self::Ntb(_) => true,
            _ => false,
        }
    }
}
