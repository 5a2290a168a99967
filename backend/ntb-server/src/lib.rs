//! Serves the two ports of an NTB model ([`model`]) to two VMs, each at a vfio-user
//! socket of its own. A store to the window in one VM becomes a store to the memory of
//! the other, or to a register of one of its devices.
//!
//! ```text
//!   VMM A ⇄ socket ⇄ ┌ side A ┐       ┌ side B ┐ ⇄ socket ⇄ VMM B
//!                    │ config │       │ config │
//!                    │ memory │⇄ Ntb ⇄│ memory │
//!                    │ irqs   │       │ irqs   │
//!                    └────────┘       └────────┘
//! ```
//!
//! One process, one thread, one event loop. The model is pure state; a `Side`
//! is the state of one VM; both together implement the model's `Far`.
//!
//! # Access to the peer VM
//!
//! * Memory that a VMM shares (`DMA_MAP` with a descriptor) is mapped, once for
//!   each file, and accessed directly.
//! * All other addresses are accessed by `DMA_READ` and `DMA_WRITE` commands to that
//!   VMM, which performs them as its device's DMA: through the guest's IOMMU, also to
//!   registers of the VM's other devices.
//!
//! While commands to a VMM are outstanding, all accesses to its VM are commands, which
//! preserves their order as PCIe requires.
//!
//! # No blocking
//!
//! A VMM holds its big lock while a vCPU waits for the reply to a region read, and needs
//! that lock to serve DMA commands. So the server never blocks: a read that needs a
//! command is answered when that command completes, and both VMMs are served
//! meanwhile. Two reads that wait for each other's VMM would both time out after 2
//! seconds; the later one is refused at once.

#![forbid(unsafe_code)]

mod handler;
mod hosts;
mod memory;
pub mod model;
mod server;
mod side;

pub use model::PortConfig;
pub use server::{Config, NtbServer, PortAt, StartError};
