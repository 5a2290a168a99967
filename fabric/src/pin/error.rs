//! Why memory is not pinned.

use std::{io, time::Duration};

use super::MemlockTooSmall;
use crate::host_memory::TooLarge;

/// Why memory is not pinned. None of it is, then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The memlock limit is too small, and [`PinPolicy::Require`] was requested.
    #[error(transparent)]
    Memlock(#[from] MemlockTooSmall),
    /// The host has not enough memory left.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// A range cannot be mapped.
    #[error("cannot map {len:#x} bytes at offset {offset:#x} of guest memory")]
    Map {
        /// Offset in the file.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The error of the system call.
        source: io::Error,
    },
    /// The kernel could not make pages resident.
    #[error(
        "cannot populate {len:#x} bytes at offset {offset:#x} of guest memory{}",
        populate_hint(source)
    )]
    Populate {
        /// Offset in the file.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The error of the system call.
        source: io::Error,
    },
    /// The kernel could not lock pages, although the limit allowed it.
    #[error("cannot lock {len:#x} bytes at offset {offset:#x} of guest memory")]
    Lock {
        /// Offset in the file.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The error of the system call.
        source: io::Error,
    },
    /// [`PinOptions::deadline`] has passed.
    #[error(
        "pinning guest memory took too long: {done} of {total} bytes were resident after \
         {elapsed:.1?}; give the VM a longer message timeout (QEMU's x-msg-timeout and \
         --open-timeout; with cloud-hypervisor --open-timeout alone) or prefault its memory"
    )]
    Deadline {
        /// Bytes that were resident.
        done: u64,
        /// Bytes in all.
        total: u64,
        /// The elapsed time.
        elapsed: Duration,
    },
    /// [`PinOptions::cancel`] became true.
    #[error("pinning guest memory was cancelled when {done} of {total} bytes were resident")]
    Cancelled {
        /// Bytes that were resident.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// A thread could not be started, or the limits not be read.
    #[error("cannot {what}")]
    System {
        /// The failed operation.
        what: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
}

fn populate_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EINVAL) => " (Linux 5.14 or newer is needed for MADV_POPULATE_READ)",
        Some(libc::EFAULT) => " (the file has shrunk, or no huge page is free)",
        _ => "",
    }
}
