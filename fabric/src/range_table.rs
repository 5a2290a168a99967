//! A translation table: ranges of one address space, each mapped to something.

use std::ops::Range;

use crate::{Address, AddressRange, FabricError};

/// Maximum number of mappings of a table. Bounds the memory that a client can consume. A VM has
/// some tens; behind a vIOMMU, one for each page of the I/O under way, which 128 requests of 512
/// KiB have used up. Each is a mapping of this process, of which the kernel allows it 65,530
/// (`vm.max_map_count`).
pub const MAX_MAPPINGS: usize = 16_384;

/// Ranges that do not overlap, ascending, with the rules of VFIO type1: an
/// overlapping map is an error, and so is an unmap that would cut a mapping.
#[derive(Debug)]
pub struct RangeTable<A, T> {
    rows: Vec<(AddressRange<A>, T)>,
}

impl<A, T> Default for RangeTable<A, T> {
    fn default() -> Self {
        Self { rows: Vec::new() }
    }
}

impl<A: Address, T> RangeTable<A, T> {
    /// The value at `at`, and its range.
    pub fn find(&self, at: A) -> Option<&(AddressRange<A>, T)> {
        let index = self.first_ending_after(at);
        self.rows
            .get(index)
            .filter(|(range, _)| range.start() <= at)
    }

    /// Whether `range` could be mapped now.
    ///
    /// # Errors
    /// [`FabricError::Overlap`], [`FabricError::TooManyMappings`].
    pub fn check(&self, range: AddressRange<A>) -> Result<(), FabricError> {
        if let Some((other, _)) = self
            .rows
            .get(self.first_ending_after(range.start()))
            .filter(|(other, _)| other.start() < range.end())
        {
            return Err(FabricError::Overlap {
                space: A::SPACE,
                start: range.start().get(),
                len: range.len(),
                other_start: other.start().get(),
                other_len: other.len(),
            });
        }
        if self.rows.len() >= MAX_MAPPINGS {
            return Err(FabricError::TooManyMappings {
                space: A::SPACE,
                limit: MAX_MAPPINGS,
            });
        }
        Ok(())
    }

    /// Maps `range` to `target`.
    ///
    /// # Errors
    /// As [`RangeTable::check`].
    pub fn map(&mut self, range: AddressRange<A>, target: T) -> Result<(), FabricError> {
        self.check(range)?;
        let index = self.first_ending_after(range.start());
        self.rows.insert(index, (range, target));
        Ok(())
    }

    /// The mappings inside `range`, none of which it cuts.
    ///
    /// # Errors
    /// [`FabricError::SplitMapping`], [`FabricError::NotMapped`].
    pub fn inside(&self, range: AddressRange<A>) -> Result<&[(AddressRange<A>, T)], FabricError> {
        Ok(&self.rows[self.indexes_inside(range)?])
    }

    /// Unmaps all mappings inside `range` and returns them.
    ///
    /// # Errors
    /// As [`RangeTable::inside`].
    pub fn unmap(
        &mut self,
        range: AddressRange<A>,
    ) -> Result<Vec<(AddressRange<A>, T)>, FabricError> {
        let indexes = self.indexes_inside(range)?;
        Ok(self.rows.drain(indexes).collect())
    }

    fn indexes_inside(&self, range: AddressRange<A>) -> Result<Range<usize>, FabricError> {
        let first = self.first_ending_after(range.start());
        let last = self
            .rows
            .partition_point(|(row, _)| row.start() < range.end());
        let (start, len) = (range.start().get(), range.len());
        if first >= last {
            let space = A::SPACE;
            return Err(FabricError::NotMapped { space, start, len });
        }
        for (row, _) in [&self.rows[first], &self.rows[last - 1]] {
            if row.start() < range.start() || row.end() > range.end() {
                return Err(FabricError::SplitMapping {
                    space: A::SPACE,
                    start,
                    len,
                    mapping_start: row.start().get(),
                    mapping_len: row.len(),
                });
            }
        }
        Ok(first..last)
    }

    /// Unmaps everything and returns it.
    pub fn clear(&mut self) -> Vec<(AddressRange<A>, T)> {
        std::mem::take(&mut self.rows)
    }

    /// All mappings, ascending.
    pub fn rows(&self) -> &[(AddressRange<A>, T)] {
        &self.rows
    }

    fn first_ending_after(&self, at: A) -> usize {
        self.rows.partition_point(|(range, _)| range.end() <= at)
    }
}
