//! What a borrower is told when a request is refused.

use farside_control::{ErrorKind, RemoteError};
use farside_fabric::FabricError;

pub(super) fn invalid(message: String) -> RemoteError {
    RemoteError {
        kind: ErrorKind::Invalid,
        message,
    }
}

pub(super) fn refused(error: FabricError) -> RemoteError {
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

pub(super) fn internal(error: impl std::fmt::Display) -> RemoteError {
    RemoteError {
        kind: ErrorKind::Internal,
        message: error.to_string(),
    }
}
