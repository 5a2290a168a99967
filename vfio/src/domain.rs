//! One IOMMU domain and what is mapped in it.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farside_fabric::memory::HostSlice;
use farside_fabric::{Iova, PAGE_SIZE};
use farside_host_pci::Bdf;
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use crate::iommu::Iommu;
use crate::usable::{Capabilities, UsableIova};
use crate::{Api, Function, RegionMemory, VfioError};

/// Most mappings of one domain: type1's own limit by default.
const MAX_MAPPINGS: usize = 65535;

/// An IOMMU domain: what the functions in it can reach by DMA. A clone is
/// another handle on the same one. Empty when new; when the last handle and the
/// last function are gone, so is everything that was mapped.
#[derive(Clone)]
pub struct Domain(Arc<Inner>);

struct Inner {
    iommu: Iommu,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Functions that are open in it.
    functions: usize,
    /// By IOVA.
    mapped: BTreeMap<u64, Mapped>,
}

struct Mapped {
    len: u64,
    /// What is mapped stays mapped into this process for as long.
    _what: Target,
}

enum Target {
    Memory { _slice: HostSlice },
    Region { _region: Arc<RegionMemory> },
}

/// What is in a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainUsage {
    /// Mappings.
    pub mappings: usize,
    /// Bytes that they cover.
    pub bytes: u64,
    /// Mappings that the kernel still allows, where it says.
    pub mappings_left: Option<u32>,
}

impl Domain {
    /// A new domain, without functions and mappings.
    ///
    /// # Errors
    /// [`VfioError::OpenDomain`].
    pub fn new(api: Api) -> Result<Self, VfioError> {
        Ok(Self(Arc::new(Inner {
            iommu: Iommu::new(api)?,
            state: Mutex::default(),
        })))
    }

    /// Which interface it was made by.
    pub fn api(&self) -> Api {
        self.0.iommu.api()
    }

    /// Opens a function in this domain. It must be bound to vfio-pci. From now
    /// on its DMA goes through the domain; it does not master the bus yet.
    ///
    /// # Errors
    /// [`VfioError::NoFunction`], [`VfioError::NoIommu`],
    /// [`VfioError::NotBound`], [`VfioError::Busy`] when somebody else (such as
    /// a former VMM) still holds it, [`VfioError::NotViable`],
    /// [`VfioError::Permission`], [`VfioError::NoInterruptRemapping`],
    /// [`VfioError::Open`].
    pub fn open(&self, bdf: Bdf) -> Result<Function, VfioError> {
        Function::open(self, bdf)
    }

    /// Lets the domain's functions reach `memory` at `at`: writing too when
    /// `writable`. This pins it. The memory is kept mapped until unmapped.
    ///
    /// # Errors
    /// [`VfioError::EmptyDomain`] while no function is open,
    /// [`VfioError::BadRange`], [`VfioError::Overlap`],
    /// [`VfioError::Reserved`], [`VfioError::Memlock`],
    /// [`VfioError::TooManyMappings`], [`VfioError::Map`]. Nothing is mapped
    /// then.
    pub fn map(&self, at: Iova, memory: &HostSlice, writable: bool) -> Result<(), VfioError> {
        let (at, len) = (at.get(), memory.len() as u64);
        let mut state = self.0.state();
        state.check(at, len)?;
        self.0
            .iommu
            .map(at, memory, writable)
            .map_err(|error| self.0.explain(at, len, error))?;
        let slice = memory.clone();
        state.insert(at, len, Target::Memory { _slice: slice });
        Ok(())
    }

    /// Lets the domain's functions reach `len` bytes at `offset` of a part of
    /// another function's BAR (peer to peer), reading and writing.
    ///
    /// # Errors
    /// As [`Domain::map`], and [`VfioError::PeerToPeer`].
    pub fn map_bar(
        &self,
        at: Iova,
        bar: &Arc<RegionMemory>,
        offset: u64,
        len: u64,
    ) -> Result<(), VfioError> {
        let at = at.get();
        let refused = |reason: String| VfioError::PeerToPeer {
            bdf: bar.handle().bdf(),
            bar: bar.bar(),
            reason,
        };
        if offset.checked_add(len).is_none_or(|end| end > bar.len()) {
            let text = format!(
                "{len:#x} bytes at {offset:#x} are not inside the {:#x} bytes that are mapped",
                bar.len()
            );
            return Err(refused(text));
        }
        let mut state = self.0.state();
        state.check(at, len)?;
        self.0
            .iommu
            .map_region(at, bar, offset, len)
            .map_err(|error| match error.raw_os_error() {
                Some(libc::EINVAL | libc::ENOMEM | libc::ENOSPC) => self.0.explain(at, len, error),
                _ => refused(error.to_string()),
            })?;
        let region = Arc::clone(bar);
        state.insert(at, len, Target::Region { _region: region });
        Ok(())
    }

    /// Unmaps all mappings inside the `len` bytes at `at`. No DMA reaches them
    /// after it returned `Ok`; after an error, some may still be mapped.
    ///
    /// # Errors
    /// [`VfioError::NotMapped`], [`VfioError::SplitMapping`],
    /// [`VfioError::BadRange`]; [`VfioError::Unmap`] when the kernel did not
    /// unmap all of it.
    pub fn unmap(&self, at: Iova, len: u64) -> Result<(), VfioError> {
        let at = at.get();
        let mut state = self.0.state();
        let found = state.inside(at, len)?;
        self.0.unmap(&mut state, &found)
    }

    /// Unmaps everything. What cannot be unmapped does not keep the rest.
    ///
    /// # Errors
    /// [`VfioError::Unmap`], the first.
    pub fn unmap_all(&self) -> Result<(), VfioError> {
        let mut state = self.0.state();
        self.0.unmap_all(&mut state)
    }

    /// The IOVA that the functions in the domain may use. Each function that
    /// is opened can narrow it.
    ///
    /// # Errors
    /// [`VfioError::EmptyDomain`], [`VfioError::Info`].
    pub fn usable_iova(&self) -> Result<UsableIova, VfioError> {
        Ok(self.0.capabilities()?.usable)
    }

    /// As [`Domain::usable_iova`], as (first, last) pairs, ascending.
    ///
    /// # Errors
    /// As there.
    pub fn iova_ranges(&self) -> Result<Vec<(u64, u64)>, VfioError> {
        Ok(self.usable_iova()?.ranges().to_vec())
    }

    /// A bit for each page size (bytes) that the IOMMU has. An iommufd domain
    /// tells only the smallest, and a domain without functions 4096.
    pub fn page_sizes(&self) -> u64 {
        self.0
            .capabilities()
            .map_or(PAGE_SIZE, |found| found.page_sizes)
    }

    /// What is in it.
    pub fn usage(&self) -> DomainUsage {
        let mappings_left = self.0.capabilities().ok().and_then(|it| it.mappings_left);
        let state = self.0.state();
        DomainUsage {
            mappings: state.mapped.len(),
            bytes: state.mapped.values().map(|mapped| mapped.len).sum(),
            mappings_left,
        }
    }

    pub(crate) fn iommu(&self) -> &Iommu {
        &self.0.iommu
    }

    /// A function was opened in it.
    pub(crate) fn joined(&self) {
        self.0.state().functions += 1;
    }

    /// A function, which is still open, is about to be closed. The last one
    /// takes the mappings along: without a function, type1 forgets them anyway.
    pub(crate) fn leaving(&self) {
        let mut state = self.0.state();
        if state.functions == 1
            && let Err(error) = self.0.unmap_all(&mut state)
        {
            log::error!("{error}");
        }
        state.functions = state.functions.saturating_sub(1);
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        // The table is changed in one step after the kernel has done its part.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn capabilities(&self) -> Result<Capabilities, VfioError> {
        if self.state().functions == 0 {
            return Err(VfioError::EmptyDomain);
        }
        self.iommu.capabilities()
    }

    /// Unmaps whole mappings, given as (IOVA, bytes).
    fn unmap(&self, state: &mut State, mappings: &[(u64, u64)]) -> Result<(), VfioError> {
        let mut result = Ok(());
        for &(at, len) in mappings {
            let (unmapped, source) = match self.iommu.unmap(at, len) {
                Ok(unmapped) if unmapped == len => {
                    state.mapped.remove(&at);
                    continue;
                }
                Ok(unmapped) => (unmapped, io::ErrorKind::UnexpectedEof.into()),
                Err(error) => (0, error),
            };
            // The entry stays: a device may reach the memory, so it is kept.
            result = result.and(Err(VfioError::Unmap {
                at,
                len,
                unmapped,
                source,
            }));
        }
        result
    }

    fn unmap_all(&self, state: &mut State) -> Result<(), VfioError> {
        let all: Vec<_> = state.mapped.iter().map(|(&at, it)| (at, it.len)).collect();
        self.unmap(state, &all)
    }

    /// Why the kernel refused to map.
    fn explain(&self, at: u64, len: u64, source: io::Error) -> VfioError {
        match source.raw_os_error() {
            Some(libc::ENOMEM) => VfioError::Memlock {
                at,
                len,
                limit: getrlimit(Resource::Memlock).current,
            },
            Some(libc::ENOSPC) => VfioError::TooManyMappings {
                limit: MAX_MAPPINGS,
            },
            // It does not say which of its rules; this is the likely one.
            Some(libc::EINVAL | libc::EPERM | libc::EADDRINUSE) => {
                let reserved = self
                    .iommu
                    .capabilities()
                    .and_then(|found| found.usable.check(&[(at, len)]));
                match reserved {
                    Err(error @ VfioError::Reserved { .. }) => error,
                    _ => VfioError::Map { at, len, source },
                }
            }
            _ => VfioError::Map { at, len, source },
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Where somebody else still holds a function of the domain, closing
        // our descriptors would not end its mappings.
        let mut state =
            std::mem::take(self.state.get_mut().unwrap_or_else(PoisonError::into_inner));
        if let Err(error) = self.unmap_all(&mut state) {
            log::error!("{error}");
        }
    }
}

impl State {
    /// Whether a range can be mapped, as far as this side knows.
    fn check(&self, at: u64, len: u64) -> Result<(), VfioError> {
        let end = range_end(at, len)?;
        if self.functions == 0 {
            return Err(VfioError::EmptyDomain);
        }
        if self.mapped.len() >= MAX_MAPPINGS {
            let limit = MAX_MAPPINGS;
            return Err(VfioError::TooManyMappings { limit });
        }
        match self.mapped.range(..end).next_back() {
            Some((&other_at, other)) if other_at + other.len > at => Err(VfioError::Overlap {
                at,
                len,
                other_at,
                other_len: other.len,
            }),
            _ => Ok(()),
        }
    }

    fn insert(&mut self, at: u64, len: u64, what: Target) {
        self.mapped.insert(at, Mapped { len, _what: what });
    }

    /// All mappings inside a range, none of which it may cut.
    fn inside(&self, at: u64, len: u64) -> Result<Vec<(u64, u64)>, VfioError> {
        let end = range_end(at, len)?;
        let before = self.mapped.range(..at).next_back();
        let touched: Vec<_> = before
            .filter(|(before_at, mapped)| *before_at + mapped.len > at)
            .into_iter()
            .chain(self.mapped.range(at..end))
            .map(|(&at, mapped)| (at, mapped.len))
            .collect();
        if touched.is_empty() {
            return Err(VfioError::NotMapped { at, len });
        }
        match touched
            .iter()
            .find(|&&(it, it_len)| it < at || it + it_len > end)
        {
            Some(&(mapping_at, mapping_len)) => Err(VfioError::SplitMapping {
                at,
                len,
                mapping_at,
                mapping_len,
            }),
            None => Ok(touched),
        }
    }
}

/// First address after a range of whole pages.
fn range_end(at: u64, len: u64) -> Result<u64, VfioError> {
    let whole = at.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE) && len != 0;
    at.checked_add(len)
        .filter(|_| whole)
        .ok_or(VfioError::BadRange { at, len })
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.state();
        f.debug_struct("Domain")
            .field("api", &self.api())
            .field("functions", &state.functions)
            .field("mappings", &state.mapped.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use farside_fabric::memory::SharedMemory;

    use super::*;

    fn state(mappings: &[(u64, u64)]) -> State {
        let slice = SharedMemory::anonymous(4096).unwrap().slice(0, 4096);
        let mut state = State {
            functions: 1,
            ..State::default()
        };
        for &(at, len) in mappings {
            let _slice = slice.clone().unwrap();
            state.insert(at, len, Target::Memory { _slice });
        }
        state
    }

    #[test]
    fn overlaps_are_found_before_the_kernel_is_asked() {
        let state = state(&[(0x4000, 0x2000)]);
        for (at, len) in [
            (0x4000, 0x1000),
            (0x3000, 0x2000),
            (0x5000, 0x4000),
            (0, 0x9000),
        ] {
            let error = state.check(at, len).unwrap_err();
            assert!(matches!(error, VfioError::Overlap { .. }), "{error}");
        }
        for (at, len) in [(0x3000, 0x1000), (0x6000, 0x1000), (0, 0x4000)] {
            state.check(at, len).unwrap();
        }
    }

    #[test]
    fn only_whole_mappings_are_unmapped() {
        let state = state(&[(0x1000, 0x2000), (0x4000, 0x1000), (0x8000, 0x1000)]);
        let inside = state.inside(0, 0x5000).unwrap();
        assert_eq!(inside, [(0x1000, 0x2000), (0x4000, 0x1000)]);
        for (at, len) in [(0x2000, 0x4000), (0, 0x2000)] {
            let error = state.inside(at, len).unwrap_err();
            assert!(matches!(error, VfioError::SplitMapping { .. }), "{error}");
        }
        let error = state.inside(0x5000, 0x3000).unwrap_err();
        assert!(matches!(error, VfioError::NotMapped { .. }), "{error}");
    }

    #[test]
    fn ranges_are_whole_pages_of_a_domain_with_a_function() {
        let mut state = state(&[]);
        for (at, len) in [(0, 0), (1, 4096), (4096, 1), (u64::MAX - 4095, 4096)] {
            let error = state.check(at, len).unwrap_err();
            assert!(matches!(error, VfioError::BadRange { .. }), "{error}");
        }
        state.functions = 0;
        let error = state.check(0, 4096).unwrap_err();
        assert!(matches!(error, VfioError::EmptyDomain), "{error}");
    }
}
