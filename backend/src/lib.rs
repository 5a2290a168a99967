//! The per-VM process: serves borrowed devices to QEMU over vfio-user.
//!
//! The protocol is `farside_vfio_user`'s, the trapped configuration space
//! `farside_config_space`'s; here they meet the borrow:
//!
//! - `dma_table`: what the client said of guest memory.
//! - `borrow`: the state machine of a borrow, and the thread that does its work.
//! - `device`: one device: requests in, answers out.
//! - `directory`, `sockets`: where all that is found.
//! - `lookup`, `served`: devices are looked up, and come and go.
//! - `server`, `status`, `admin`, [`Backend`]: all of it on one event loop.

#![forbid(unsafe_code)]

mod admin;
mod backend;
mod borrow;
mod device;
mod directory;
mod dma_table;
mod lookup;
mod served;
mod server;
mod sockets;
mod status;

pub use backend::{Backend, Config, StartError};
pub use farside_irq_relay::Interrupts;
