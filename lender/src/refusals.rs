//! The errors sent to a borrower.

use farside_error_chain::Chain;
use farside_fabric::FabricError;
use farside_irq_relay::SetIrqsError;
use farside_lender_protocol::{ErrorKind, RemoteError};

pub(crate) fn invalid(message: String) -> RemoteError {
    RemoteError {
        kind: ErrorKind::Invalid,
        message,
    }
}

/// As [`invalid`], for an interrupt request.
pub(crate) fn invalid_irqs(error: SetIrqsError) -> RemoteError {
    invalid(Chain(&error).to_string())
}

pub(crate) fn refused(error: FabricError) -> RemoteError {
    let error = match error {
        FabricError::Other(error) => match error.downcast::<RemoteError>() {
            // The broker's, about its adapter.
            Ok(error) => return *error,
            Err(error) => FabricError::Other(error),
        },
        error => error,
    };
    let kind = match &error {
        FabricError::Limit(_) | FabricError::Quota(_) | FabricError::TooManyMappings { .. } => {
            ErrorKind::Limit
        }
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
        message: Chain(&error).to_string(),
    }
}

pub(crate) fn internal(error: impl std::error::Error) -> RemoteError {
    failed(Chain(&error))
}

/// As [`internal`], with a message.
pub(crate) fn failed(why: impl std::fmt::Display) -> RemoteError {
    RemoteError {
        kind: ErrorKind::Internal,
        message: why.to_string(),
    }
}

/// The refusal to resize a device without a disk.
pub(crate) fn no_disk() -> RemoteError {
    unsupported(
        "only NVMe and virtio-blk models on an image or a block device have a size that can change",
    )
}

/// An exceeded limit of the fabric.
pub(crate) fn limit(error: impl std::fmt::Display) -> RemoteError {
    RemoteError {
        kind: ErrorKind::Limit,
        message: error.to_string(),
    }
}

/// A feature that this device or lender does not support.
pub(crate) fn unsupported(message: &str) -> RemoteError {
    RemoteError {
        kind: ErrorKind::Invalid,
        message: message.to_owned(),
    }
}

/// A device that is not lent over the network.
pub(crate) fn no_medium() -> RemoteError {
    unsupported(
        "this device cannot be borrowed over the network, by which software models are lent that worker processes serve and whose image can be identified (see the lender's log): borrow it on the lender's machine; of a physical function, lend the block device (`--nvme ID=/dev/nvme0n1`), or use an NTB",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_descriptor_comes_with_its_cause() {
        let error = SetIrqsError::Descriptor(std::io::Error::other("no such file system"));
        let message = invalid_irqs(error).message;
        assert!(message.ends_with(": no such file system"), "{message}");
    }
}
