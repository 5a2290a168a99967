//! Messages of the register channel.
//!
//! Order is kept, as on PCIe: a write is posted (no answer), a read is
//! answered after all writes that went before it.

use serde::{Deserialize, Serialize};

/// From the borrower's side. A BAR access has 1 to 8 bytes and does not cross an
/// 8-byte boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// Answered by [`Event::Data`].
    Read {
        /// 0 to 5.
        bar: u8,
        /// Bytes from the start of the BAR.
        offset: u64,
        /// 1 to 8.
        len: u8,
    },
    /// Not answered.
    Write {
        /// 0 to 5.
        bar: u8,
        /// Bytes from the start of the BAR.
        offset: u64,
        /// 1 to 8.
        len: u8,
        /// Little-endian value in the low `len` bytes.
        value: u64,
    },
    /// Reads Interrupt Status, the one bit of configuration space that only the
    /// device knows (PCIe 7.5.1.1.4). Answered by [`Event::Data`], 0 or 1.
    InterruptStatus,
}

/// From the lender's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The answer to the oldest unanswered [`Access::Read`] or
    /// [`Access::InterruptStatus`].
    Data {
        /// Little-endian value.
        value: u64,
    },
    /// A relayed interrupt: signal the eventfd of this vector.
    Interrupt(farside_irq_relay::Fire),
}
