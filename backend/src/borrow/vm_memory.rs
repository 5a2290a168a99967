//! The parts of DMA paths that the devices of a VM share: pins of guest RAM, and peer addresses of
//! windows.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use farside_fabric::{
    MemoryRange,
    memory::MemoryId,
    pin::{self, PinError, PinOptions, PinPolicy, PinReport, Pins},
};
use farside_guest_layout::GpaRange;
use farside_ntb::{NtbError, PeerRange, PeerSpace};

use super::{
    error::PathError,
    memory_limit::{Counted, MemoryLimit},
};

/// Alignment of windows where the borrower chooses peer addresses freely: a multiple of any
/// adapter's translation alignment.
pub(super) const PEER_STEP: u64 = 1 << 40;

/// The pinned memory of a VM. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct VmMemory {
    limit: MemoryLimit,
    pins: Arc<Mutex<BTreeMap<MemoryId, Weak<SharedPins>>>>,
}

/// Pins of one range, as long as a device of the VM uses them.
#[derive(Debug)]
pub(crate) struct SharedPins {
    pins: Pins,
    _counted: Option<Counted>,
}

impl SharedPins {
    pub(super) fn report(&self) -> PinReport {
        self.pins.report()
    }
}

impl VmMemory {
    /// No more than `limit` is pinned.
    pub(crate) fn new(limit: MemoryLimit) -> Self {
        let pins = Arc::default();
        Self { limit, pins }
    }

    /// Lets one device at a time pin memory: another one waits, and then finds pinned what it needs.
    /// (Both at once would count twice against the limit of locked memory.)
    pub(crate) fn lock(&self) -> LockedMemory<'_> {
        LockedMemory {
            limit: &self.limit,
            // Changed by one insertion.
            pins: self.pins.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

/// See [`VmMemory::lock`].
pub(crate) struct LockedMemory<'a> {
    limit: &'a MemoryLimit,
    pins: MutexGuard<'a, BTreeMap<MemoryId, Weak<SharedPins>>>,
}

impl LockedMemory<'_> {
    /// Checks that those of `memory` that no device of the VM has pinned can be pinned together, and
    /// returns them.
    pub(crate) fn check(
        &self,
        memory: &[MemoryRange],
        policy: PinPolicy,
    ) -> Result<Vec<MemoryRange>, PinError> {
        let absent = memory.iter().filter(|memory| !self.is_pinned(memory));
        let absent: Vec<_> = absent.cloned().collect();
        pin::check(&absent, policy)?;
        Ok(absent)
    }

    fn is_pinned(&self, memory: &MemoryRange) -> bool {
        let pins = memory.id().ok().and_then(|id| self.pins.get(&id));
        pins.is_some_and(|pins| pins.strong_count() > 0)
    }

    /// Pins `memory`, unless a device of the VM has.
    pub(super) fn pin(
        &mut self,
        memory: &MemoryRange,
        pinning: &PinOptions<'_>,
    ) -> Result<Arc<SharedPins>, PathError> {
        let id = memory.id().map_err(|source| PinError::System {
            what: "query a file of guest memory",
            source,
        })?;
        if let Some(pins) = self.pins.get(&id).and_then(Weak::upgrade) {
            return Ok(pins);
        }
        let pins = Arc::new(SharedPins {
            _counted: self.limit.take(&memory.file)?,
            pins: Pins::new(std::slice::from_ref(memory), pinning)?,
        });
        self.pins.retain(|_, pins| pins.strong_count() > 0);
        self.pins.insert(id, Arc::downgrade(&pins));
        Ok(pins)
    }

    /// Counts all of these files against the limit, before the first of them is populated.
    pub(super) fn count<'a>(
        &self,
        memory: impl Iterator<Item = &'a MemoryRange>,
    ) -> Result<Vec<Option<Counted>>, PathError> {
        memory.map(|memory| self.limit.take(&memory.file)).collect()
    }
}

/// The peer addresses of a VM's windows, in one address space. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct PeerWindows {
    space: PeerSpace,
    /// By the range that the window spans.
    shared: Arc<Mutex<BTreeMap<GpaRange, Weak<PeerRange>>>>,
}

impl Default for PeerWindows {
    /// In an address space of its own.
    fn default() -> Self {
        Self::new(PeerSpace::new(vec![(0, u64::MAX)], PEER_STEP))
    }
}

impl PeerWindows {
    pub(crate) fn new(space: PeerSpace) -> Self {
        let shared = Arc::default();
        Self { space, shared }
    }

    /// For a window over guest RAM: the addresses of another device's window over the same range if
    /// they `fit`, else own ones.
    pub(super) fn share(
        &self,
        range: GpaRange,
        fit: impl FnOnce(&PeerRange) -> bool,
    ) -> Result<Arc<PeerRange>, NtbError> {
        // Changed by one insertion.
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let open = shared.get(&range).and_then(Weak::upgrade);
        if let Some(open) = open.filter(|open| fit(open)) {
            return Ok(open);
        }
        let own = self.take(range)?;
        shared.retain(|_, window| window.strong_count() > 0);
        shared.insert(range, Arc::downgrade(&own));
        Ok(own)
    }

    /// Addresses for a window of one device.
    pub(super) fn take(&self, range: GpaRange) -> Result<Arc<PeerRange>, NtbError> {
        Ok(Arc::new(self.space.take(range.len())?))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use farside_fabric::memory::create_sealed;
    use farside_guest_layout::Gpa;

    use super::*;

    const PAGE: u64 = 4096;

    fn range(start: u64, end: u64) -> GpaRange {
        GpaRange::between(Gpa::new(start), Gpa::new(end)).unwrap()
    }

    #[test]
    fn memory_is_pinned_once_and_until_the_last_device_lets_go() {
        let file = File::from(create_sealed("guest", 8 * PAGE).unwrap());
        // Each device has descriptors of its own.
        let memory = |offset| MemoryRange {
            file: Arc::new(file.try_clone().unwrap()),
            offset,
            len: 4 * PAGE,
            writable: true,
        };
        let options = PinOptions::new(PinPolicy::Prefer);
        let vm = VmMemory::default();
        let pin = |memory: &MemoryRange| vm.lock().pin(memory, &options).unwrap();
        let first = pin(&memory(0));
        let second = pin(&memory(0));
        assert!(Arc::ptr_eq(&first, &second));
        let other = pin(&memory(4 * PAGE));
        assert!(!Arc::ptr_eq(&first, &other));
        let read_only = MemoryRange {
            writable: false,
            ..memory(0)
        };
        assert!(!vm.lock().is_pinned(&read_only));
        drop(first);
        assert!(vm.lock().is_pinned(&memory(0)));
        drop(second);
        assert!(!vm.lock().is_pinned(&memory(0)));
        assert!(vm.lock().is_pinned(&memory(4 * PAGE)));
        // Of another VM, the same memory is pinned by itself.
        assert!(!VmMemory::default().lock().is_pinned(&memory(4 * PAGE)));
    }

    #[test]
    fn memory_that_could_not_be_pinned_is_not_taken_for_pinned() {
        let file = File::from(create_sealed("guest", PAGE).unwrap());
        let beyond = MemoryRange::whole(file, 2 * PAGE);
        let vm = VmMemory::default();
        let options = PinOptions::new(PinPolicy::Prefer);
        assert!(vm.lock().pin(&beyond, &options).is_err());
        assert!(!vm.lock().is_pinned(&beyond));
    }

    #[test]
    fn windows_over_the_same_range_share_peer_addresses() {
        let windows = PeerWindows::default();
        let low = range(0, 3 << 30);
        let first = windows
            .share(low, |_| panic!("there is no other window"))
            .unwrap();
        let second = windows
            .share(low, |open| open.start() == first.start())
            .unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        let distinct = [
            windows.share(range(0, 1 << 30), |_| true).unwrap(),
            windows.take(low).unwrap(),
            windows.share(low, |_| false).unwrap(),
            PeerWindows::default().share(low, |_| true).unwrap(),
        ];
        let shares = |other: &Arc<PeerRange>| Arc::ptr_eq(&first, other);
        assert!(!distinct.iter().any(shares));
        drop((first, second));
        // Its addresses are free, and the last window over the range is the one to share.
        let last = windows.share(low, |_| true).unwrap();
        assert!(Arc::ptr_eq(&last, &distinct[2]));
    }

    #[test]
    fn peer_addresses_are_used_again() {
        let windows = PeerWindows::default();
        let take = |len| windows.take(range(0, len)).unwrap();
        let mut taken = [0x1000, 3 * PEER_STEP - 0x1000, PEER_STEP]
            .map(take)
            .to_vec();
        let starts: Vec<u64> = taken.iter().map(|range| range.start().get()).collect();
        assert_eq!(starts, [PEER_STEP, 2 * PEER_STEP, 5 * PEER_STEP]);
        taken.remove(1);
        let free = |len| take(len).start().get();
        assert_eq!(free(3 * PEER_STEP), 2 * PEER_STEP);
        assert_eq!(free(3 * PEER_STEP + 1), 6 * PEER_STEP);
        assert!(windows.take(range(0, u64::MAX)).is_err());
    }
}
