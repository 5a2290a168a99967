//! Before a migration: what would stop it. Nothing is changed, on neither host.
//!
//! A migration refuses at the first thing that does not fit. Here everything is
//! looked at, on both hosts, and each [`Finding`] says what to do. The host that
//! the VM leaves ([`check`]) sends what it knows as a [`Question`]; the other one
//! looks at itself and compares.
//!
//! What cannot be known: whether a disk there is the *same* disk, and what changes
//! between the check and the migration.

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

/// What the host that a VM would leave asks of the other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Question {
    /// The manifest, as far as one can be made.
    pub journal: Journal,
    /// What the VM runs by, or would.
    pub facts: Facts,
}

/// What the other host says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// All that was looked at.
    pub findings: Vec<Finding>,
    /// For a live migration: the TCP port at which this host listens until the
    /// connection ends, as its QEMU would.
    pub port: Option<u16>,
}
