//! A lender, a backend and a client together, in one process and without
//! QEMU: what a borrow goes through, seen from outside at every step.
//!
//! - `host`: a lender and backends on sockets in a temporary directory;
//! - `vmm`: a client of the vfio-user protocol that sees every errno;
//! - `guest`: RAM, and a driver for the DMA test device, over any client.

mod guest;
mod host;
mod vmm;

mod drain;
mod independent_client;
mod interrupts;
mod late;
mod lender_loss;
mod life;
mod memory;
mod nvme;
mod refusals;
mod round_trip;
mod status;
