//! Finds where guest RAM is and plans DMA windows from it.
//!
//! A device borrowed from another host reaches the guest's memory through a
//! few contiguous *DMA windows*, which are scarce. So before they are opened
//! one must know where RAM begins and ends: [`probe`] finds every edge with
//! questions of the form "does this range resolve to RAM?", and [`plan`] packs
//! what was found into as few windows as is sensible.
//!
//! ```text
//!   0        640K  1M            2G          4G                 10G
//!   |##########|   |##############|           |##################|
//!   | segment  |   |   segment    |           |     segment      |
//!   +-----------low window--------+           +---high window----+
//! ```
//!
//! The crate is pure: no I/O, no threads, no `unsafe`, and nothing of ours
//! imported. All addresses are guest-physical, in bytes.
#![forbid(unsafe_code)]

mod address;
mod growth;
mod plan;
mod probe;
mod range_set;

pub use address::{Gpa, GpaRange, PAGE_SIZE, RangeError};
pub use growth::spans;
pub use plan::{Plan, PlanRules, Window, plan};
pub use probe::{HIGH_MEMORY, Layout, MemoryMap, ProbeError, ProbeLimits, Resolution, probe};
pub use range_set::RangeSet;
