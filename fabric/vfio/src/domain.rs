//! One IOMMU domain and its mappings.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use farside_error_chain::Chain;
use farside_fabric::memory::HostSlice;
use farside_fabric::{AddressRange, FabricError, Iova, PAGE_SIZE, RangeTable};
use farside_pci::Bdf;
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use crate::iommu::{Iommu, Space};
use crate::usable::{Capabilities, UsableIova};
use crate::{Api, Function, RegionMemory, VfioError};

/// The last page of the address space is not mapped: a range has an end.
const END: u64 = u64::MAX - (PAGE_SIZE - 1);

/// Timeout for the other functions of a domain to unmap what the VM has replaced: its VMM tells each of them.
const OTHERS: Duration = Duration::from_secs(2);

/// An IOMMU domain: the memory that its functions can reach by DMA. Clones share it. Initially
/// empty; all mappings end with the last handle and the last function.
///
/// Memory that is mapped again at the same place, for another function of the domain, is unmapped with its last user. Other
/// memory waits until those have unmapped what is there.
#[derive(Clone)]
pub struct Domain(Arc<Inner>);

/// A [`Domain`] that ends with its other users.
#[derive(Clone, Debug, Default)]
pub struct WeakDomain(Weak<Inner>);

impl WeakDomain {
    /// The domain, if it has functions.
    pub fn upgrade(&self) -> Option<Domain> {
        let domain = Domain(self.0.upgrade()?);
        (domain.functions() != 0).then_some(domain)
    }
}

struct Inner {
    iommu: Iommu,
    state: Mutex<State>,
    /// Of several functions: a mapping was unmapped.
    unmapped: Condvar,
}

#[derive(Default)]
struct State {
    /// Functions that are open in it.
    functions: usize,
    mapped: RangeTable<Iova, Target>,
    /// The further users of mappings, by where these start.
    again: BTreeMap<Iova, usize>,
    /// There may be mappings of a process that is gone.
    inherited: bool,
    /// All was unmapped, also what is in the table.
    emptied: bool,
}

/// The mappings, whose memory stays mapped into this process.
enum Target {
    Memory(HostSlice),
    Region { _region: Arc<RegionMemory> },
}

/// The contents of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainUsage {
    /// Mappings.
    pub mappings: usize,
    /// Bytes mapped.
    pub bytes: u64,
    /// Mappings that the kernel still allows, if it reports that.
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
            unmapped: Condvar::new(),
        })))
    }

    /// That of a process that is gone, with its mappings.
    pub(crate) fn adopt(space: Space) -> Self {
        Self(Arc::new(Inner {
            iommu: Iommu::adopt(space),
            state: Mutex::new(State {
                inherited: true,
                ..State::default()
            }),
            unmapped: Condvar::new(),
        }))
    }

    /// The API that created it.
    pub fn api(&self) -> Api {
        self.0.iommu.api()
    }

    /// How many functions are open in it.
    pub fn functions(&self) -> usize {
        self.0.state().functions
    }

    /// The domain, which ends with its other users.
    pub fn downgrade(&self) -> WeakDomain {
        WeakDomain(Arc::downgrade(&self.0))
    }

    /// Opens a function in this domain. It must be bound to vfio-pci. From now on its DMA goes
    /// through the domain; bus mastering is still disabled.
    ///
    /// # Errors
    /// [`VfioError::NoFunction`], [`VfioError::NoIommu`], [`VfioError::NotBound`],
    /// [`VfioError::Busy`] when another process (such as a former VMM) still holds
    /// it, [`VfioError::NotViable`], [`VfioError::Permission`],
    /// [`VfioError::NoInterruptRemapping`], [`VfioError::Open`].
    pub fn open(&self, bdf: Bdf) -> Result<Function, VfioError> {
        Function::open(self, bdf)
    }

    /// Lets the domain's functions reach `memory` at `at`: writing too when
    /// `writable`. This pins it. The memory is kept mapped until unmapped.
    ///
    /// # Errors
    /// [`VfioError::EmptyDomain`] while no function is open,
    /// [`VfioError::Range`], [`VfioError::Reserved`], [`VfioError::Memlock`],
    /// [`VfioError::TooManyMappings`], [`VfioError::Map`]. Nothing is mapped
    /// then.
    pub fn map(&self, at: Iova, memory: &HostSlice, writable: bool) -> Result<(), VfioError> {
        let mut state = self.0.state();
        let deadline = Instant::now() + OTHERS;
        let range = loop {
            if state.use_again(at, memory)? {
                return Ok(());
            }
            let checked = state.check(at, memory.len() as u64);
            // A BAR of another function has an id of its own each time: the first user's mapping is in the way until that one
            // unmaps it, and it is not counted that another one uses it.
            let overlaps = matches!(
                checked,
                Err(VfioError::Range(FabricError::Overlap { .. }))
                    if state.functions > 1 && memory.function().is_none()
            );
            let left = deadline.saturating_duration_since(Instant::now());
            if !overlaps || left.is_zero() {
                break checked?;
            }
            let woken = self.0.unmapped.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        };
        match self.0.iommu.map(at, memory, writable) {
            // By the process before, for the same borrower: its device reaches nobody else's memory if that was another
            // range.
            Err(error) if state.inherited && error.raw_os_error() == Some(libc::EEXIST) => {}
            mapped => mapped.map_err(|error| self.0.explain(range, error))?,
        }
        let slice = memory.clone();
        state.emptied = false;
        state.mapped.map(range, Target::Memory(slice))?;
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
        let range = state.check(at, len)?;
        self.0
            .iommu
            .map_region(at, bar, offset, len)
            .map_err(|error| match error.raw_os_error() {
                Some(libc::EINVAL | libc::ENOMEM | libc::ENOSPC) => self.0.explain(range, error),
                _ => refused(error.to_string()),
            })?;
        let _region = Arc::clone(bar);
        state.mapped.map(range, Target::Region { _region })?;
        Ok(())
    }

    /// Unmaps all mappings inside the `len` bytes at `at`. No DMA reaches them
    /// after it returned `Ok`, unless another function uses them; after an error, some may still be mapped. Unmap what
    /// several functions use one mapping at a time: after an error, it is not known which users were taken off.
    ///
    /// # Errors
    /// [`VfioError::Range`] when the range cuts a mapping or covers none;
    /// [`VfioError::Unmap`] when the kernel did not unmap all of it.
    pub fn unmap(&self, at: Iova, len: u64) -> Result<(), VfioError> {
        let mut state = self.0.state();
        if state.emptied {
            return Ok(());
        }
        let inside = state.mapped.inside(AddressRange::new(at, len)?)?;
        let mut inside: Vec<_> = inside.iter().map(|(range, _)| *range).collect();
        inside.retain(|range| state.has_last_user(range.start()));
        self.0.unmap(&mut state, &inside)
    }

    /// Unmaps what a process that is gone has mapped, and this one has not. Returns whether there may have been any.
    ///
    /// # Errors
    /// [`VfioError::Unmap`]. Call it again.
    pub(crate) fn settle(&self) -> Result<bool, VfioError> {
        let mut state = self.0.state();
        if !state.inherited {
            return Ok(false);
        }
        let mut from = 0;
        for (range, _) in state.mapped.rows() {
            self.0.unmap_between(from, range.start().get())?;
            from = range.end().get();
        }
        self.0.unmap_between(from, END)?;
        state.inherited = false;
        Ok(true)
    }

    /// Unmaps everything, whichever process has mapped it. Unmapping any of it is done then.
    ///
    /// # Errors
    /// [`VfioError::Unmap`]. Call it again.
    pub(crate) fn empty(&self) -> Result<(), VfioError> {
        let mut state = self.0.state();
        let unmapped = self.0.iommu.unmap_all();
        unmapped.map_err(|source| VfioError::Unmap {
            at: Iova::new(0),
            len: u64::MAX,
            unmapped: 0,
            source,
        })?;
        state.mapped = RangeTable::default();
        state.again.clear();
        (state.inherited, state.emptied) = (false, true);
        Ok(())
    }

    /// Unmaps everything. Continues after a failure.
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

    /// A bit for each page size (bytes) that the IOMMU supports. An iommufd domain reports only the
    /// smallest, and a domain without functions 4096.
    pub fn page_sizes(&self) -> u64 {
        self.0
            .capabilities()
            .map_or(PAGE_SIZE, |found| found.page_sizes)
    }

    /// The domain's contents.
    pub fn usage(&self) -> DomainUsage {
        let mappings_left = self.0.capabilities().ok().and_then(|it| it.mappings_left);
        let state = self.0.state();
        DomainUsage {
            mappings: state.mapped.rows().len(),
            bytes: state.mapped.rows().iter().map(|(it, _)| it.len()).sum(),
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
            log::error!("{error}", error = Chain(&error));
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

    /// Unmaps whole mappings, as many as possible.
    fn unmap(&self, state: &mut State, mappings: &[AddressRange<Iova>]) -> Result<(), VfioError> {
        let mut result = Ok(());
        for &range in mappings {
            let (at, len) = (range.start(), range.len());
            let (unmapped, source) = match self.iommu.unmap(at, len) {
                Ok(unmapped) if unmapped == len => {
                    state.mapped.unmap(range)?;
                    self.unmapped.notify_all();
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

    /// Unmaps whatever is mapped there.
    fn unmap_between(&self, from: u64, to: u64) -> Result<(), VfioError> {
        let (at, len) = (Iova::new(from), to - from);
        if len == 0 {
            return Ok(());
        }
        let unmapped = self.iommu.unmap(at, len);
        unmapped.map(drop).map_err(|source| VfioError::Unmap {
            at,
            len,
            unmapped: 0,
            source,
        })
    }

    fn unmap_all(&self, state: &mut State) -> Result<(), VfioError> {
        state.again.clear();
        let rows = state.mapped.rows().iter();
        let all: Vec<_> = rows.map(|(range, _)| *range).collect();
        self.unmap(state, &all)
    }

    /// The error for a refused mapping.
    fn explain(&self, range: AddressRange<Iova>, source: io::Error) -> VfioError {
        let (at, len) = (range.start(), range.len());
        match source.raw_os_error() {
            Some(libc::ENOMEM) => VfioError::Memlock {
                at,
                len,
                limit: getrlimit(Resource::Memlock).current,
            },
            Some(libc::ENOSPC) => VfioError::TooManyMappings { at, len },
            // The kernel does not report the violated rule; this is the likely one.
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
        // Where another process still holds a function of the domain, closing our
        // descriptors would not end its mappings.
        let mut state =
            std::mem::take(self.state.get_mut().unwrap_or_else(PoisonError::into_inner));
        if let Err(error) = self.unmap_all(&mut state) {
            log::error!("{error}", error = Chain(&error));
        }
    }
}

impl State {
    /// Adds a user to the mapping of exactly this memory at `at`. Returns false if there is none.
    fn use_again(&mut self, at: Iova, memory: &HostSlice) -> Result<bool, VfioError> {
        let range = AddressRange::new(at, memory.len() as u64)?;
        let is_mapped = match self.mapped.find(at) {
            Some((found, Target::Memory(slice))) => *found == range && slice.id() == memory.id(),
            _ => false,
        };
        // One function maps nothing twice.
        if !is_mapped || self.functions < 2 {
            return Ok(false);
        }
        *self.again.entry(at).or_default() += 1;
        Ok(true)
    }

    /// Removes a user of a mapping, unless it is the last one.
    fn has_last_user(&mut self, at: Iova) -> bool {
        match self.again.get_mut(&at) {
            None => true,
            Some(more) => {
                *more -= 1;
                if *more == 0 {
                    self.again.remove(&at);
                }
                false
            }
        }
    }

    /// Whether a range can be mapped, as far as this side can check.
    fn check(&self, at: Iova, len: u64) -> Result<AddressRange<Iova>, VfioError> {
        let range = AddressRange::new(at, len)?;
        if self.functions == 0 {
            return Err(VfioError::EmptyDomain);
        }
        self.mapped.check(range)?;
        Ok(range)
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.state();
        f.debug_struct("Domain")
            .field("api", &self.api())
            .field("functions", &state.functions)
            .field("mappings", &state.mapped.rows().len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use farside_fabric::memory::SharedMemory;

    use super::*;

    #[test]
    fn only_a_domain_with_a_function_is_mapped_in() {
        let mut state = State::default();
        let error = state.check(Iova::new(0), 4096).unwrap_err();
        assert!(matches!(error, VfioError::EmptyDomain), "{error}");
        state.functions = 1;
        let range = state.check(Iova::new(0), 8192).unwrap();
        let memory = SharedMemory::anonymous(8192).unwrap();
        let target = Target::Memory(memory.slice(0, 8192).unwrap());
        state.mapped.map(range, target).unwrap();
        let error = state.check(Iova::new(4096), 4096).unwrap_err();
        let overlap = matches!(error, VfioError::Range(FabricError::Overlap { .. }));
        assert!(overlap, "{error}");
        let error = state.check(Iova::new(1), 4096).unwrap_err();
        let unaligned = matches!(error, VfioError::Range(FabricError::Unaligned { .. }));
        assert!(unaligned, "{error}");
    }

    #[test]
    fn memory_of_two_functions_is_unmapped_with_its_last_user() {
        let memory = SharedMemory::anonymous(8192).unwrap();
        let slice = |offset, len| memory.slice(offset, len).unwrap();
        let mut state = State {
            functions: 2,
            ..State::default()
        };
        let at = Iova::new(0x10000);
        assert!(!state.use_again(at, &slice(0, 4096)).unwrap());
        let range = state.check(at, 4096).unwrap();
        let target = Target::Memory(slice(0, 4096));
        state.mapped.map(range, target).unwrap();
        assert!(state.use_again(at, &slice(0, 4096)).unwrap());
        // Another place in the file, more of it, another file.
        let other = SharedMemory::anonymous(4096).unwrap();
        let other = other.slice(0, 4096).unwrap();
        for slice in [slice(4096, 4096), slice(0, 8192), other] {
            assert!(!state.use_again(at, &slice).unwrap());
            assert!(state.check(at, slice.len() as u64).is_err());
        }
        assert!(!state.has_last_user(at));
        assert!(state.has_last_user(at));
        // A function alone maps nothing twice.
        state.functions = 1;
        assert!(!state.use_again(at, &slice(0, 4096)).unwrap());
    }
}
