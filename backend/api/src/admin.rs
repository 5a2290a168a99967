//! Administrative requests to a running backend, at the socket `control` in the VM's
//! directory: one JSON document per line, one answer for each.
//!
//! ```text
//! > {"version":1,"command":{"attach":{"device":"disk1"}}}
//! < {"attached":{"socket":"/run/farside/vm/web1/disk1.sock","already":false}}
//! > {"version":1,"command":{"detach":{"device":"disk1","force":false}}}
//! < "detached"
//! ```
//!
//! Only the socket's owner may connect. Neither VMM nor guest can reach it.

use std::path::PathBuf;

use farside_daemon::{DeviceId, VmName};
use serde::{Deserialize, Serialize};

/// The version of these messages.
pub const VERSION: u32 = 1;

/// Longest request, bytes, with its newline.
pub const MAX_REQUEST: usize = 4096;

/// One request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// The operation.
    pub command: Command,
}

/// An operation of a backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// Looks a device up and serves it. Does not borrow it yet.
    Attach {
        /// Device id.
        device: DeviceId,
    },
    /// Stops serving a device. Answered after the device is returned to its lender.
    Detach {
        /// Device id.
        device: DeviceId,
        /// Detach even if a connected client has not released it: a surprise removal
        /// for the VM.
        #[serde(default)]
        force: bool,
    },
    /// Lists the devices that are served.
    Status,
}

/// A backend's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The device is served.
    Attached {
        /// The socket for the VMM.
        socket: PathBuf,
        /// The device was already served.
        already: bool,
    },
    /// The device is neither served nor borrowed any longer.
    Detached,
    /// The devices that are served.
    Status(Status),
    /// Refused; nothing changed.
    Refused(Refusal),
}

/// A backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The VM's name.
    pub vm: VmName,
    /// The backend's process.
    pub pid: u32,
    /// The devices that it serves.
    pub devices: Vec<Served>,
}

/// A device that a backend serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    /// Device id.
    pub device: DeviceId,
    /// The socket for the VMM.
    pub socket: PathBuf,
    /// A client is connected and has not released the device.
    pub in_use: bool,
    /// Added by [`Command::Attach`], after the backend's start.
    pub attached: bool,
    /// The last error, unless a borrow has succeeded since.
    pub last_error: Option<String>,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The kind, for callers.
    pub kind: RefusalKind,
    /// The message for the user.
    pub message: String,
}

/// The kinds of [`Refusal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalKind {
    /// The request is malformed or of another version.
    Malformed,
    /// No lender has the device, or the backend does not serve it.
    UnknownDevice,
    /// A client is using the device.
    InUse,
    /// The device is being attached or detached.
    Busy,
    /// Any other failure.
    Failed,
}
