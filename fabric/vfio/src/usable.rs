//! The capabilities of an IOMMU domain: usable IOVA, page sizes, mappings left.

use farside_fabric::{FabricError, Iova, PAGE_SIZE};
use serde::{Deserialize, Serialize};
use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_INFO_PGSIZES, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
};

use crate::VfioError;

/// `VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL`, which the bindings do not have.
const CAP_DMA_AVAIL: u32 = 3;

/// Ranges of IOVA that devices of a domain may use, as (first, last),
/// ascending. What lies between them is reserved, such as the MSI window, or
/// beyond what the IOMMU translates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsableIova(Vec<(u64, u64)>);

impl UsableIova {
    /// From ranges in any order; neighbours become one.
    pub fn new(mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.retain(|(first, last)| first <= last);
        ranges.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (first, last) in ranges {
            match merged.last_mut() {
                Some(before) if first <= before.1.saturating_add(1) => {
                    before.1 = before.1.max(last);
                }
                _ => merged.push((first, last)),
            }
        }
        Self(merged)
    }

    /// The ranges.
    pub fn ranges(&self) -> &[(u64, u64)] {
        &self.0
    }

    /// Checks that each of `ranges`, as (first, bytes), is usable from end to
    /// end.
    ///
    /// # Errors
    /// [`VfioError::Reserved`] names the first that is not, and the reserved
    /// range that it collides with; [`VfioError::Range`].
    pub fn check(&self, ranges: &[(Iova, u64)]) -> Result<(), VfioError> {
        for &(at, len) in ranges {
            let start = at.get();
            let last = len.checked_sub(1).and_then(|more| start.checked_add(more));
            let last = last.ok_or(FabricError::BadRange {
                space: "IOVA",
                start,
                len,
            })?;
            if let Some((reserved_start, reserved_last)) = self.hole_in(start, last) {
                return Err(VfioError::Reserved {
                    at,
                    end: last.saturating_add(1),
                    reserved_start,
                    reserved_last,
                });
            }
        }
        Ok(())
    }

    /// The first range in `at..=last`, in its full extent, that is not usable.
    fn hole_in(&self, at: u64, last: u64) -> Option<(u64, u64)> {
        let after = self.0.partition_point(|range| range.1 < at);
        // The first range that ends at `at` or later: `at` is in it, or in the
        // hole before it.
        let (before, next) = match self.0.get(after) {
            Some(range) if range.0 <= at => {
                if last <= range.1 {
                    return None;
                }
                (Some(range), self.0.get(after + 1))
            }
            next => (after.checked_sub(1).and_then(|i| self.0.get(i)), next),
        };
        // The ends of neighbours are never next to each other, so there is
        // something between them.
        Some((
            before.map_or(0, |range| range.1.saturating_add(1)),
            next.map_or(u64::MAX, |range| range.0 - 1),
        ))
    }
}

/// The capabilities of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// A bit for each page size, bytes.
    pub(crate) page_sizes: u64,
    pub(crate) usable: UsableIova,
    /// Mappings that can still be made, if the kernel reports it.
    pub(crate) mappings_left: Option<u32>,
}

impl Capabilities {
    /// Reads the answer to `VFIO_IOMMU_GET_INFO`: `vfio_iommu_type1_info` and
    /// what it points to. `None` when it contradicts itself.
    pub(crate) fn from_type1(info: &[u8]) -> Option<Self> {
        let flags = u32_at(info, 4)?;
        let page_sizes = match flags & VFIO_IOMMU_INFO_PGSIZES {
            0 => PAGE_SIZE,
            _ => u64_at(info, 8)?,
        };
        let mut found = Self {
            page_sizes,
            // A kernel that does not report it (before 5.4) checks when it maps.
            usable: UsableIova(vec![(0, u64::MAX)]),
            mappings_left: None,
        };
        if flags & VFIO_IOMMU_INFO_CAPS == 0 {
            return Some(found);
        }
        let mut at = u32_at(info, 16)? as usize;
        while at != 0 {
            match u32_at(info, at)? & 0xffff {
                VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE => {
                    let count = u32_at(info, at + 8)? as usize;
                    let range = |i| {
                        let at = at + 16 + 16 * i;
                        Some((u64_at(info, at)?, u64_at(info, at + 8)?))
                    };
                    let ranges = (0..count.min(info.len())).map(range);
                    found.usable = UsableIova::new(ranges.collect::<Option<_>>()?);
                }
                CAP_DMA_AVAIL => found.mappings_left = Some(u32_at(info, at + 8)?),
                _ => {}
            }
            let next = u32_at(info, at + 4)? as usize;
            if next != 0 && next <= at {
                return None;
            }
            at = next;
        }
        Some(found)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u64::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSI: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);

    fn check(usable: &UsableIova, ranges: &[(u64, u64)]) -> Result<(), VfioError> {
        let ranges: Vec<_> = ranges
            .iter()
            .map(|&(at, len)| (Iova::new(at), len))
            .collect();
        usable.check(&ranges)
    }

    fn vtd() -> UsableIova {
        UsableIova::new(vec![(MSI.1 + 1, (1 << 39) - 1), (0, MSI.0 - 1)])
    }

    #[test]
    fn a_range_that_touches_the_msi_window_names_it() {
        let usable = vtd();
        assert!(check(&usable, &[(0, MSI.0), (1 << 32, 1 << 32)]).is_ok());
        for (at, len) in [
            (0, MSI.0 + 1),
            (MSI.0, 1),
            (MSI.1, 4096),
            (0, 1 << 33),
            (0xfee0_1000, 0x1000),
        ] {
            let error = check(&usable, &[(0, 4096), (at, len)]).unwrap_err();
            assert!(
                error.to_string().contains("0xfee00000..=0xfeefffff"),
                "{at:#x} {len:#x}: {error}"
            );
        }
    }

    #[test]
    fn what_the_iommu_cannot_translate_is_reserved() {
        let error = check(&vtd(), &[(1 << 38, 1 << 39)]).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("0x8000000000..=0xffffffffffffffff"),
            "{error}"
        );
        assert!(check(&vtd(), &[(1 << 38, 1 << 38)]).is_ok());
        assert!(check(&UsableIova::default(), &[(0, 1)]).is_err());
    }

    #[test]
    fn ranges_past_the_end_are_refused() {
        for range in [(0, 0), (u64::MAX, 2)] {
            let error = check(&vtd(), &[range]).unwrap_err();
            let bad = matches!(error, VfioError::Range(FabricError::BadRange { .. }));
            assert!(bad, "{error}");
        }
    }

    #[test]
    fn neighbouring_ranges_are_one() {
        let usable = UsableIova::new(vec![(0x1000, 0x1fff), (0, 0xfff), (0x2000, u64::MAX)]);
        assert_eq!(usable.ranges(), [(0, u64::MAX)]);
        assert!(check(&usable, &[(0, u64::MAX)]).is_ok());
    }

    fn answer(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn the_kernels_answer_is_read() {
        let header = |flags, offset| [88, flags, 0x4020_1000, 0, offset, 0];
        let mut words = header(3, 24).to_vec();
        // IOVA ranges: two, little end first.
        words.extend([1 | 1 << 16, 72, 2, 0, 0, 0, 0xfedf_ffff, 0]);
        words.extend([0xfef0_0000, 0, 0xffff_ffff, 0x7f]);
        // Mappings left, the last.
        words.extend([3 | 1 << 16, 0, 65535, 0]);
        let found = Capabilities::from_type1(&answer(&words)).unwrap();
        assert_eq!(found.page_sizes, 0x4020_1000);
        assert_eq!(found.mappings_left, Some(65535));
        assert_eq!(found.usable, vtd());
        // Without capabilities.
        let found = Capabilities::from_type1(&answer(&header(1, 0))).unwrap();
        assert_eq!(found.usable.ranges(), [(0, u64::MAX)]);
    }

    #[test]
    fn an_answer_that_goes_in_circles_or_ends_early_is_refused() {
        let mut words = vec![88, 3, 0x1000, 0, 24, 0];
        words.extend([9, 24, 0, 0]);
        assert_eq!(Capabilities::from_type1(&answer(&words)), None);
        words.truncate(6);
        words.extend([1, 0, 5, 0]);
        assert_eq!(Capabilities::from_type1(&answer(&words)), None);
        assert_eq!(Capabilities::from_type1(&[0; 7]), None);
    }
}
