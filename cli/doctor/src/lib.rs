//! Diagnoses what keeps the VMs of a host from borrowing, and suggests fixes.
//!
//! ```text
//!   Host --look--> Facts --judge--> Report (of Findings)
//! ```
//!
//! [`Facts`] come from `/proc`, `/sys`, `/etc`, farside's directories, QEMU, libvirt and the
//! lenders: all files below a root directory, all that could hang with a deadline. Nothing is
//! changed; a query to a lender may start it through systemd's socket activation. The facts are
//! judged by [`Facts::judge`], a list of small pure functions.

#![forbid(unsafe_code)]

mod checks;
mod facts;
mod finding;
mod host;
mod report;
mod run;

pub use facts::Facts;
pub use farside_migration::check::{Finding, Level};
pub use host::Host;
pub use report::Report;
