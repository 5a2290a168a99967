//! Guest-physical addresses and ranges of them.

use std::fmt;

/// Bytes of the smallest page. RAM begins and ends at multiples of it.
pub const PAGE_SIZE: u64 = 4096;

/// A guest-physical address, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gpa(u64);

impl Gpa {
    /// The address `value`.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The address as a number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The address `bytes` above, or `None` where the address space ends
    /// before it.
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// The address `bytes` below, or `None` below address 0.
    pub const fn checked_sub(self, bytes: u64) -> Option<Self> {
        match self.0.checked_sub(bytes) {
            Some(difference) => Some(Self(difference)),
            None => None,
        }
    }

    /// Bytes from `base` up to this address, or `None` if `base` is above it.
    pub const fn offset_from(self, base: Self) -> Option<u64> {
        self.0.checked_sub(base.0)
    }

    /// The last multiple of `unit` up to this address.
    pub const fn align_down(self, unit: u64) -> Self {
        Self(self.0 / unit * unit)
    }

    /// The first multiple of `unit` from this address on, or `None` past the end of the space.
    pub const fn checked_align_up(self, unit: u64) -> Option<Self> {
        match self.0.checked_next_multiple_of(unit) {
            Some(at) => Some(Self(at)),
            None => None,
        }
    }

    /// Whether it is a multiple of [`PAGE_SIZE`].
    pub const fn is_page_aligned(self) -> bool {
        self.0.is_multiple_of(PAGE_SIZE)
    }
}

impl fmt::Display for Gpa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// An invalid range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeError {
    /// It has no bytes.
    Empty {
        /// Where it would begin.
        start: Gpa,
    },
    /// Its end does not fit in 64 bits.
    Overflow {
        /// Where it would begin.
        start: Gpa,
        /// How long it would be, bytes.
        len: u64,
    },
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty { start } => write!(f, "the range at GPA {start} has no bytes"),
            Self::Overflow { start, len } => write!(
                f,
                "the range of {len:#x} bytes at GPA {start} ends beyond the 64-bit address space"
            ),
        }
    }
}

impl std::error::Error for RangeError {}

/// A range of guest-physical addresses: at least one byte, and an end that
/// fits in 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpaRange {
    start: u64,
    end: u64,
}

impl GpaRange {
    /// The `len` bytes from `start`.
    pub const fn new(start: Gpa, len: u64) -> Result<Self, RangeError> {
        match start.checked_add(len) {
            None => Err(RangeError::Overflow { start, len }),
            Some(_) if len == 0 => Err(RangeError::Empty { start }),
            Some(end) => Ok(Self {
                start: start.0,
                end: end.0,
            }),
        }
    }

    /// The bytes from `start` up to, not including, `end`.
    pub const fn between(start: Gpa, end: Gpa) -> Result<Self, RangeError> {
        if start.0 < end.0 {
            Ok(Self {
                start: start.0,
                end: end.0,
            })
        } else {
            Err(RangeError::Empty { start })
        }
    }

    /// First address.
    pub const fn start(self) -> Gpa {
        Gpa(self.start)
    }

    /// First address after the range.
    pub const fn end(self) -> Gpa {
        Gpa(self.end)
    }

    /// Bytes; never 0, so there is no `is_empty`.
    #[allow(clippy::len_without_is_empty)]
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether `at` is inside.
    pub const fn contains(self, at: Gpa) -> bool {
        self.start <= at.0 && at.0 < self.end
    }

    /// Whether all of `other` is inside.
    pub const fn covers(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// Whether the two have a byte in common.
    pub const fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

impl fmt::Display for GpaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}
