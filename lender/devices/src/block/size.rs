//! The size of a medium that grows while it is lent.

/// Most bytes of a medium, as of a file.
pub const MAX_SIZE: u64 = i64::MAX as u64;

/// Why a disk cannot have another size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum SizeError {
    /// Its guest may use all of what it has.
    #[error("the medium has {to} bytes, and borrowers have seen {from}: a disk does not shrink")]
    Shrinks { from: u64, to: u64 },
    /// The last block would be incomplete.
    #[error(
        "the medium has {to} bytes, which is not a multiple of the block size, {block_size} bytes: borrowers see {from} bytes"
    )]
    NotMultiple { from: u64, to: u64, block_size: u32 },
    /// No file has as many.
    #[error(
        "the medium has {to} bytes, more than the maximum, {MAX_SIZE}: borrowers see {from} bytes"
    )]
    TooLarge { from: u64, to: u64 },
}

/// Why an image keeps its size.
#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    /// The size of the medium cannot be read.
    #[error("cannot read the size of the medium")]
    Io(#[source] std::io::Error),
    /// The disk cannot have that size.
    #[error(transparent)]
    Size(#[from] SizeError),
}

/// Checks that a disk of `from` bytes may have `to` from now on.
///
/// # Errors
/// A [`SizeError`].
pub fn check_growth(from: u64, to: u64, block_size: u32) -> Result<(), SizeError> {
    if to < from {
        Err(SizeError::Shrinks { from, to })
    } else if to > MAX_SIZE {
        Err(SizeError::TooLarge { from, to })
    } else if !to.is_multiple_of(block_size.into()) {
        Err(SizeError::NotMultiple {
            from,
            to,
            block_size,
        })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_grows_by_whole_blocks_and_does_not_shrink() {
        let from = 1 << 20;
        assert_eq!(check_growth(from, from, 512), Ok(()));
        assert_eq!(check_growth(from, from + 512, 512), Ok(()));
        let to = from - 512;
        let shrinks = SizeError::Shrinks { from, to };
        assert_eq!(check_growth(from, to, 512), Err(shrinks));
        for (to, block_size) in [(from + 1, 512), (from + 512, 4096)] {
            let fraction = SizeError::NotMultiple {
                from,
                to,
                block_size,
            };
            assert_eq!(check_growth(from, to, block_size), Err(fraction));
        }
        for to in [MAX_SIZE + 1, u64::MAX] {
            let large = SizeError::TooLarge { from, to };
            assert_eq!(check_growth(from, to, 512), Err(large));
        }
    }
}
