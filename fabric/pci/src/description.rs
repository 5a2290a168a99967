//! A function's description, which a borrower reads before it borrows.

use serde::{Deserialize, Serialize};

use crate::{ConfigMirror, regs::*};

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

impl Description {
    /// The mirror of its configuration space in a BAR, if the function has one.
    pub fn mirror(&self) -> Option<ConfigMirror> {
        let mirror = ConfigMirror::of(&self.config.clone().into())?;
        let (bar, bytes) = mirror.area();
        let bar = self.bars.get(usize::from(bar))?.as_ref()?;
        (bytes.end <= bar.size).then_some(mirror)
    }
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
    pub mappable: Vec<SparseMmapArea>,
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

impl Bar {
    /// A BAR without sparse mmap areas: every access traps.
    pub fn new(size: u64, kind: BarKind) -> Self {
        Self {
            size,
            kind,
            mappable: Vec::new(),
        }
    }
}

impl BarKind {
    /// The kind that this value of the BAR's register holds (PCIe 7.5.1.2.1).
    pub fn from_register(register: u32) -> Self {
        let prefetchable = register & BASE_ADDRESS_MEM_PREFETCH != 0;
        if register & BASE_ADDRESS_SPACE_IO != 0 {
            Self::Io
        } else if register & BASE_ADDRESS_MEM_TYPE_MASK == BASE_ADDRESS_MEM_TYPE_64 {
            Self::Memory64 { prefetchable }
        } else {
            Self::Memory32 { prefetchable }
        }
    }

    /// The address bits of the BAR's register.
    pub fn address_mask(self) -> u32 {
        match self {
            Self::Io => BASE_ADDRESS_IO_MASK,
            Self::Memory32 { .. } | Self::Memory64 { .. } => BASE_ADDRESS_MEM_MASK,
        }
    }

    /// The read-only type bits of the BAR's register.
    pub fn register_bits(self) -> u32 {
        let (width, prefetchable) = match self {
            Self::Io => return BASE_ADDRESS_SPACE_IO,
            Self::Memory32 { prefetchable } => (0, prefetchable),
            Self::Memory64 { prefetchable } => (BASE_ADDRESS_MEM_TYPE_64, prefetchable),
        };
        width
            | if prefetchable {
                BASE_ADDRESS_MEM_PREFETCH
            } else {
                0
            }
    }
}

impl SparseMmapArea {
    /// What is left of it without the bytes from `from` to before `to`.
    pub fn without(self, from: u64, to: u64) -> impl Iterator<Item = Self> {
        let end = self.offset.saturating_add(self.len);
        let parts = [(self.offset, end.min(from)), (self.offset.max(to), end)];
        let parts = parts.into_iter().filter(|(start, end)| start < end);
        parts.map(|(start, end)| Self {
            offset: start,
            len: end - start,
        })
    }
}

/// A page-aligned part of a BAR that can be mapped into the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SparseMmapArea {
    /// Offset in the BAR, bytes, a multiple of 4096.
    pub offset: u64,
    /// Bytes, a multiple of 4096.
    pub len: u64,
}
