//! What a borrower is told when a request is refused.

use farside_control::{ErrorKind, RemoteError};
use farside_fabric::FabricError;

pub(crate) fn invalid(message: String) -> RemoteError {
    RemoteError {
        kind: ErrorKind::Invalid,
        message,
    }
}

pub(crate) fn refused(error: FabricError) -> RemoteError {
    let kind = match &error {
        FabricError::Limit(_) | FabricError::TooManyMappings { .. } => ErrorKind::Limit,
        FabricError::BadRange { .. }
        | FabricError::Unaligned { .. }
        | FabricError::Overlap { .. }
        | FabricError::SplitMapping { .. }
        | FabricError::NotMapped { .. }
        | FabricError::NoWindow { .. }
        | FabricError::Memory { .. } => ErrorKind::Invalid,
        _ => ErrorKind::Internal,
    };
    RemoteError {
        kind,
        message: error.to_string(),
    }
}

pub(crate) fn internal(error: impl std::fmt::Display) -> RemoteError {
    RemoteError {
        kind: ErrorKind::Internal,
        message: error.to_string(),
    }
}

/// A limit of the fabric.
pub(crate) fn limit(error: impl std::fmt::Display) -> RemoteError {
    RemoteError {
        kind: ErrorKind::Limit,
        message: error.to_string(),
    }
}

/// What this device, or this lender, cannot do.
pub(crate) fn unsupported(message: &str) -> RemoteError {
    RemoteError {
        kind: ErrorKind::Invalid,
        message: message.to_owned(),
    }
}

/// A request that needs a lease came without one.
pub(crate) fn no_lease() -> RemoteError {
    internal("the device is not lent")
}
