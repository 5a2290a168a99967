//! The daemon that owns devices and lends them.
//!
//! - [`config`]: what to lend, from TOML.
//! - [`volumes`]: disks in a directory of the lender's own.
//! - `access`: who may borrow and who may operate a device.
//! - `lease_owner`: whose a lease is.
//! - `registry`: device ids and leases. `fences`: the host from which a moved VM may borrow.
//! - `device_loop`: one thread per device. It alone accesses the device, its IOMMU domains and its
//!   interrupts, so the data path takes no lock.
//! - `worker`: a process for each lease of a software model, with a device thread of its own.
//!   `keeper`: what of them outlives this process.
//! - [`near`]: a controller in the borrower's process, for a medium in another host.
//! - `source`: the interface to a device, available or leased; `model`, `vfio` and `vfio_user` implement it.
//! - `listening`: the UNIX socket and the TCP ports; `tokens`: tokens that identify the register
//!   channels of other hosts.
//! - `connection`: a peer without a lease; `requests`: its requests. With a lease, the connection
//!   moves into the device thread.
//!
//! ```text
//!  peers --> Listener --> connection threads --Borrow--> device thread
//!                              |                            |
//!                              +---- Registry (leases) -----+  LeasedDevice:
//!                                                              model + fabric + irq-relay
//! ```

#![forbid(unsafe_code)]

pub mod config;

mod access;
mod announced;
mod chains;
mod connection;
mod device_loop;
mod fences;
mod keeper;
mod lease_owner;
mod listening;
mod model;
pub mod near;
mod open;
#[cfg(test)]
mod peer_tests;
mod refusals;
mod registry;
mod requests;
mod server;
mod source;
mod state_file;
mod tokens;
mod vfio;
mod vfio_user;
pub mod volumes;
mod worker;

pub use farside_devices::state::FORMAT as STATE_FORMAT;
pub use keeper::{
    KeeperError, KeptLeases, LEASES, LeaseFormat, look as kept_leases, run as run_keeper,
};
pub use server::{Lender, StartError, TakeError};
pub use vfio::{BindError, bind, release};
pub use worker::{WorkerError, run as run_worker};
