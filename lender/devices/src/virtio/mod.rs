//! virtio devices (Virtual I/O Device 1.2) on the PCI transport. Sections in comments are that
//! specification's.
//!
//! # Requests
//!
//! 1. The driver puts a descriptor chain into a queue, and notifies if it was asked to (`pci`).
//! 2. A poll takes the chain out of guest memory, once (`queue`, `memory`), and decodes it (`blk`, `net`).
//! 3. Buffers become host slices, and these the vectors of one system call, as with
//!    [NVMe](crate::nvme): data moves between the image and guest memory without a bounce buffer.
//! 4. The request is returned, and once per batch the interrupt raised.
//!
//! While the device is busy the driver need not notify, so no access traps.
//!
//! # Limits
//!
//! Queues and their sizes, descriptors of a chain, requests in flight, bytes of a request's part that is
//! in flight, ranges of a discard. These bound the memory that a guest can make a model use, and requests
//! taken from a queue at a time bound a poll.
//!
//! # Invalid rings
//!
//! What no driver puts into a queue makes the device need a reset (2.1.2): it does nothing until its status is
//! 0. Rings that are not mapped for a moment do not (`pci`).

mod blk;
mod memory;
pub mod net;
mod pci;
mod queue;
pub(crate) mod saved;

#[cfg(test)]
mod tests;

pub use blk::{Config, ConfigError, VirtioBlk};
pub use net::VirtioNet;
pub use pci::VENDOR_ID;
pub(crate) use saved::STATE_KIND;
