//! What stands between a device and guest RAM.

use farside_control::CallError;
use farside_fabric::{FabricError, pin::PinError};
use farside_ntb::NtbError;

/// Why a way to guest RAM could not be made or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PathError {
    #[error(transparent)]
    Lender(#[from] CallError),
    #[error("cannot pin guest RAM: {0}")]
    Pin(#[from] PinError),
    #[error("cannot bring guest RAM within the NTB's reach: {0}")]
    Map(#[from] FabricError),
    #[error(transparent)]
    Ntb(#[from] NtbError),
}
