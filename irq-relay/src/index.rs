//! Interrupt indexes of a PCI function, and how many vectors each has.

use std::{fmt, ops::Range};

use serde::{Deserialize, Serialize};

use crate::{SetIrqsError, wire};

/// The kinds of interrupt of a PCI function, numbered as in `linux/vfio.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum IrqIndex {
    /// The INTx pin: level-triggered, masked by VFIO whenever it fires.
    Intx = 0,
    /// Message-signalled interrupts, up to 32.
    Msi = 1,
    /// Extended message-signalled interrupts, up to 2048.
    Msix = 2,
    /// The device had an error that it cannot recover from.
    Err = 3,
    /// The lender wants the device back.
    Req = 4,
}

impl IrqIndex {
    /// All indexes, by number. Its length is VFIO's `num_irqs`.
    pub const ALL: [Self; 5] = [Self::Intx, Self::Msi, Self::Msix, Self::Err, Self::Req];
}

impl TryFrom<u32> for IrqIndex {
    type Error = SetIrqsError;

    fn try_from(index: u32) -> Result<Self, SetIrqsError> {
        Self::ALL
            .get(index as usize)
            .copied()
            .ok_or(SetIrqsError::UnknownIndex { index })
    }
}

impl fmt::Display for IrqIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Intx => "INTx",
            Self::Msi => "MSI",
            Self::Msix => "MSI-X",
            Self::Err => "error",
            Self::Req => "request",
        })
    }
}

/// How many vectors a function has at each index. Within PCI's limits, however
/// it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RawCounts", into = "RawCounts")]
pub struct IrqCounts {
    counts: [u16; 5],
}

impl IrqCounts {
    /// Most MSI vectors of a function (PCIe 7.7.1).
    pub const MAX_MSI: u16 = 32;
    /// Most MSI-X vectors of a function (PCIe 7.7.2).
    pub const MAX_MSIX: u16 = 2048;

    /// A function without interrupts.
    pub const fn new() -> Self {
        Self { counts: [0; 5] }
    }

    /// As many vectors as VFIO reports for each index. Of INTx, errors and requests there is one, if there are any.
    ///
    /// # Errors
    /// More MSI or MSI-X vectors than PCI has.
    pub fn of(vectors: [u32; 5]) -> Result<Self, IrqCountsError> {
        let mut counts = Self::new();
        for index in IrqIndex::ALL {
            let vectors = vectors[index as usize];
            counts.counts[index as usize] = match index {
                IrqIndex::Msi | IrqIndex::Msix => {
                    check_count(index, vectors)?;
                    vectors as u16
                }
                IrqIndex::Intx | IrqIndex::Err | IrqIndex::Req => vectors.min(1) as u16,
            };
        }
        Ok(counts)
    }

    /// Adds the INTx pin.
    #[must_use]
    pub fn with_intx(mut self) -> Self {
        self.counts[IrqIndex::Intx as usize] = 1;
        self
    }

    /// Sets the number of MSI vectors, 0 to 32.
    pub fn with_msi(mut self, vectors: u16) -> Result<Self, IrqCountsError> {
        check_count(IrqIndex::Msi, vectors.into())?;
        self.counts[IrqIndex::Msi as usize] = vectors;
        Ok(self)
    }

    /// Sets the number of MSI-X vectors, 0 to 2048.
    pub fn with_msix(mut self, vectors: u16) -> Result<Self, IrqCountsError> {
        check_count(IrqIndex::Msix, vectors.into())?;
        self.counts[IrqIndex::Msix as usize] = vectors;
        Ok(self)
    }

    /// Adds the error interrupt.
    #[must_use]
    pub fn with_err(mut self) -> Self {
        self.counts[IrqIndex::Err as usize] = 1;
        self
    }

    /// Adds the request interrupt.
    #[must_use]
    pub fn with_req(mut self) -> Self {
        self.counts[IrqIndex::Req as usize] = 1;
        self
    }

    /// Number of vectors at `index`.
    pub fn count(&self, index: IrqIndex) -> u16 {
        self.counts[index as usize]
    }

    /// The answer to `VFIO_DEVICE_GET_IRQ_INFO` for `index`.
    pub fn info(&self, index: IrqIndex) -> IrqInfo {
        // No NORESIZE for MSI-X: vectors may be given triggers one at a time,
        // which spares QEMU from tearing all down when the guest unmasks one
        // more. MASKABLE there makes QEMU pass the guest's masks on, so that
        // the pending bits live where the device is.
        let flags = wire::INFO_EVENTFD
            | match index {
                IrqIndex::Intx => wire::INFO_MASKABLE | wire::INFO_AUTOMASKED,
                IrqIndex::Msix => wire::INFO_MASKABLE,
                IrqIndex::Msi | IrqIndex::Err | IrqIndex::Req => wire::INFO_NORESIZE,
            };
        IrqInfo {
            flags,
            count: self.count(index).into(),
        }
    }
}

/// VFIO's information about one index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IrqInfo {
    /// `VFIO_IRQ_INFO_*`, see [`wire`].
    pub flags: u32,
    /// Number of vectors.
    pub count: u32,
}

/// More vectors than PCI has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{vectors} {index} vectors: a function has at most {limit}")]
pub struct IrqCountsError {
    index: IrqIndex,
    vectors: u32,
    limit: u16,
}

fn check_count(index: IrqIndex, vectors: u32) -> Result<(), IrqCountsError> {
    let limit = match index {
        IrqIndex::Msi => IrqCounts::MAX_MSI,
        IrqIndex::Msix => IrqCounts::MAX_MSIX,
        IrqIndex::Intx | IrqIndex::Err | IrqIndex::Req => 1,
    };
    if vectors > limit.into() {
        return Err(IrqCountsError {
            index,
            vectors,
            limit,
        });
    }
    Ok(())
}

/// Counts as they travel, not yet checked.
#[derive(Serialize, Deserialize)]
struct RawCounts {
    intx: bool,
    msi: u16,
    msix: u16,
    err: bool,
    req: bool,
}

impl TryFrom<RawCounts> for IrqCounts {
    type Error = IrqCountsError;

    fn try_from(raw: RawCounts) -> Result<Self, IrqCountsError> {
        let mut counts = Self::new().with_msi(raw.msi)?.with_msix(raw.msix)?;
        counts.counts[IrqIndex::Intx as usize] = raw.intx.into();
        counts.counts[IrqIndex::Err as usize] = raw.err.into();
        counts.counts[IrqIndex::Req as usize] = raw.req.into();
        Ok(counts)
    }
}

impl From<IrqCounts> for RawCounts {
    fn from(counts: IrqCounts) -> Self {
        Self {
            intx: counts.count(IrqIndex::Intx) != 0,
            msi: counts.count(IrqIndex::Msi),
            msix: counts.count(IrqIndex::Msix),
            err: counts.count(IrqIndex::Err) != 0,
            req: counts.count(IrqIndex::Req) != 0,
        }
    }
}

/// Vectors `start..start + count` of one index, within what the function has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqRange {
    index: IrqIndex,
    start: u16,
    count: u16,
}

impl IrqRange {
    /// Checks a range as it came from a client. `count` may be 0 (with any
    /// `start` that exists), which only disabling a whole index uses.
    ///
    /// Call it before allocating anything of size `count`.
    pub fn new(
        counts: &IrqCounts,
        index: u32,
        start: u32,
        count: u32,
    ) -> Result<Self, SetIrqsError> {
        let index = IrqIndex::try_from(index)?;
        let available = counts.count(index);
        if available == 0 {
            return Err(SetIrqsError::NoVectors { index });
        }
        let end = u64::from(start) + u64::from(count);
        if start >= available.into() || end > available.into() {
            return Err(SetIrqsError::OutOfRange {
                index,
                start,
                count,
                available,
            });
        }
        // Both are at most `available`, which is a u16.
        Ok(Self {
            index,
            start: start as u16,
            count: count as u16,
        })
    }

    /// The index.
    pub fn index(&self) -> IrqIndex {
        self.index
    }

    /// First vector.
    pub fn start(&self) -> u16 {
        self.start
    }

    /// Number of vectors.
    pub fn count(&self) -> u16 {
        self.count
    }

    /// The vectors.
    pub fn vectors(&self) -> Range<u16> {
        self.start..self.start + self.count
    }

    /// The same range, checked against the counts of another function.
    pub(crate) fn recheck(&self, counts: &IrqCounts) -> Result<(), SetIrqsError> {
        Self::new(
            counts,
            self.index as u32,
            self.start.into(),
            self.count.into(),
        )
        .map(drop)
    }
}
