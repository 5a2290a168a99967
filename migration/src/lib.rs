//! Moves a VM to another host, with the devices that it borrows.
//!
//! The host that the VM leaves is in charge ([`Mover`]). It reaches the other one
//! as rsync and git do: a remote shell starts `farside migration agent` there
//! ([`Remote`], [`serve_agent`]), which answers [`Request`]s on its standard input
//! and output. Both record each step before they begin it ([`Journal`], [`Step`]), so
//! that a migration that was cut off can be resumed or taken back.
//!
//! - [`Store`], [`Runner`], [`LiveRunner`], [`Lenders`], [`HostFacts`]: what a host
//!   provides; [`LocalHost`] implements them.
//! - [`Strategy`]: cold or live, as recorded in the journal.
//! - [`Mover`]: the steps, at the host that the VM leaves.
//! - [`Arrival`]: the other host's part of them.
//! - [`may_run`]: whether a VM may run on a host now.
//!
//! None of this keeps two hosts from holding a device; the lender does, by
//! [`farside_lender_protocol::Fence`].

#![forbid(unsafe_code)]

mod accept;
mod agent;
mod arrival;
pub mod check;
mod error;
mod guard;
mod host;
mod journal;
pub mod live;
mod local;
mod lock;
mod mover;
mod plan;
mod recover;
mod step;
mod strategy;
mod transport;
mod wire;

pub use accept::Accept;
pub use agent::serve_agent;
pub use arrival::{Arrival, resume_here};
pub use error::{Error, ErrorKind, Result};
pub use guard::may_run;
pub use host::{
    Configuration, FoundDevice, Host, HostFacts, Lenders, LiveRunner, MovedMarker, Peer, RunState,
    Runner, Store,
};
pub use journal::{Identity, Journal, MANIFEST_VERSION, MAX_SHUTDOWN_TIMEOUT, MovedDevice, Role};
pub use local::LocalHost;
pub use lock::lock_vm;
pub use mover::Mover;
pub use plan::Plan;
pub use recover::{claim, forget};
pub use step::Step;
pub use strategy::Strategy;
pub use transport::{Remote, Shell};
pub use wire::{Hello, PROTOCOL_VERSION, Reply, Request};
