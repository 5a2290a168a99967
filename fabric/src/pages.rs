//! Page sizes of an IOMMU.

use std::ops::{Add, AddAssign, SubAssign};

use serde::{Deserialize, Serialize};

/// Bytes of the smallest page that can be mapped.
pub const PAGE_SIZE: u64 = 4096;

/// How many pages of each size an IOMMU would use for some mappings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageCounts {
    /// Pages of 4 KiB.
    pub pages_4k: u64,
    /// Pages of 2 MiB.
    pub pages_2m: u64,
    /// Pages of 1 GiB.
    pub pages_1g: u64,
}

impl PageCounts {
    const SIZES: [u64; 3] = [1 << 30, 2 << 20, PAGE_SIZE];

    /// The fewest pages that map `len` bytes at `from` to `to`, all multiples
    /// of 4 KiB. A page must be aligned on both sides; none is larger than
    /// `largest`, the size of the pages that the memory consists of.
    pub fn of(from: u64, to: u64, len: u64, largest: u64) -> Self {
        // Addresses wrap only for input that is no range; counting must not be
        // what fails then.
        for size in Self::SIZES {
            let head = from.wrapping_neg() % size;
            let fits = len >= head && len - head >= size;
            if size > largest || !(from ^ to).is_multiple_of(size) || !fits {
                continue;
            }
            let body = (len - head) / size;
            let tail = head + body * size;
            let mut counts = Self::of(from, to, head, size / 2);
            counts += Self::of(
                from.wrapping_add(tail),
                to.wrapping_add(tail),
                len - tail,
                size / 2,
            );
            *counts.of_size(size) += body;
            return counts;
        }
        Self::default()
    }

    /// Bytes in all of them.
    pub fn bytes(&self) -> u64 {
        self.pages_4k * PAGE_SIZE + (self.pages_2m << 21) + (self.pages_1g << 30)
    }

    fn of_size(&mut self, size: u64) -> &mut u64 {
        match size {
            0x4000_0000 => &mut self.pages_1g,
            0x20_0000 => &mut self.pages_2m,
            _ => &mut self.pages_4k,
        }
    }
}

impl Add for PageCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            pages_4k: self.pages_4k + other.pages_4k,
            pages_2m: self.pages_2m + other.pages_2m,
            pages_1g: self.pages_1g + other.pages_1g,
        }
    }
}

impl AddAssign for PageCounts {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl SubAssign for PageCounts {
    fn sub_assign(&mut self, other: Self) {
        self.pages_4k -= other.pages_4k;
        self.pages_2m -= other.pages_2m;
        self.pages_1g -= other.pages_1g;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    #[test]
    fn large_pages_need_both_sides_aligned() {
        let counts = |from, to, len| {
            let c = PageCounts::of(from, to, len, GIB);
            assert_eq!(c.bytes(), len);
            (c.pages_4k, c.pages_2m, c.pages_1g)
        };
        assert_eq!(counts(0, GIB, 2 * GIB), (0, 0, 2));
        assert_eq!(counts(0, 2 * MIB, GIB), (0, 512, 0));
        assert_eq!(counts(0, 4096, 2 * MIB), (512, 0, 0));
        assert_eq!(counts(0, 0, GIB + 2 * MIB + 4096), (1, 1, 1));
        assert_eq!(counts(GIB - 4096, 3 * GIB - 4096, GIB + 8192), (2, 0, 1));
    }

    #[test]
    fn pages_are_no_larger_than_the_memory_has() {
        let counts = PageCounts::of(0, 0, GIB, 2 * MIB);
        assert_eq!((counts.pages_2m, counts.pages_1g), (512, 0));
        assert_eq!(PageCounts::of(0, 0, GIB, 4096).pages_4k, GIB / 4096);
    }
}
