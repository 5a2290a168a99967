//! Allocates peer addresses: IOVAs of the NTB endpoint's domain.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farside_fabric::{AddressRange, Iova, PAGE_SIZE, PeerAddress};

use crate::NtbError;

/// The peer addresses of one endpoint's domain, for everything that the peer host can access: RAM
/// of VMs, BARs of devices. Clones share it.
///
/// Ranges are aligned for the peer's LUT, and no two of them share one of its segments. Larger ones
/// are aligned to the IOMMU's large pages, so that those can be used. Address 0 is never allocated:
/// some NTBs interpret it as "no window".
#[derive(Clone, Debug)]
pub struct PeerSpace {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    /// First and last, ascending.
    usable: Vec<(u64, u64)>,
    /// A power of two, at least a page.
    alignment: u64,
    /// By first address.
    taken: BTreeMap<u64, Taken>,
}

#[derive(Debug)]
struct Taken {
    /// Bytes.
    len: u64,
    /// Not released with its [`PeerRange`].
    kept: bool,
}

impl PeerSpace {
    /// Allocates from `usable`, pairs of first and last address in any order, in multiples of
    /// `alignment` bytes (a power of two).
    pub fn new(mut usable: Vec<(u64, u64)>, alignment: u64) -> Self {
        usable.sort_unstable();
        Self {
            inner: Arc::new(Mutex::new(Inner {
                usable,
                alignment: alignment.next_power_of_two().max(PAGE_SIZE),
                taken: BTreeMap::new(),
            })),
        }
    }

    /// The granularity of ranges, in bytes.
    pub fn alignment(&self) -> u64 {
        self.inner().alignment
    }

    /// Raises the granularity of new ranges to at least `alignment`: called when the peer's sizes
    /// are known.
    pub(crate) fn raise_alignment(&self, alignment: u64) {
        let mut inner = self.inner();
        inner.alignment = inner.alignment.max(alignment.next_power_of_two());
    }

    /// Allocates the lowest free `bytes`, rounded up to the granularity.
    ///
    /// # Errors
    /// [`NtbError::PeerSpace`] names what would fit.
    pub fn take(&self, bytes: u64) -> Result<PeerRange, NtbError> {
        let mut inner = self.inner();
        let (start, len) = inner.find(bytes)?;
        inner.taken.insert(start, Taken { len, kept: false });
        Ok(PeerRange {
            space: self.clone(),
            start,
            len,
        })
    }

    /// Keeps the allocated range around `mapped` from being used again: the domain could not unmap
    /// it. Call this before its [`PeerRange`] is dropped.
    pub(crate) fn keep(&self, mapped: AddressRange<PeerAddress>) {
        let mut inner = self.inner();
        let (start, len) = (mapped.start().get(), mapped.len());
        match inner.taken.range_mut(..=start).next_back() {
            Some((&at, taken)) if start - at < taken.len => taken.kept = true,
            _ => {
                inner.taken.insert(start, Taken { len, kept: true });
            }
        }
    }

    /// Checks that ranges of these sizes could all be allocated now.
    ///
    /// # Errors
    /// [`NtbError::PeerSpace`], for the first that could not.
    pub fn check(&self, spans: &[u64]) -> Result<(), NtbError> {
        spans
            .iter()
            .map(|&bytes| self.take(bytes))
            .collect::<Result<Vec<_>, _>>()
            .map(drop)
    }

    /// Bytes allocated.
    pub fn taken(&self) -> u64 {
        self.inner().taken.values().map(|taken| taken.len).sum()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// The address at which `bytes` fit, and the rounded size.
    fn find(&self, bytes: u64) -> Result<(u64, u64), NtbError> {
        let alignment = self.alignment;
        let refused = |largest| NtbError::PeerSpace {
            bytes,
            alignment,
            largest,
        };
        let Some(len) = bytes.max(1).checked_next_multiple_of(alignment) else {
            return Err(refused(self.largest()));
        };
        // Align to the IOMMU's largest page that fits; otherwise to smaller ones.
        let pages = [1u64 << 30, 2 << 20]
            .into_iter()
            .filter(|&page| page <= len);
        pages
            .map(|page| page.max(alignment))
            .chain([alignment])
            .find_map(|multiple| {
                let mut fits = self.free(multiple);
                fits.find(|&(_, free)| free >= len)
            })
            .map(|(start, _)| (start, len))
            .ok_or_else(|| refused(self.largest()))
    }

    fn largest(&self) -> u64 {
        let runs = self.free(self.alignment).map(|(_, free)| free);
        runs.max().unwrap_or(0) / self.alignment * self.alignment
    }

    /// Free runs as (first multiple of `multiple`, bytes from there),
    /// ascending, without address 0.
    fn free(&self, multiple: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.usable.iter().flat_map(move |&(first, last)| {
            let taken = self
                .taken
                .range(first..=last)
                .map(|(&at, taken)| (at, at + taken.len));
            let mut at = first.max(1);
            // The last byte of a 64-bit space is left out: its end is 2^64.
            let end = last.checked_add(1).unwrap_or(last);
            taken.chain([(end, end)]).filter_map(move |(start, after)| {
                let run = at.checked_next_multiple_of(multiple);
                at = after;
                run.filter(|&run| run < start).map(|run| (run, start - run))
            })
        })
    }
}

/// Allocated peer addresses; released on drop. Unmap them first.
#[derive(Debug)]
pub struct PeerRange {
    space: PeerSpace,
    start: u64,
    len: u64,
}

impl PeerRange {
    /// The first.
    pub fn start(&self) -> PeerAddress {
        PeerAddress::new(self.start)
    }

    /// Bytes; at least what was requested.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for PeerRange {
    fn drop(&mut self) {
        let taken = &mut self.space.inner().taken;
        if taken.get(&self.start).is_some_and(|taken| !taken.kept) {
            taken.remove(&self.start);
        }
    }
}

/// The peer host's address for memory of this host is the memory's IOVA in the domain of this
/// host's endpoint.
pub fn endpoint_iova(address: PeerAddress) -> Iova {
    Iova::new(address.get())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    /// Those of an emulated VT-d: the MSI window is a hole, 39 bits.
    const VTD: [(u64, u64); 2] = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];

    #[test]
    fn ranges_are_aligned_for_the_peer_and_for_large_pages() {
        let space = PeerSpace::new(VTD.to_vec(), 4 * MIB);
        let small = space.take(4096).unwrap();
        assert_eq!((small.start().get(), small.len()), (4 * MIB, 4 * MIB));
        let large = space.take(3 * GIB + 4096).unwrap();
        // Below the MSI window there is no room from a multiple of 1 GiB on.
        assert_eq!(large.start().get(), 4 * GIB);
        assert_eq!(large.len(), 3 * GIB + 4 * MIB);
        drop(small);
        assert_eq!(space.take(1).unwrap().start().get(), 4 * MIB);
    }

    #[test]
    fn without_room_for_large_pages_smaller_ones_do() {
        let space = PeerSpace::new(vec![(MIB, GIB + 2 * MIB)], 4096);
        assert_eq!(space.take(GIB).unwrap().start().get(), 2 * MIB);
    }

    #[test]
    fn what_does_not_fit_is_told_what_would() {
        let space = PeerSpace::new(vec![(0, GIB - 1)], 2 * MIB);
        let _taken = space.take(2 * MIB).unwrap();
        let error = space.take(GIB).unwrap_err().to_string();
        assert!(
            error.contains("1 GiB") && error.contains("1020 MiB"),
            "{error}"
        );
        let error = space.check(&[512 * MIB, 512 * MIB]).unwrap_err();
        assert!(matches!(error, NtbError::PeerSpace { .. }), "{error}");
        space.check(&[512 * MIB, 2 * MIB]).unwrap();
        assert_eq!(space.taken(), 2 * MIB);
        for bytes in [u64::MAX, u64::MAX - MIB] {
            assert!(space.take(bytes).is_err());
        }
        let whole = PeerSpace::new(vec![(0, u64::MAX)], 4096);
        assert!(whole.take(u64::MAX - MIB).is_ok());
    }

    proptest! {
        #[test]
        fn no_two_ranges_share_an_address(
            steps in prop::collection::vec((any::<bool>(), 1u64..64, any::<prop::sample::Index>()), 0..100),
            shift in 12u32..22,
        ) {
            let space = PeerSpace::new(vec![(16 * MIB, 24 * MIB - 1), (0, 3 * MIB + 4095)], 1 << shift);
            let mut held: Vec<PeerRange> = Vec::new();
            for (take, pages, pick) in steps {
                if take {
                    let Ok(new) = space.take(pages * 64 * 1024) else { continue };
                    let (start, end) = (new.start().get(), new.start().get() + new.len());
                    prop_assert!(start > 0 && start.is_multiple_of(1 << shift));
                    prop_assert!(new.len() >= pages * 64 * 1024);
                    prop_assert!(end <= 3 * MIB + 4096 || (16 * MIB <= start && end <= 24 * MIB));
                    for other in &held {
                        let (other, after) = (other.start().get(), other.start().get() + other.len());
                        prop_assert!(end <= other || after <= start);
                    }
                    held.push(new);
                } else if !held.is_empty() {
                    held.swap_remove(pick.index(held.len()));
                }
                prop_assert_eq!(space.taken(), held.iter().map(PeerRange::len).sum::<u64>());
            }
            held.clear();
            prop_assert_eq!(space.taken(), 0);
        }
    }
}
