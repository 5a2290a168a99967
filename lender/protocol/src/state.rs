//! The file in which the state of a leased device outlives the process that serves it.

use std::{sync::atomic::Ordering, time::Duration};

use farside_fabric::memory::HostSlice;

use crate::Secret;

/// Bytes at the start of the file that are about the lease, at the start of which is a 64-bit number, little-endian: how
/// many accesses of the register channel the processes of the device have served, all together. The others are the device's.
pub const STATE_PAGE: u64 = 4096;

/// How many accesses of the register channel the processes have served; `state` is the first page of the file.
pub fn served(state: &HostSlice) -> u64 {
    state.load_u64(0, Ordering::Acquire).unwrap_or_default()
}

/// A lease that goes on after its process has ended.
#[derive(Clone, Copy, Debug)]
pub struct Keeping {
    /// For how long the lender keeps the device for the VM.
    pub keep: Duration,
    /// The chain of the lease that this one goes on with.
    pub resumes: Option<Secret>,
}
