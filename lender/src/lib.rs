//! The daemon that owns devices and lends them.
//!
//! - [`config`]: what to lend, from TOML.
//! - `registry`: device ids and leases; who has what. `fences`: which host a VM
//!   that moved may borrow from.
//! - `device_loop`: one thread a device. It alone touches the device, its
//!   address domains and its interrupts, so the data path takes no lock.
//! - `source`: the seam to a device, available or leased; `model` and `vfio`
//!   implement it.
//! - `listening`: the socket and the ports where peers come in; `tickets`: how
//!   a register channel of another host is told from any other connection.
//! - `connection`: what a peer may ask before it has a lease. With the lease,
//!   the connection itself moves into the device's thread.
//!
//! ```text
//!  peers --> Listener --> connection threads --Borrow--> device thread
//!                              |                            |
//!                              +---- Registry (leases) -----+  LeasedDevice:
//!                                                              model + fabric + irq-relay
//! ```

#![forbid(unsafe_code)]

pub mod config;

mod connection;
mod device_loop;
#[cfg(test)]
mod far_tests;
mod fences;
mod listening;
mod model;
mod open;
mod refusals;
mod registry;
mod server;
mod source;
mod tickets;
mod vfio;

pub use server::{Lender, StartError};
