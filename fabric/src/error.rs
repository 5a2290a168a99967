//! Errors of setting up or closing a path.

use std::io;

use crate::{Iova, LimitError, QuotaError, Size};

/// Why a fabric refused to change a path. The path is as it was before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// A range is empty or ends past the end of its space.
    #[error("{space} range of {len:#x} bytes at {start:#x} is empty or ends beyond 2^64")]
    BadRange {
        /// Name of the address space.
        space: &'static str,
        /// First address.
        start: u64,
        /// Bytes.
        len: u64,
    },
    /// A range does not begin or end where it must.
    #[error(
        "{space} range of {len:#x} bytes at {start:#x} must begin and end at multiples of {}",
        Size(*alignment)
    )]
    Unaligned {
        /// Name of the address space.
        space: &'static str,
        /// First address.
        start: u64,
        /// Bytes.
        len: u64,
        /// The required alignment, in bytes.
        alignment: u64,
    },
    /// Something is mapped there already.
    #[error(
        "{space} range of {len:#x} bytes at {start:#x} overlaps the mapping of {other_len:#x} \
         bytes at {other_start:#x}; unmap that first"
    )]
    Overlap {
        /// Name of the address space.
        space: &'static str,
        /// First address requested.
        start: u64,
        /// Bytes requested.
        len: u64,
        /// First address of the existing range.
        other_start: u64,
        /// Size of the existing range, in bytes.
        other_len: u64,
    },
    /// An unmap would cut a mapping in two.
    #[error(
        "cannot unmap {len:#x} bytes at {space} {start:#x}: it would cut the mapping of \
         {mapping_len:#x} bytes at {mapping_start:#x}; unmap whole mappings"
    )]
    SplitMapping {
        /// Name of the address space.
        space: &'static str,
        /// First address requested.
        start: u64,
        /// Bytes requested.
        len: u64,
        /// First address of the mapping.
        mapping_start: u64,
        /// Bytes of the mapping.
        mapping_len: u64,
    },
    /// Nothing is mapped there.
    #[error("nothing is mapped in the {len:#x} bytes at {space} {start:#x}")]
    NotMapped {
        /// Name of the address space.
        space: &'static str,
        /// First address requested.
        start: u64,
        /// Bytes requested.
        len: u64,
    },
    /// A domain has as many mappings as it may have.
    #[error("the limit of {limit} mappings of one domain ({space}) is reached")]
    TooManyMappings {
        /// Name of the address space.
        space: &'static str,
        /// The limit.
        limit: usize,
    },
    /// No window begins there.
    #[error("no window begins at IOVA {iova}")]
    NoWindow {
        /// The IOVA requested.
        iova: Iova,
    },
    /// The adapter's resources are insufficient.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The lease has mapped as much memory as it may.
    #[error(transparent)]
    Quota(#[from] QuotaError),
    /// The memory could not be mapped.
    #[error("cannot map {len:#x} bytes at offset {offset:#x} of the shared memory file")]
    Memory {
        /// Offset in the file.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The error of the system call.
        source: io::Error,
    },
    /// Memory that DMA in flight uses could not be taken from it.
    #[error(
        "cannot replace {len:#x} bytes at offset {offset:#x} of the shared memory file, which DMA in \
         flight uses, by private pages"
    )]
    InUse {
        /// Offset in the file.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The error of the system call, or another use of the memory.
        source: io::Error,
    },
    /// An error of an implementation outside this crate: a proxy, a driver.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}
