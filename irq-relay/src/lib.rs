//! Interrupt vectors, masks and eventfds: the path from a device that raises an
//! interrupt to the eventfd on which QEMU waits.
//!
//! The rules are those of Linux VFIO (`linux/vfio.h`, `VFIO_DEVICE_SET_IRQS`),
//! which QEMU uses and which a physical device behind vfio-pci follows already. In
//! layers:
//!
//! - [`IrqCounts`], [`IrqRange`], [`SetIrqs`]: a client's request, checked
//!   before anything acts on it;
//! - `state`: masks, pending bits and the INTx line; pure, it answers each
//!   event with the interrupt to [`IrqEvent`], if any;
//! - [`Vectors`]: that state with a [`IrqTarget`] for each vector, which performs
//!   what the state decides;
//! - [`Relay`]: the target for a borrower on another host. It collects what fired
//!   until a message can carry it; over there [`Vectors::deliver`] passes it
//!   on.
//!
//! # On one host
//!
//! QEMU's eventfds travel from backend to lender; the device's thread signals
//! them itself (`IrqTarget::EventFd`) and the backend is not on the way.
//!
//! # On two hosts
//!
//! ```text
//!  lender                                    borrower
//!  device → Vectors → IrqTarget::Relay ──message──→ Vectors::deliver → eventfd
//! ```
//!
//! Each side masks on its own: the lender so that nothing needless travels,
//! the borrower because a message may be under way when the client masks.

#![deny(unsafe_code)]

mod bits;
mod form;
mod index;
mod relay;
mod set_irqs;
mod state;
mod trigger;
mod vectors;
mod watch;

/// In `tests/interleavings`, loom's.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
}

pub use form::Interrupts;
pub use index::{IrqCounts, IrqCountsError, IrqIndex, IrqInfo, IrqRange};
pub use relay::Relay;
pub use set_irqs::{Action, IrqData, SetIrqs, SetIrqsError, SetIrqsMessage, wire};
pub use state::IrqEvent;
pub use trigger::{IrqEventFd, IrqTarget};
pub use vectors::{VectorCount, Vectors, VectorsStatus};
pub use watch::watch_eventfds;
