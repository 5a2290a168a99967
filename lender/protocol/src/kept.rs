//! A device that its lender keeps for a VM.

use std::fmt;

use farside_daemon::{DeviceId, VmName};
use serde::{Deserialize, Serialize};

use crate::{ErrorKind, RemoteError};

/// A device whose connection was cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptFor {
    /// The VM that may go on.
    pub vm: VmName,
    /// Seconds since the cut.
    pub seconds: u64,
    /// Seconds until other VMs may borrow the device.
    pub left: u64,
}

impl fmt::Display for KeptFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vm, seconds, left } = self;
        write!(f, "kept for VM {vm} (cut {seconds} s ago, {left} s left)")
    }
}

impl KeptFor {
    /// The refusal for another VM that tries to borrow `device`.
    pub fn refusal(&self, device: &DeviceId) -> RemoteError {
        RemoteError {
            kind: ErrorKind::Busy,
            message: format!(
                "device {device} is kept for VM {}, whose connection was cut {} s ago, for another {} s; wait, or end that with `farside revoke {device}`",
                self.vm, self.seconds, self.left
            ),
        }
    }
}
