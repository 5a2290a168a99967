//! What crosses the network when a device model is lent to another host: operations on its medium.
//!
//! The queues of the model are next to the guest, its medium is at the lender. One connection carries the
//! operations of a lease, as [`Frame`]s in both directions, and each operation is one frame there and
//! one back: a read is its request and the data, a write the data and its result.
//!
//! ```text
//!   length of the data, u32 | kind, u8 | flags, u8 | tag, u16 | offset, u64 | length, u64 | number, i32 | zero, u32
//!   the data
//! ```
//!
//! Numbers are little-endian. The connection was opened, authenticated and bound to its lease by the
//! control protocol; with TLS, the keys of that session are taken over by [`Secrets`], since the processes
//! that move data have no certificates.
//!
//! Only `link` and `memory` have `unsafe` code: they pass pointers to guest memory to the kernel, or copy from
//! and to it.

#![deny(unsafe_code)]

mod frame;
mod link;
mod memory;
mod records;

pub use frame::{
    Condition, Frame, FrameError, HEADER, HostIdentity, MAX_DATA, Notifications, REFUSED,
};
pub use link::{Link, LinkError};
pub use memory::Memory;
pub use records::{Cipher, Direction, Secrets};
