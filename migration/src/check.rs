//! Checks what would stop a migration. Changes nothing on either host.
//!
//! A migration stops at the first problem. Here all checks are performed, on both
//! hosts, and each [`Finding`] includes the remedy. The host that the VM leaves
//! ([`check`]) sends its facts as a [`Question`]; the other one compares them with its
//! own.
//!
//! Not checked: whether a disk there is the *same* disk, and changes between the check
//! and the migration.

mod answer;
mod compare;
mod disks;
mod facts;
mod finding;
mod source;

pub(crate) use answer::answer;
pub(crate) use facts::look;
pub use facts::{Accelerator, Disk, Facts, Memory, Qemu};
pub use finding::{Finding, Level};
pub use source::{Findings, check};

use serde::{Deserialize, Serialize};

use crate::Journal;

/// The request of the host that a VM would leave.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Question {
    /// The manifest.
    pub journal: Journal,
    /// The facts about that host.
    pub facts: Facts,
}

/// The reply of the other host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// All findings.
    pub findings: Vec<Finding>,
    /// For a live migration: the TCP port at which this host listens until the
    /// connection ends, in place of its QEMU.
    pub port: Option<u16>,
}
