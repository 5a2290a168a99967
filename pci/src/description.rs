//! What a function looks like from outside: the part of it that a borrower
//! reads before it borrows.

use serde::{Deserialize, Serialize};

/// A function's configuration-space image, BARs and interrupts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// The configuration space after power-on: 256 or 4096 bytes. BAR
    /// registers hold the type bits only; addresses and sizes come from
    /// `bars`.
    pub config: Vec<u8>,
    /// BARs 0 to 5. A 64-bit BAR leaves the next one `None`.
    pub bars: [Option<Bar>; 6],
    /// Whether the function has an INTx pin.
    pub intx: bool,
    /// Number of MSI vectors, 0 to 32.
    pub msi_vectors: u16,
    /// Number of MSI-X vectors, 0 to 2048.
    pub msix_vectors: u16,
    /// One line for people: model name and size.
    pub summary: String,
}

/// One base address register.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bar {
    /// Bytes; a power of two, at least 16 for memory and 4 for I/O.
    pub size: u64,
    /// Address space and width.
    pub kind: BarKind,
    /// Page-aligned areas that the borrower's CPU may reach without a trap.
    /// All else traps.
    pub mappable: Vec<MappableArea>,
}

/// Address space and width of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BarKind {
    /// I/O space.
    Io,
    /// 32-bit memory space.
    Memory32 {
        /// Reads have no side effects.
        prefetchable: bool,
    },
    /// 64-bit memory space: takes two registers.
    Memory64 {
        /// Reads have no side effects.
        prefetchable: bool,
    },
}

/// A page-aligned part of a BAR that can be mapped into the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappableArea {
    /// Offset in the BAR, bytes, a multiple of 4096.
    pub offset: u64,
    /// Bytes, a multiple of 4096.
    pub len: u64,
}
