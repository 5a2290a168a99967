//! A fixed number of bits.

use std::ops::Range;

/// Bits `0..len`, all clear at first.
#[derive(Clone, Debug)]
pub(crate) struct Bits {
    words: Box<[u64]>,
    len: u16,
}

impl Bits {
    pub(crate) fn new(len: u16) -> Self {
        Self {
            words: vec![0; usize::from(len).div_ceil(64)].into(),
            len,
        }
    }

    /// Bits beyond the end read as clear.
    pub(crate) fn get(&self, bit: u16) -> bool {
        bit < self.len && self.words[usize::from(bit / 64)] & mask(bit) != 0
    }

    /// Returns the former value of the bit. Bits beyond the end stay clear.
    pub(crate) fn replace(&mut self, bit: u16, value: bool) -> bool {
        if bit >= self.len {
            return false;
        }
        let word = &mut self.words[usize::from(bit / 64)];
        let before = *word & mask(bit) != 0;
        if value {
            *word |= mask(bit);
        } else {
            *word &= !mask(bit);
        }
        before
    }

    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
    }

    pub(crate) fn count(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// The bits of `range` as booleans.
    pub(crate) fn to_bools(&self, range: Range<u16>) -> Vec<bool> {
        range.map(|bit| self.get(bit)).collect()
    }

    /// One more than the highest bit that is set.
    pub(crate) fn end(&self) -> u16 {
        (0..self.len)
            .rev()
            .find(|bit| self.get(*bit))
            .map_or(0, |bit| bit + 1)
    }
}

fn mask(bit: u16) -> u64 {
    1 << (bit % 64)
}
