//! Whether a device may be borrowed.

use farside_daemon::DeviceId;
use serde::{Deserialize, Serialize};

#[cfg(doc)]
use crate::Request;
use crate::{ErrorKind, RemoteError};

/// Whether VMs may borrow a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Availability {
    /// They may.
    #[default]
    Available,
    /// Its lease is being ended by [`Request::Revoke`]; then it is unavailable.
    Revoking,
    /// An operator has taken it out of service.
    Unavailable,
}

impl Availability {
    /// Refuses a borrow of `device` unless it is available.
    pub fn check(self, device: &DeviceId) -> Result<(), RemoteError> {
        match self {
            Self::Available => Ok(()),
            Self::Revoking | Self::Unavailable => Err(RemoteError {
                kind: ErrorKind::Busy,
                message: format!(
                    "device {device} is {self}: borrow another device, or have the lender's operator make it available (`farside devices --available {device}`)"
                ),
            }),
        }
    }
}

impl std::fmt::Display for Availability {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Available => "available",
            Self::Revoking => "being revoked",
            Self::Unavailable => "unavailable",
        })
    }
}
