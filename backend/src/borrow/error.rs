//! What stands between a device and guest RAM.

use farside_fabric::{FabricError, pin::PinError};
use farside_lender_protocol::{CallError, ErrorKind};
use farside_ntb::NtbError;

/// Why a way to guest RAM could not be made or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PathError {
    #[error(transparent)]
    Lender(#[from] CallError),
    #[error("cannot pin guest RAM")]
    Pin(#[from] PinError),
    #[error("cannot bring guest RAM within the NTB's reach")]
    Map(#[from] FabricError),
    #[error(transparent)]
    Ntb(#[from] NtbError),
}

impl PathError {
    /// Whether there was no room for what was asked for; nothing was done then.
    pub(crate) fn is_limit(&self) -> bool {
        match self {
            Self::Lender(CallError::Refused(error)) => error.kind == ErrorKind::Limit,
            Self::Ntb(_) => true,
            _ => false,
        }
    }
}
