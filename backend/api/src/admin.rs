//! Requests of an administrator to a running backend, at the socket `control` in
//! the VM's directory: a JSON document a line, one answer for each.
//!
//! ```text
//! > {"version":1,"command":{"attach":{"device":"disk1"}}}
//! < {"attached":{"socket":"/run/farside/vm/web1/disk1.sock","already":false}}
//! > {"version":1,"command":{"detach":{"device":"disk1","force":false}}}
//! < "detached"
//! ```
//!
//! The socket is its owner's alone. Neither VMM nor guest can reach it.

use std::path::PathBuf;

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
    /// What to do.
    pub command: Command,
}

/// What a backend can be asked to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// Look a device up and serve it. Nothing is borrowed yet.
    Attach {
        /// Its id.
        device: String,
    },
    /// Serve a device no longer. Answered when its lender has it back.
    Detach {
        /// Its id.
        device: String,
        /// Even if a connected client has not released it: the VM sees a surprise
        /// removal.
        #[serde(default)]
        force: bool,
    },
    /// List the devices that are served.
    Status,
}

/// What a backend answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The device is served.
    Attached {
        /// Where a VMM connects.
        socket: PathBuf,
        /// It was before.
        already: bool,
    },
    /// The device is served no longer, and not borrowed.
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
    pub vm: String,
    /// The backend's process.
    pub pid: u32,
    /// What it serves.
    pub devices: Vec<Served>,
}

/// A device that a backend serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    /// Its id.
    pub device: String,
    /// Where a VMM connects.
    pub socket: PathBuf,
    /// A client has it, and has not released it.
    pub in_use: bool,
    /// It came by [`Command::Attach`], after the backend's start.
    pub attached: bool,
    /// Its last error, unless a borrow has succeeded since.
    pub last_error: Option<String>,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// For programs.
    pub kind: RefusalKind,
    /// For people.
    pub message: String,
}

/// The kinds of [`Refusal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalKind {
    /// The request is not one, or of another version.
    Malformed,
    /// No lender has the device, or the backend does not serve it.
    UnknownDevice,
    /// A client has the device.
    InUse,
    /// The device is being attached or detached.
    Busy,
    /// All else.
    Failed,
}
