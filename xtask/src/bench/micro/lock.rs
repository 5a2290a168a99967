//! The bare cost of locking memory, for [`super::ready`] to be compared with.

use std::{
    fs::File,
    num::NonZeroUsize,
    ptr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::mm::{MapFlags, ProtFlags, mlock, mmap, munmap};

/// Maps all of a file anew and locks it with one `mlock`. Returns how long that
/// call took.
#[expect(unsafe_code, reason = "mapping and locking by address")]
pub(super) fn time_to_lock(file: &File, bytes: NonZeroUsize) -> Result<Duration> {
    let len = bytes.get();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice overlaps
    // nothing of ours.
    let start = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }
        .with_context(|| format!("mapping {len:#x} bytes"))?;
    let began = Instant::now();
    // SAFETY: the mapping is ours, and locking changes nothing in it. Nobody
    // reads or writes it, so a file that is shorter than it does no harm.
    let locked = unsafe { mlock(start, len) };
    let took = began.elapsed();
    // SAFETY: it was mapped above with this length, and nobody has a pointer
    // into it.
    unsafe { munmap(start, len) }.context("unmapping")?;
    locked.with_context(|| {
        format!("locking {len:#x} bytes: the memlock limit (`ulimit -l`) may be too small")
    })?;
    Ok(took)
}
