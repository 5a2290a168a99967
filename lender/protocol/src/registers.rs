//! Messages of the register channel.
//!
//! Ordered as on PCIe: a write is posted (no answer), a read is answered after all
//! earlier writes.

use serde::{Deserialize, Serialize};

/// Messages of the borrower. A BAR access has 1 to 8 bytes and does not cross an
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
    /// device has (PCIe 7.5.1.1.4). Answered by [`Event::Data`], 0 or 1.
    InterruptStatus,
    /// Reads configuration space, of a function whose BARs are the [lender's](crate::BarOwner::Lender). 1, 2 or 4 bytes,
    /// naturally aligned. Answered by [`Event::Data`]: the bits that the [policy](farside_pci::policy) lets a borrower
    /// read, the others 0; all ones if there are none.
    ConfigRead {
        /// Bytes from the start of the space.
        offset: u16,
        /// 1, 2 or 4.
        len: u8,
    },
    /// Writes configuration space, as far as the policy lets a borrower. Answered by [`Event::Data`] with 0, when the
    /// device has the write: configuration writes are not posted.
    ConfigWrite {
        /// Bytes from the start of the space.
        offset: u16,
        /// 1, 2 or 4.
        len: u8,
        /// Little-endian value in the low `len` bytes.
        value: u32,
    },
}

/// Messages of the lender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The answer to the oldest unanswered access, of those that are answered.
    Data {
        /// Little-endian value.
        value: u64,
    },
    /// A relayed interrupt: signal the eventfd of this vector.
    Interrupt(farside_irq_relay::IrqEvent),
    /// The lender wants the device back: ask the guest to release it. Sent once for a lease, which
    /// the lender ends after `limit_ms`.
    Release {
        /// Milliseconds.
        limit_ms: u64,
    },
}
