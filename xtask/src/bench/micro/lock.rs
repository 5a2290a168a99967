//! The bare cost of locking memory, a reference for [`super::ready`].

use std::{
    fs::File,
    num::NonZeroUsize,
    ptr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::mm::{MapFlags, ProtFlags, mlock, mmap, munmap};

/// Maps all of a file anew and locks it with one `mlock`. Returns the duration of that
/// call.
#[expect(unsafe_code, reason = "mapping and locking by address")]
pub(super) fn time_to_lock(file: &File, bytes: NonZeroUsize) -> Result<Duration> {
    let len = bytes.get();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses aliases nothing.
    let start = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }
        .with_context(|| format!("mapping {len:#x} bytes"))?;
    let began = Instant::now();
    // SAFETY: the mapping is ours, and locking does not change its contents. It is never
    // accessed, so a file that is shorter than the mapping does no harm.
    let locked = unsafe { mlock(start, len) };
    let took = began.elapsed();
    // SAFETY: it was mapped above with this length, and no pointer into it is left.
    unsafe { munmap(start, len) }.context("unmapping")?;
    locked.with_context(|| {
        format!("locking {len:#x} bytes: the memlock limit (`ulimit -l`) may be too small")
    })?;
    Ok(took)
}
