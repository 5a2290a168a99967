//! A lender, a backend and a client in one process, without QEMU: the states of a borrow,
//! observed from outside at every step.
//!
//! - `host`: a lender and backends on sockets in a temporary directory;
//! - `vmm`: a client of the vfio-user protocol that exposes every errno;
//! - `guest`: RAM, and a driver for the DMA test device, over any client.

mod guest;
mod host;
mod vmm;

mod drain;
mod goes_on;
mod independent_client;
mod interrupts;
mod late;
mod lender_loss;
mod life;
mod memory;
mod nvme;
mod peer_to_peer;
mod quota;
mod refusals;
mod revoke;
mod round_trip;
mod sharing;
mod status;
