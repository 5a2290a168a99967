//! What the client said of guest memory: every `DMA_MAP` that was not taken
//! back. Recording maps nothing and pins nothing.

use std::{collections::BTreeMap, fs::File, sync::Arc};

use farside_guest_layout::{Gpa, GpaRange, Oracle, PAGE_SIZE, RangeSet, Resolution};
use rustix::io::Errno;

/// Most mappings of one client: what the version reply announces. Bounds memory
/// and descriptors.
const MAX_MAPPINGS: usize = crate::vfio_user::MAX_DMA_MAPS as usize;

/// Memory without a descriptor that is larger than this is guest RAM that the
/// client keeps to itself; what is smaller may be a ROM.
const LARGEST_ROM: u64 = 16 << 20;

/// A file that holds guest memory.
#[derive(Clone, Debug)]
pub(crate) struct Backing {
    pub(crate) file: Arc<File>,
    /// Offset of the mapping's first byte in the file.
    pub(crate) offset: u64,
}

/// One `DMA_MAP`.
#[derive(Clone, Debug)]
pub(crate) struct Mapping {
    pub(crate) range: GpaRange,
    /// None for memory that the client did not share.
    pub(crate) backing: Option<Backing>,
    pub(crate) writable: bool,
}

impl Mapping {
    /// Whether a device can reach it.
    pub(crate) fn is_shared(&self) -> bool {
        self.backing.is_some()
    }
}

/// Why a map or unmap is refused; the errno is what the client is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DmaError {
    #[error("range {start:#x}+{len:#x} is empty, not page aligned, or wraps")]
    Range { start: u64, len: u64 },
    #[error("range {start:#x}+{len:#x} overlaps one that is mapped")]
    Overlap { start: u64, len: u64 },
    #[error("over {MAX_MAPPINGS} mappings")]
    TooMany,
    #[error("nothing is mapped at {start:#x}+{len:#x}")]
    NotMapped { start: u64, len: u64 },
    #[error("{start:#x}+{len:#x} would split a mapping")]
    Split { start: u64, len: u64 },
    #[error(
        "the file of {start:#x}+{len:#x} is no memory of at least that size at offset {offset:#x}"
    )]
    File { start: u64, len: u64, offset: u64 },
}

impl DmaError {
    pub(crate) fn errno(self) -> Errno {
        match self {
            Self::Range { .. } | Self::Split { .. } | Self::File { .. } => Errno::INVAL,
            Self::Overlap { .. } => Errno::EXIST,
            Self::TooMany => Errno::NOSPC,
            Self::NotMapped { .. } => Errno::NOENT,
        }
    }
}

/// All mappings of one client, by first address.
#[derive(Clone, Debug, Default)]
pub(crate) struct DmaTable {
    mappings: BTreeMap<u64, Mapping>,
}

impl DmaTable {
    /// Records a mapping.
    pub(crate) fn map(
        &mut self,
        start: u64,
        len: u64,
        writable: bool,
        backing: Option<Backing>,
    ) -> Result<Mapping, DmaError> {
        let range = page_range(start, len)?;
        if self.overlapping(range).next().is_some() {
            return Err(DmaError::Overlap { start, len });
        }
        if self.mappings.len() >= MAX_MAPPINGS {
            return Err(DmaError::TooMany);
        }
        if let Some(backing) = &backing {
            check_file(start, len, backing)?;
        }
        let mapping = Mapping {
            range,
            backing,
            writable,
        };
        self.mappings.insert(start, mapping.clone());
        Ok(mapping)
    }

    /// The mappings that `unmap` of the same range would remove.
    pub(crate) fn within(&self, start: u64, len: u64) -> Result<Vec<Mapping>, DmaError> {
        let range = page_range(start, len)?;
        let found: Vec<Mapping> = self.overlapping(range).cloned().collect();
        if found.is_empty() {
            return Err(DmaError::NotMapped { start, len });
        }
        if found.iter().any(|mapping| {
            mapping.range.start() < range.start() || mapping.range.end() > range.end()
        }) {
            return Err(DmaError::Split { start, len });
        }
        Ok(found)
    }

    /// Forgets the mappings, which [`DmaTable::within`] gave.
    pub(crate) fn remove(&mut self, mappings: &[Mapping]) {
        for mapping in mappings {
            self.mappings.remove(&mapping.range.start().get());
        }
    }

    /// All mappings, lowest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Mapping> {
        self.mappings.values()
    }

    /// Guest RAM that the client did not share, if there is any: what a device
    /// cannot reach although the guest will tell it to.
    pub(crate) fn private_ram(&self) -> Option<GpaRange> {
        self.iter()
            .find(|mapping| {
                !mapping.is_shared() && mapping.writable && mapping.range.len() > LARGEST_ROM
            })
            .map(|mapping| mapping.range)
    }

    /// Which ranges resolve to memory that a device can reach.
    pub(crate) fn oracle(&self) -> TableOracle {
        TableOracle(
            self.iter()
                .filter(|mapping| mapping.is_shared())
                .map(|mapping| mapping.range)
                .collect(),
        )
    }

    fn overlapping(&self, range: GpaRange) -> impl Iterator<Item = &Mapping> {
        let before = self
            .mappings
            .range(..range.start().get())
            .next_back()
            .map(|(_, mapping)| mapping)
            .filter(move |mapping| mapping.range.end() > range.start());
        let from = self
            .mappings
            .range(range.start().get()..range.end().get())
            .map(|(_, mapping)| mapping);
        before.into_iter().chain(from)
    }
}

/// Answers the layout probe from the table.
pub(crate) struct TableOracle(RangeSet);

impl Oracle for TableOracle {
    fn resolve(&mut self, range: GpaRange) -> Resolution {
        self.0.resolve(range)
    }
}

fn page_range(start: u64, len: u64) -> Result<GpaRange, DmaError> {
    let bad = DmaError::Range { start, len };
    if !start.is_multiple_of(PAGE_SIZE) || !len.is_multiple_of(PAGE_SIZE) {
        return Err(bad);
    }
    GpaRange::new(Gpa::new(start), len).map_err(|_| bad)
}

/// The file must be a memory file that holds the whole mapping now. (It may
/// shrink later: whoever maps it guards against that.)
fn check_file(start: u64, len: u64, backing: &Backing) -> Result<(), DmaError> {
    let offset = backing.offset;
    let bad = DmaError::File { start, len, offset };
    let stat = rustix::fs::fstat(&*backing.file).map_err(|_| bad)?;
    let is_file = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
    let end = offset.checked_add(len).ok_or(bad)?;
    let fits = u64::try_from(stat.st_size).is_ok_and(|size| end <= size);
    if is_file && fits && offset.is_multiple_of(PAGE_SIZE) {
        Ok(())
    } else {
        Err(bad)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn memory(len: u64) -> Option<Backing> {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        Some(Backing {
            file: Arc::new(file.into()),
            offset: 0,
        })
    }

    fn mapped(ranges: &[(u64, u64)]) -> DmaTable {
        let mut table = DmaTable::default();
        for &(start, len) in ranges {
            table.map(start, len, true, memory(len)).unwrap();
        }
        table
    }

    #[test]
    fn overlaps_are_refused_on_either_side() {
        let mut table = mapped(&[(0x2000, 0x2000)]);
        for start in [0x1000, 0x2000, 0x3000] {
            assert_eq!(
                table.map(start, 0x2000, true, None).unwrap_err().errno(),
                Errno::EXIST
            );
        }
        table.map(0x1000, 0x1000, true, None).unwrap();
        table.map(0x4000, 0x1000, true, None).unwrap();
    }

    #[test]
    fn unmap_takes_whole_mappings_only() {
        let mut table = mapped(&[(0, 0x2000), (0x2000, 0x2000)]);
        assert_eq!(table.within(0, 0x1000).unwrap_err().errno(), Errno::INVAL);
        assert_eq!(
            table.within(0x1000, 0x3000).unwrap_err().errno(),
            Errno::INVAL
        );
        assert_eq!(
            table.within(0x4000, 0x1000).unwrap_err().errno(),
            Errno::NOENT
        );
        let both = table.within(0, 0x4000).unwrap();
        assert_eq!(both.len(), 2);
        table.remove(&both);
        assert_eq!(table.iter().count(), 0);
    }

    #[test]
    fn ranges_that_wrap_or_are_not_pages_are_refused() {
        let mut table = DmaTable::default();
        for (start, len) in [(0, 0), (1, 0x1000), (0, 0xfff), (u64::MAX - 0xfff, 0x1000)] {
            assert_eq!(
                table.map(start, len, true, None).unwrap_err().errno(),
                Errno::INVAL,
                "{start:#x}+{len:#x}"
            );
        }
    }

    #[test]
    fn a_file_smaller_than_its_mapping_is_refused() {
        let mut table = DmaTable::default();
        let error = table.map(0, 0x3000, true, memory(0x2000)).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL);
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        let pipe = Backing {
            file: Arc::new(pipe.into()),
            offset: 0,
        };
        assert_eq!(
            table.map(0, 0x1000, true, Some(pipe)).unwrap_err().errno(),
            Errno::INVAL
        );
    }

    #[test]
    fn large_private_memory_is_ram_that_is_not_shared() {
        let mut table = mapped(&[(0, 0x10_0000)]);
        table.map(0xfffc_0000, 0x4_0000, false, None).unwrap();
        assert_eq!(table.private_ram(), None);
        table.map(0x10_0000, 1 << 30, true, None).unwrap();
        assert_eq!(table.private_ram().unwrap().start(), Gpa::new(0x10_0000));
    }
}
