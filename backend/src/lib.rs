//! The per-VM process: serves borrowed devices to QEMU over vfio-user.
//!
//! - [`vfio_user`]: the protocol: bytes, messages, connections.
//! - [`config_space`]: the trapped configuration space.
//! - `dma_table`: what the client said of guest memory.
//! - `borrow`: the state machine of a borrow, and the thread that does its work.
//! - `device`: one device: requests in, answers out.
//! - `server`, `status`, [`Backend`]: all of it on one event loop.

#![forbid(unsafe_code)]

pub mod config_space;
pub mod vfio_user;

mod backend;
mod borrow;
mod causes;
mod device;
mod dma_table;
mod server;
mod status;

pub use backend::{Backend, Config, Interrupts, StartError};
