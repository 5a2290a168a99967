//! Moves a VM to another host, with the devices that it borrows.
//!
//! The host that the VM leaves is in charge ([`Mover`]). It reaches the other one
//! as rsync and git do: a remote shell starts `farside migrate --agent` there
//! ([`Remote`], [`serve_agent`]), which answers [`Request`]s on its standard input
//! and output. What was done so far both write down before they do more
//! ([`Journal`], [`Step`]), so that whatever is cut off can be taken up again, or
//! taken back.
//!
//! - [`Host`]: all that is done to a host; [`LocalHost`] does it.
//! - [`Mover`]: the steps, at the host that the VM leaves.
//! - [`Arrival`]: its part of them, at the host that the VM goes to.
//! - [`may_run`]: whether a VM may run on a host now.
//!
//! That never two hosts have a device is not up to any of this, but to the lender:
//! see [`farside_lender_protocol::Fence`].

#![forbid(unsafe_code)]

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
mod transport;
mod wire;

pub use agent::serve_agent;
pub use arrival::{Arrival, resume_here};
pub use error::{Error, ErrorKind, Result};
pub use guard::may_run;
pub use host::{Description, FoundDevice, Host, Peer, RunState, Tombstone};
pub use journal::{Identity, Journal, MANIFEST_VERSION, MovedDevice, Role};
pub use local::LocalHost;
pub use lock::Lock;
pub use mover::Mover;
pub use plan::Plan;
pub use recover::{claim, forget};
pub use step::Step;
pub use transport::{Remote, Shell};
pub use wire::{Hello, PROTOCOL_VERSION, Reply, Request};
