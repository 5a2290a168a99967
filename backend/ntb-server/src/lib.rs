//! Serves the two ports of an NTB model ([`model`]) to two VMs,
//! each at a vfio-user socket of its own. A store to the window in one VM lands
//! in the memory of the other, or in a register of one of its devices.
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
//! is what there is of one VM; both together are the model's `Far`.
//!
//! # How the far side is reached
//!
//! * Memory that a VMM shared (`DMA_MAP` with a descriptor) is mapped, once for
//!   each file, and copied to and from.
//! * All else is reached by `DMA_READ` and `DMA_WRITE` messages to that VMM,
//!   which performs them as its device's DMA: through the guest's IOMMU, to
//!   registers of the VM's other devices.
//!
//! While messages to a VMM are unanswered, all accesses go by message: so they
//! arrive in the order in which they were made, as PCIe promises.
//!
//! # Never waiting
//!
//! A VMM holds its big lock while a processor waits for an answer of ours, and
//! needs it to serve our messages. So nothing here waits: a read that needs a
//! message is answered when that is answered, and both VMMs are served
//! meanwhile. Two reads that wait for each other's VMM would wait until their
//! time is up (2 seconds); the later one is refused at once.

#![forbid(unsafe_code)]

mod handler;
mod hosts;
mod memory;
pub mod model;
mod server;
mod side;

pub use model::PortConfig;
pub use server::{Config, NtbServer, PortAt, StartError};
