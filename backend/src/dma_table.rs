//! The client's DMA mappings: every `DMA_MAP` that has not been unmapped. Recording one neither
//! maps nor pins memory. Addresses are guest-physical; behind a vIOMMU, the guest's IOVAs.
//!
//! A client only prints that a `DMA_MAP` was refused, and continues. So refused ranges are recorded
//! too: until the client unmaps them, the guest has RAM that a device cannot reach, and bus
//! mastering is refused.

use std::{
    collections::BTreeMap,
    fs::File,
    sync::{Arc, Weak},
};

use farside_fabric::{MemoryRange, PeerAddress};
use farside_guest_layout::{
    Gpa, GpaRange, HIGH_MEMORY, MemoryMap, PAGE_SIZE, RangeSet, Resolution,
};
use rustix::{
    fs::{FileType, OFlags, Stat, fcntl_getfl, fstat},
    io::Errno,
};

/// Mappings above 4 GiB that are smaller than this are not RAM: no VM has so little there.
const RAM_UNIT: u64 = 1 << 20;

/// Maximum number of mappings of one client, as announced in the version reply. Bounds memory.
const MAX_MAPPINGS: usize = farside_vfio_user::MAX_DMA_MAPS as usize;

/// Maximum number of files behind one client's memory. Bounds descriptors. QEMU uses one for each
/// memory backend, and at most 256 memory slots.
const MAX_FILES: usize = 512;

/// Maximum number of recorded refusals. One is enough to block DMA.
const MAX_REFUSALS: usize = 64;

/// An address that is RAM in any PC with more than 1 MiB: the first above the legacy area.
pub(crate) const LOW_MEMORY: Gpa = Gpa::new(1 << 20);

/// A file that holds guest memory.
#[derive(Clone, Debug)]
pub(crate) struct Backing {
    pub(crate) file: Arc<File>,
    /// Offset of the mapping's first byte in the file.
    pub(crate) offset: u64,
}

/// What is mapped.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// Memory that no device can reach: the client sent no descriptor, and this backend has none.
    Private,
    /// Guest RAM that the client shared.
    Ram(Backing),
    /// The BAR of a device of the VM, whose memory [this backend has](crate::peer_bars).
    Bar(Backing),
    /// The BAR of a function that the same lender has, and that this host reaches through an NTB, at that peer address.
    LendersBar(PeerAddress),
}

impl Target {
    pub(crate) fn backing(&self) -> Option<&Backing> {
        match self {
            Self::Private | Self::LendersBar(_) => None,
            Self::Ram(backing) | Self::Bar(backing) => Some(backing),
        }
    }
}

/// One `DMA_MAP`.
#[derive(Clone, Debug)]
pub(crate) struct Mapping {
    pub(crate) range: GpaRange,
    pub(crate) target: Target,
    pub(crate) writable: bool,
}

impl Mapping {
    /// Whether it is guest RAM that a device can reach.
    pub(crate) fn is_ram(&self) -> bool {
        matches!(self.target, Target::Ram(_))
    }

    /// Whether it is a BAR that a device can reach.
    pub(crate) fn is_bar(&self) -> bool {
        matches!(self.target, Target::Bar(_) | Target::LendersBar(_))
    }

    /// The memory that a device can reach, if any.
    pub(crate) fn memory(&self) -> Option<MemoryRange> {
        self.target.backing().map(|backing| MemoryRange {
            file: Arc::clone(&backing.file),
            offset: backing.offset,
            len: self.range.len(),
            writable: self.writable,
        })
    }

    /// The GPA range of its whole file: the region of a memory device, which the client may map in
    /// parts, or the BAR.
    pub(crate) fn region(&self) -> Option<GpaRange> {
        let backing = self.target.backing()?;
        let start = self.range.start().checked_sub(backing.offset)?;
        let size = u64::try_from(fstat(&*backing.file).ok()?.st_size).ok()?;
        GpaRange::new(start, size / PAGE_SIZE * PAGE_SIZE).ok()
    }

    /// Whether it is shared memory at 1 MiB, where every guest has RAM unless behind a vIOMMU.
    pub(crate) fn is_low_ram(&self) -> bool {
        self.is_ram() && self.range.contains(LOW_MEMORY)
    }

    /// Whether it is guest RAM that the client did not share. Other memory without a descriptor is
    /// a ROM or a BAR.
    pub(crate) fn is_private_ram(&self) -> bool {
        let is_ram_at = |at| self.range.contains(at) && !self.may_be_bar();
        matches!(self.target, Target::Private)
            && [LOW_MEMORY, HIGH_MEMORY].into_iter().any(is_ram_at)
    }

    /// Whether it may be a memory BAR above 4 GiB: a naturally aligned power of two in size (PCI
    /// Local Bus 3.0, 6.2.5.1), or the first part of a BAR that is split by its MSI-X table. A
    /// first part of 1 MiB or more that is not a power of two is taken for RAM. A VM without RAM
    /// above 4 GiB may have a BAR at 4 GiB.
    ///
    /// Private high RAM of such a size next to shared low RAM is therefore taken for a BAR: DMA to
    /// it faults.
    fn may_be_bar(&self) -> bool {
        let (start, len) = (self.range.start(), self.range.len());
        let is_whole = len.is_power_of_two() && start.get().is_multiple_of(len);
        start >= HIGH_MEMORY && (is_whole || len < RAM_UNIT)
    }
}

/// A refused map or unmap. The client receives its errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DmaError {
    #[error("range {start}+{len:#x} is empty, not page aligned, or wraps")]
    Range { start: Gpa, len: u64 },
    #[error("range {start}+{len:#x} overlaps one that is mapped")]
    Overlap { start: Gpa, len: u64 },
    #[error("over {MAX_MAPPINGS} mappings")]
    TooMany,
    #[error("its memory is in over {MAX_FILES} files")]
    TooManyFiles,
    #[error("nothing is mapped at {start}+{len:#x}")]
    NotMapped { start: Gpa, len: u64 },
    #[error("{start}+{len:#x} would split a mapping")]
    Split { start: Gpa, len: u64 },
    #[error(
        "the file of {start}+{len:#x} is no memory of at least that size at offset {offset:#x}"
    )]
    File { start: Gpa, len: u64, offset: u64 },
}

impl DmaError {
    pub(crate) fn errno(self) -> Errno {
        match self {
            Self::Range { .. } | Self::Split { .. } | Self::File { .. } => Errno::INVAL,
            Self::Overlap { .. } => Errno::EXIST,
            Self::TooMany | Self::TooManyFiles => Errno::NOSPC,
            Self::NotMapped { .. } => Errno::NOENT,
        }
    }
}

/// All mappings of one client, by first address.
#[derive(Clone, Debug, Default)]
pub(crate) struct DmaTable {
    mappings: BTreeMap<Gpa, Mapping>,
    /// The files of the mappings, deduplicated: a client sends a descriptor with each mapping,
    /// nearly always of the same file.
    files: BTreeMap<FileKey, Weak<File>>,
    /// Ranges whose mapping was refused, by first address and length.
    refused: BTreeMap<(Gpa, u64), DmaError>,
}

/// Device, inode and access mode: equal for descriptors that are equivalent for `mmap`. The address of the descriptor of a BAR.
type FileKey = (u64, u64, u32);

/// The reason that DMA is blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Blocked {
    #[error(
        "guest RAM at GPA {start} ({mib} MiB) is not shared with the backend: start QEMU with `-object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem`"
    )]
    PrivateRam { start: Gpa, mib: u64 },
    #[error("a DMA_MAP was refused, so guest RAM may be out of reach: {0}")]
    Refused(DmaError),
}

impl DmaTable {
    /// Records a mapping, or that it was refused.
    pub(crate) fn map(
        &mut self,
        start: Gpa,
        len: u64,
        writable: bool,
        target: Target,
    ) -> Result<Mapping, DmaError> {
        let mapped = self.try_map(start, len, writable, target);
        if let Err(error) = &mapped
            && self.refused.len() < MAX_REFUSALS
        {
            self.refused.insert((start, len), *error);
        }
        mapped
    }

    fn try_map(
        &mut self,
        start: Gpa,
        len: u64,
        writable: bool,
        mut target: Target,
    ) -> Result<Mapping, DmaError> {
        let range = page_range(start, len)?;
        if self.overlapping(range).next().is_some() {
            return Err(DmaError::Overlap { start, len });
        }
        if self.mappings.len() >= MAX_MAPPINGS {
            return Err(DmaError::TooMany);
        }
        match &mut target {
            Target::Private | Target::LendersBar(_) => {}
            Target::Ram(backing) => {
                let key = check_file(start, len, backing)?;
                backing.file = self.one_of(key, &backing.file)?;
            }
            // Not the client's. Functions of VFIO groups share an inode.
            Target::Bar(backing) => {
                let key = (u64::MAX, Arc::as_ptr(&backing.file).addr() as u64, 0);
                if self.one_of(key, &backing.file).is_err() {
                    // No more descriptors: it is out of reach, which keeps no device from its RAM.
                    target = Target::Private;
                }
            }
        }
        let mapping = Mapping {
            range,
            target,
            writable,
        };
        self.mappings.insert(start, mapping.clone());
        Ok(mapping)
    }

    /// The ranges whose mapping was refused: address and length, bytes.
    pub(crate) fn refused(&self) -> impl Iterator<Item = (Gpa, u64)> {
        self.refused.keys().copied()
    }

    /// Records that a mapping was refused, by the process before.
    pub(crate) fn refuse(&mut self, start: Gpa, len: u64) {
        self.refused
            .insert((start, len), DmaError::Range { start, len });
    }

    /// Removes the mappings and refusals within a range. Returns the mappings to unmap.
    pub(crate) fn unmap(&mut self, start: Gpa, len: u64) -> Result<Vec<Mapping>, DmaError> {
        let range = page_range(start, len)?;
        let inside = |start: Gpa, len: u64| {
            page_range(start, len).is_ok_and(|refused| range.covers(refused))
        };
        let before = self.refused.len();
        self.refused.retain(|(start, len), _| !inside(*start, *len));
        let forgiven = self.refused.len() != before;

        let found: Vec<Mapping> = self.overlapping(range).cloned().collect();
        if found.is_empty() && !forgiven {
            return Err(DmaError::NotMapped { start, len });
        }
        if !found.iter().all(|mapping| range.covers(mapping.range)) {
            return Err(DmaError::Split { start, len });
        }
        for mapping in &found {
            self.mappings.remove(&mapping.range.start());
        }
        Ok(found)
    }

    /// Removes all entries. Returns the mappings to unmap.
    pub(crate) fn unmap_all(&mut self) -> Vec<Mapping> {
        std::mem::take(self).mappings.into_values().collect()
    }

    /// The kept descriptor of the file that `file` refers to.
    fn one_of(&mut self, key: FileKey, file: &Arc<File>) -> Result<Arc<File>, DmaError> {
        if let Some(kept) = self.files.get(&key).and_then(Weak::upgrade) {
            return Ok(kept);
        }
        self.files.retain(|_, file| file.strong_count() != 0);
        if self.files.len() >= MAX_FILES {
            return Err(DmaError::TooManyFiles);
        }
        self.files.insert(key, Arc::downgrade(file));
        Ok(Arc::clone(file))
    }

    /// Whether there is guest RAM at 1 MiB: not behind a vIOMMU.
    pub(crate) fn has_low_ram(&self) -> bool {
        self.iter().any(Mapping::is_low_ram)
    }

    /// How many mappings there are.
    pub(crate) fn len(&self) -> usize {
        self.mappings.len()
    }

    /// All mappings, lowest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Mapping> {
        self.mappings.values()
    }

    /// The reason that DMA is blocked, if any: guest RAM that a device cannot reach.
    pub(crate) fn blocked(&self) -> Option<Blocked> {
        let private = self.iter().find(|mapping| mapping.is_private_ram());
        private.map(Blocked::private_ram).or_else(|| {
            let refused = self.refused.values().next();
            refused.copied().map(Blocked::Refused)
        })
    }

    /// The guest RAM that a device can reach.
    pub(crate) fn oracle(&self) -> TableOracle {
        TableOracle(
            self.iter()
                .filter(|mapping| mapping.is_ram())
                .map(|mapping| mapping.range)
                .collect(),
        )
    }

    fn overlapping(&self, range: GpaRange) -> impl Iterator<Item = &Mapping> {
        let before = self
            .mappings
            .range(..range.start())
            .next_back()
            .map(|(_, mapping)| mapping)
            .filter(move |mapping| mapping.range.end() > range.start());
        let from = self
            .mappings
            .range(range.start()..range.end())
            .map(|(_, mapping)| mapping);
        before.into_iter().chain(from)
    }
}

impl Blocked {
    /// By a mapping that [is private RAM](Mapping::is_private_ram).
    pub(crate) fn private_ram(mapping: &Mapping) -> Self {
        Self::PrivateRam {
            start: mapping.range.start(),
            mib: mapping.range.len() >> 20,
        }
    }
}

/// A memory map for the layout probe.
pub(crate) struct TableOracle(RangeSet);

impl MemoryMap for TableOracle {
    fn resolve(&mut self, range: GpaRange) -> Resolution {
        self.0.resolve(range)
    }
}

fn page_range(start: Gpa, len: u64) -> Result<GpaRange, DmaError> {
    let bad = DmaError::Range { start, len };
    if !start.is_page_aligned() || !len.is_multiple_of(PAGE_SIZE) {
        return Err(bad);
    }
    GpaRange::new(start, len).map_err(|_| bad)
}

/// Checks that the file is a memory file that contains the whole mapping now. (It may shrink later:
/// code that maps it guards against SIGBUS.)
fn check_file(start: Gpa, len: u64, backing: &Backing) -> Result<FileKey, DmaError> {
    let offset = backing.offset;
    let bad = DmaError::File { start, len, offset };
    let stat: Stat = fstat(&*backing.file).map_err(|_| bad)?;
    let is_file = FileType::from_raw_mode(stat.st_mode).is_file();
    let end = offset.checked_add(len).ok_or(bad)?;
    let fits = u64::try_from(stat.st_size).is_ok_and(|size| end <= size);
    if !is_file || !fits || !offset.is_multiple_of(PAGE_SIZE) {
        return Err(bad);
    }
    let mode = fcntl_getfl(&*backing.file).map_err(|_| bad)? & OFlags::RWMODE;
    Ok((stat.st_dev, stat.st_ino, mode.bits()))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn gpa(address: u64) -> Gpa {
        Gpa::new(address)
    }

    fn memory(len: u64) -> Target {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        Target::Ram(Backing {
            file: Arc::new(file.into()),
            offset: 0,
        })
    }

    fn mapped(ranges: &[(u64, u64)]) -> DmaTable {
        let mut table = DmaTable::default();
        for &(start, len) in ranges {
            table.map(gpa(start), len, true, memory(len)).unwrap();
        }
        table
    }

    #[test]
    fn overlaps_are_refused_on_either_side() {
        let mut table = mapped(&[(0x2000, 0x2000)]);
        for start in [0x1000, 0x2000, 0x3000] {
            assert_eq!(
                table
                    .map(gpa(start), 0x2000, true, Target::Private)
                    .unwrap_err()
                    .errno(),
                Errno::EXIST
            );
        }
        table
            .map(gpa(0x1000), 0x1000, true, Target::Private)
            .unwrap();
        table
            .map(gpa(0x4000), 0x1000, true, Target::Private)
            .unwrap();
    }

    #[test]
    fn unmap_takes_whole_mappings_only() {
        let mut table = mapped(&[(0, 0x2000), (0x2000, 0x2000)]);
        assert_eq!(
            table.unmap(gpa(0), 0x1000).unwrap_err().errno(),
            Errno::INVAL
        );
        assert_eq!(
            table.unmap(gpa(0x1000), 0x3000).unwrap_err().errno(),
            Errno::INVAL
        );
        assert_eq!(
            table.unmap(gpa(0x4000), 0x1000).unwrap_err().errno(),
            Errno::NOENT
        );
        assert_eq!(table.iter().count(), 2);
        assert_eq!(table.unmap(gpa(0), 0x4000).unwrap().len(), 2);
        assert_eq!(table.iter().count(), 0);
    }

    #[test]
    fn unmapping_everything_forgets_everything() {
        let mut table = mapped(&[(0, 0x2000), (0x2000, 0x2000)]);
        table
            .map(gpa(0), 0x1000, true, Target::Private)
            .unwrap_err();
        assert_eq!(table.unmap_all().len(), 2);
        assert_eq!(table.blocked(), None);
        assert!(table.unmap_all().is_empty());
    }

    #[test]
    fn a_refusal_blocks_until_it_is_taken_back() {
        let mut table = mapped(&[(0, 0x2000)]);
        assert_eq!(table.blocked(), None);
        let error = table
            .map(gpa(0x2000), 0x2000, true, memory(0x1000))
            .unwrap_err();
        assert_eq!(table.blocked(), Some(Blocked::Refused(error)));
        // Unmapping other memory keeps the refusal.
        table.unmap(gpa(0), 0x2000).unwrap();
        assert_eq!(table.blocked(), Some(Blocked::Refused(error)));
        assert!(table.unmap(gpa(0x2000), 0x2000).unwrap().is_empty());
        assert_eq!(table.blocked(), None);
        assert_eq!(
            table.unmap(gpa(0x2000), 0x2000).unwrap_err().errno(),
            Errno::NOENT
        );
    }

    #[test]
    fn one_descriptor_of_a_file_is_kept() {
        let memory = memory(0x10_0000);
        let file = &memory.backing().unwrap().file;
        let mut table = DmaTable::default();
        for start in (0..0x10_0000).step_by(0x1000) {
            let backing = Backing {
                file: Arc::new(file.try_clone().unwrap()),
                offset: start,
            };
            table
                .map(gpa(start), 0x1000, true, Target::Ram(backing))
                .unwrap();
        }
        let kept = |mapping: &Mapping| mapping.target.backing().map(|b| Arc::as_ptr(&b.file));
        let first = table.iter().next().and_then(kept);
        assert!(table.iter().all(|mapping| kept(mapping) == first));
        assert_eq!(table.files.len(), 1);
    }

    #[test]
    fn files_are_bounded_and_given_back() {
        let mut table = DmaTable::default();
        let at = |n: usize| gpa(n as u64 * 0x1000);
        for n in 0..MAX_FILES {
            table.map(at(n), 0x1000, true, memory(0x1000)).unwrap();
        }
        let next = at(MAX_FILES);
        let error = table.map(next, 0x1000, true, memory(0x1000)).unwrap_err();
        assert_eq!(error, DmaError::TooManyFiles);
        table.unmap(next, 0x1000).unwrap();
        table.unmap(gpa(0), 0x1000).unwrap();
        table.map(next, 0x1000, true, memory(0x1000)).unwrap();
    }

    #[test]
    fn ranges_that_wrap_or_are_not_pages_are_refused() {
        let mut table = DmaTable::default();
        for (start, len) in [(0, 0), (1, 0x1000), (0, 0xfff), (u64::MAX - 0xfff, 0x1000)] {
            assert_eq!(
                table
                    .map(gpa(start), len, true, Target::Private)
                    .unwrap_err()
                    .errno(),
                Errno::INVAL,
                "{start:#x}+{len:#x}"
            );
        }
    }

    #[test]
    fn a_file_smaller_than_its_mapping_is_refused() {
        let mut table = DmaTable::default();
        let error = table.map(gpa(0), 0x3000, true, memory(0x2000)).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL);
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        let pipe = Backing {
            file: Arc::new(pipe.into()),
            offset: 0,
        };
        assert_eq!(
            table
                .map(gpa(0), 0x1000, true, Target::Ram(pipe))
                .unwrap_err()
                .errno(),
            Errno::INVAL
        );
    }

    #[test]
    fn private_memory_at_the_well_known_places_is_ram_that_is_not_shared() {
        let mut table = mapped(&[(0, 0xa_0000)]);
        // ROMs, and the BARs of a graphics card below and above 4 GiB.
        table
            .map(gpa(0xfffc_0000), 0x4_0000, false, Target::Private)
            .unwrap();
        table
            .map(gpa(0xc_0000), 0x2_0000, true, Target::Private)
            .unwrap();
        table
            .map(gpa(0xc000_0000), 0x1000_0000, true, Target::Private)
            .unwrap();
        table
            .map(gpa(0x80_0000_0000), 0x1000_0000, true, Target::Private)
            .unwrap();
        assert_eq!(table.blocked(), None);
        // A BAR at 4 GiB, in a VM whose RAM is all below 4 GiB.
        for len in [1 << 12, 16 << 20, 4u64 << 30] {
            table.map(gpa(4 << 30), len, true, Target::Private).unwrap();
            assert_eq!(table.blocked(), None, "{len:#x}");
            table.unmap(gpa(4 << 30), len).unwrap();
        }
        // Low RAM, and a size that no BAR can have.
        for (start, mib) in [(0x10_0000, 1024), (4 << 30, 3)] {
            let start = gpa(start);
            table.map(start, mib << 20, true, Target::Private).unwrap();
            assert_eq!(table.blocked(), Some(Blocked::PrivateRam { start, mib }));
            table.unmap(start, mib << 20).unwrap();
            assert_eq!(table.blocked(), None);
        }
    }
}
