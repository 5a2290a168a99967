//! Numbers that outlive the process.

use std::{fmt, sync::atomic::Ordering};

use crate::system::Area;

/// An array of 64-bit words of a [`DeviceFile`](crate::DeviceFile). Each is written and read as a whole; what was
/// written before a word is there if the word is.
pub struct Words(Area, usize);

impl Words {
    pub(crate) fn new(area: Area, len: usize) -> Self {
        Self(area, len)
    }

    /// How many there are.
    #[allow(clippy::len_without_is_empty, reason = "the length is constant")]
    pub fn len(&self) -> usize {
        self.1
    }

    /// The word at `index`.
    ///
    /// # Panics
    /// If `index` is not below [`len`](Self::len).
    pub fn get(&self, index: usize) -> u64 {
        self.0.word(index * 8).load(Ordering::Acquire)
    }

    /// Stores the word at `index`.
    ///
    /// # Panics
    /// As [`get`](Self::get).
    pub fn set(&self, index: usize, value: u64) {
        self.0.word(index * 8).store(value, Ordering::Release);
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Words({})", self.1)
    }
}
