//! The memory of the driver's queues: 1 MiB of low RAM, from 1 MiB on.

use std::ops::Range;

/// All RAM that the driver reserves.
pub const DRIVER_RAM: Range<u64> = 0x10_0000..0x20_0000;

/// Most queue pairs besides the admin queue pair.
pub const MAX_QUEUES: u16 = 32;

/// Entries of each queue: a submission queue is one page.
pub const ENTRIES: u16 = 64;

/// Bytes per queue pair.
const STRIDE: u64 = 0x4000;

/// Memory layout of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QueueMemory {
    /// Submission queue.
    pub sq: u64,
    /// Completion queue.
    pub cq: u64,
    /// A page for a PRP list.
    pub list: u64,
    /// A page for data.
    pub page: u64,
}

impl QueueMemory {
    /// The layout of queue pair `id`; 0 is the admin queue pair.
    pub fn of(id: u16) -> Self {
        let base = DRIVER_RAM.start + u64::from(id) * STRIDE;
        Self {
            sq: base,
            cq: base + 0x1000,
            list: base + 0x2000,
            page: base + 0x3000,
        }
    }
}

// The last queue pair's memory must end within the driver's.
const _: () = assert!(DRIVER_RAM.start + (MAX_QUEUES as u64 + 1) * STRIDE <= DRIVER_RAM.end);
