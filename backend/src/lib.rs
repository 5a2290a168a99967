//! The per-VM process: serves borrowed devices to QEMU over vfio-user.
//!
//! Combines the protocol of `farside_vfio_user` and the trapped configuration space of
//! `farside_config_space` with the borrow:
//!
//! - `dma_table`: the client's DMA mappings.
//! - `borrow`: the state machine of a borrow, and its worker thread.
//! - `device`: the requests to one device.
//! - `confine`: the restrictions of this process; `helper`: the process that does the rest for it.
//! - `directory`, `sockets`, `links`: the directory and sockets of the VM.
//! - `records`: what outlives this process.
//! - `lookup`, `served`: device lookup, and attaching and detaching devices.
//! - `server`, `status`, `admin`, [`Backend`]: the subscribers of the event loop, and the loop
//!   itself.

#![forbid(unsafe_code)]

mod admin;
mod backend;
mod borrow;
mod confine;
mod device;
mod directory;
mod dma_table;
mod helper;
mod links;
mod lookup;
mod peer_bars;
mod records;
mod served;
mod server;
mod sockets;
mod status;

pub use backend::{Backend, Config, ReleaseHook, StartError};
pub use farside_irq_relay::Interrupts;
pub use helper::{Helper, serve_backend};
pub use records::Past;
