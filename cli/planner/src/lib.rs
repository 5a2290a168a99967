//! Answers before anything is built: which VMs, devices and hosts fit.
//!
//! ```text
//!   Guest ──ram_split──► RAM ranges ──guest-layout──► DMA windows
//!                                                        │
//!           ┌────────────────────────┬───────────────────┴──────┐
//!       plan_ntb                 plan_cluster               plan_vfio
//!   LUT, BAR, requesters     hosts × devices a pair     IOVAs, pages, memlock
//! ```
//!
//! It uses the crates that do the work later: the RAM layout comes from `qemu-configs`, windows
//! from `guest-layout`, the cost of a window from `fabric`'s limits. The allocator's result is
//! computed, not tried, and property tests hold the two against each other.
//!
//! The crate is pure: no I/O, no threads. Sizes are bytes; ranges are
//! guest-physical, which is what a borrowed device uses as IOVA. Any number may
//! be typed by a user, so products saturate.
#![forbid(unsafe_code)]

mod addresses;
mod answer;
mod cluster;
mod cost;
mod guest;
mod largest;
mod ntb;
mod preset;
mod remedy;
mod vfio;

pub use addresses::{AddressError, AddressRules, Reserved, Span};
pub use answer::Answer;
pub use cluster::{Cluster, ClusterPlan, Table, WindowsOfHost, plan_cluster};
pub use cost::{Cost, Limit};
pub use guest::{Guest, GuestError, MAX_RAM};
pub use ntb::{NtbGuest, NtbPlan, NtbWindow, plan_ntb};
pub use preset::{PRESETS, Preset};
pub use remedy::Remedy;
pub use vfio::{PagesBySize, VfioGuest, VfioPlan, plan_vfio};

use farside_fabric::LimitError;

/// Why a question is invalid.
///
/// That something does not fit is an answer, not an error.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum PlanError {
    /// No guest was given.
    #[error("no guest to plan for: give at least one")]
    NoGuests,
    /// Invalid guest.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// Invalid adapter.
    #[error(transparent)]
    Limits(#[from] LimitError),
    /// Invalid address rules.
    #[error(transparent)]
    Addresses(#[from] AddressError),
    /// Invalid cluster.
    #[error("{name} = {value} must be {rule}")]
    Cluster {
        name: &'static str,
        value: u64,
        rule: String,
    },
}
