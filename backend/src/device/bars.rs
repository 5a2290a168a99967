//! Memory behind the sparse mmap areas of BARs, which the guest accesses without a trap.
//!
//! For a model the borrower allocates it: each client gets its own files, so that a client that
//! keeps them mapped after its VM is gone cannot observe the next one. For hardware it comes with
//! the lease, so a region info request borrows the device.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use farside_devices::state;
use farside_fabric::memory::{HostSlice, SharedMemory};
use farside_lender_protocol::{BarOwner, Described, STATE_PAGE};
use farside_vfio_user::{Mappable, SparseArea};

use crate::borrow::bars::BarFile;

/// The BARs with sparse mmap areas, and the device's state.
pub(crate) struct Bars {
    owner: BarOwner,
    bars: [Option<Bar>; 6],
    state: Option<StateFile>,
}

/// The file in which the device's state outlives its process, and its first page.
struct StateFile {
    file: Arc<OwnedFd>,
    page: HostSlice,
}

impl StateFile {
    /// Of `bytes`, in a new file or one that was left. `None` if the device has no state.
    fn new(bytes: u64, left: Option<OwnedFd>) -> std::io::Result<Option<Self>> {
        if bytes == 0 {
            return Ok(None);
        }
        if !(STATE_PAGE..=MOST_STATE).contains(&bytes) {
            return Err(std::io::Error::other(format!(
                "its state has {bytes} bytes: {STATE_PAGE} to {MOST_STATE} are supported"
            )));
        }
        let new = || farside_fabric::memory::create_sealed("farside-state", bytes);
        let file = left.map_or_else(new, Ok)?;
        let memory = SharedMemory::map(file.try_clone()?, 0, STATE_PAGE as usize, false)?;
        let page = memory.slice(0, STATE_PAGE as usize);
        let file = Arc::new(file);
        Ok(page.map(|page| Self { file, page }))
    }
}

/// Most bytes of a BAR whose memory is allocated here: a lender says how large it is, and a guest can fill it.
const MOST_BAR: u64 = 1 << 30;

/// Most bytes of a device's state.
const MOST_STATE: u64 = 16 << 20;

struct Bar {
    areas: Vec<SparseArea>,
    memory: Option<BarFile>,
    /// All of a BAR whose memory was allocated here.
    mapped: Option<HostSlice>,
}

impl Bars {
    /// The state before a lease: new zeroed files for a model, none for hardware.
    pub(crate) fn new(described: &Described) -> std::io::Result<Self> {
        Self::with(described, Vec::new(), None)
    }

    /// As [`new`](Self::new), with the files that were left, in the order of [`files`](Self::files), and that of the state.
    pub(crate) fn with(
        described: &Described,
        left: Vec<OwnedFd>,
        state: Option<OwnedFd>,
    ) -> std::io::Result<Self> {
        let mut left = left.into_iter();
        let mut bars = [const { None }; 6];
        let mirror = described.description.mirror().map(|it| it.area());
        let described_bars = (0..).zip(&described.description.bars);
        for (slot, (number, bar)) in bars.iter_mut().zip(described_bars) {
            let Some(bar) = bar else { continue };
            if bar.mappable.is_empty() {
                continue;
            }
            if described.bars == BarOwner::Borrower && bar.size > MOST_BAR {
                return Err(std::io::Error::other(format!(
                    "it has a BAR of {} bytes: up to {MOST_BAR} are supported",
                    bar.size
                )));
            }
            let memory = match described.bars {
                BarOwner::Lender => None,
                BarOwner::Borrower => Some(BarFile {
                    file: Arc::new(match left.next() {
                        Some(file) => file,
                        None => farside_fabric::memory::create_sealed("farside-bar", bar.size)?,
                    }),
                    offset: 0,
                    exported: None,
                }),
            };
            // What is in it is served from the guest's configuration space, whether the lender knows of it or not.
            let trapped = mirror.clone().filter(|(of, _)| of == &number);
            let trapped = trapped.map_or(0..0, |(_, bytes)| bytes);
            let areas = bar.mappable.iter();
            let areas = areas.flat_map(|area| area.without(trapped.start, trapped.end));
            let areas = areas.map(|area| SparseArea {
                offset: area.offset,
                size: area.len,
            });
            let map = |memory: &BarFile| {
                let len = usize::try_from(bar.size).map_err(std::io::Error::other)?;
                let memory = SharedMemory::map(memory.file.try_clone()?, 0, len, true)?;
                Ok::<_, std::io::Error>(memory.slice(0, len))
            };
            let mapped = memory.as_ref().map(map).transpose()?.flatten();
            *slot = Some(Bar {
                areas: areas.collect(),
                memory,
                mapped,
            });
        }
        Ok(Self {
            owner: described.bars,
            bars,
            state: StateFile::new(described.state, state)?,
        })
    }

    /// The file of the device's state.
    pub(crate) fn state_file(&self) -> Option<Arc<OwnedFd>> {
        self.state.as_ref().map(|state| Arc::clone(&state.file))
    }

    /// The first page of the device's state.
    pub(crate) fn state_page(&self) -> Option<HostSlice> {
        self.state.as_ref().map(|state| state.page.clone())
    }

    /// The version of that state, as its header has it. `None`: nothing was written to it.
    pub(crate) fn state_version(&self) -> Option<u32> {
        let mut header = [0; state::HEADER];
        let file = &self.state.as_ref()?.file;
        let read = rustix::io::pread(file, &mut header, STATE_PAGE);
        let version = read.is_ok().then(|| state::version(&header));
        version?.ok()?
    }

    /// The files to send with a borrow, in the order of the BARs.
    pub(crate) fn files(&self) -> Vec<Arc<OwnedFd>> {
        match self.owner {
            BarOwner::Lender => Vec::new(),
            BarOwner::Borrower => {
                let bars = self.bars.iter().flatten();
                bars.filter_map(|bar| Some(Arc::clone(&bar.memory.as_ref()?.file)))
                    .collect()
            }
        }
    }

    /// Takes the memory that came with a lease, in the order of the BARs.
    pub(crate) fn adopt(&mut self, files: Vec<Option<BarFile>>) {
        if self.owner == BarOwner::Lender {
            for (bar, memory) in self.bars.iter_mut().flatten().zip(files) {
                bar.memory = memory;
            }
        }
    }

    /// Releases the memory that came with a lease: the lender does not lend a function again while
    /// its descriptor is open here.
    pub(crate) fn release(&mut self) {
        if self.owner == BarOwner::Lender {
            for bar in self.bars.iter_mut().flatten() {
                bar.memory = None;
            }
        }
    }

    /// Whether a BAR's memory is only available with a lease.
    pub(crate) fn need_a_lease(&self, bar: u8) -> bool {
        let bar = self.bars.get(usize::from(bar));
        self.owner == BarOwner::Lender && matches!(bar, Some(Some(Bar { memory: None, .. })))
    }

    /// The memory of a BAR that a client can map, and its areas.
    pub(crate) fn reachable(&self, bar: u8) -> Option<(&BarFile, &[SparseArea])> {
        let bar = self.bars.get(usize::from(bar))?.as_ref()?;
        Some((bar.memory.as_ref()?, &bar.areas))
    }

    /// The memory behind a part of an area of a BAR whose memory was allocated here. An access that traps is served from
    /// it, since a client may trap what it could map, and may have mapped it meanwhile: the device could not tell which
    /// of two writes was the last.
    pub(crate) fn shared(&self, bar: u8, offset: u64, len: usize) -> Option<HostSlice> {
        let bar = self.bars.get(usize::from(bar))?.as_ref()?;
        let memory = bar.mapped.as_ref()?;
        let end = offset.checked_add(len as u64)?;
        let is_in = |area: &SparseArea| {
            area.offset <= offset && end <= area.offset.saturating_add(area.size)
        };
        let found = bar.areas.iter().any(is_in);
        found.then(|| memory.slice(usize::try_from(offset).ok()?, len))?
    }

    /// The mmap-able memory of a BAR.
    pub(crate) fn mappable(&self, bar: u8) -> Option<Mappable<'_>> {
        let bar = self.bars.get(usize::from(bar))?.as_ref()?;
        let memory = bar.memory.as_ref().filter(|_| !bar.areas.is_empty())?;
        Some(Mappable {
            fd: memory.file.as_fd(),
            offset: memory.offset,
            areas: &bar.areas,
        })
    }
}

#[cfg(test)]
mod tests {
    use farside_pci::{Bar as PciBar, BarKind, Description, SparseMmapArea};

    use super::*;

    fn of_size(size: u64) -> Described {
        let mut bars = [const { None }; 6];
        bars[2] = Some(PciBar {
            mappable: vec![SparseMmapArea {
                offset: 0,
                len: size,
            }],
            ..PciBar::new(size, BarKind::Memory64 { prefetchable: true })
        });
        Described {
            description: Description {
                config: Vec::new(),
                bars,
                intx: false,
                msi_vectors: 0,
                msix_vectors: 0,
                summary: String::new(),
            },
            bars: BarOwner::Borrower,
            state: 0,
            rom: 0,
        }
    }

    #[test]
    fn a_lender_cannot_have_a_borrower_back_more_than_a_limit() {
        assert_eq!(Bars::new(&of_size(MOST_BAR)).unwrap().files().len(), 1);
        let error = Bars::new(&of_size(2 * MOST_BAR)).err().expect("a refusal");
        assert!(error.to_string().contains("2147483648 bytes: up to"));
    }

    #[test]
    fn an_access_within_an_area_finds_its_memory() {
        let mut described = of_size(0x4000);
        let bar = described.description.bars[2].as_mut().unwrap();
        (bar.mappable[0].offset, bar.mappable[0].len) = (0x1000, 0x1000);
        let bars = Bars::new(&described).unwrap();
        bars.shared(2, 0x1ffc, 4).unwrap().write(b"last");
        let mut found = [0; 4];
        let file = &bars.files()[0];
        rustix::io::pread(file, &mut found, 0x1ffc).unwrap();
        assert_eq!(&found, b"last");
        for (bar, offset, len) in [
            (2, 0xffc, 8),
            (2, 0x1ffd, 4),
            (2, 0, 4),
            (2, u64::MAX, 1),
            (0, 0x1000, 4),
            (9, 0x1000, 4),
        ] {
            assert!(
                bars.shared(bar, offset, len).is_none(),
                "{bar}: {offset:#x}"
            );
        }
    }
}
