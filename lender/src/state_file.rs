//! The borrower's file in which the state of a lease outlives the process that serves it.

use std::{io, os::fd::OwnedFd, sync::atomic::Ordering};

use farside_daemon::DeviceId;
use farside_fabric::memory::{HostSlice, SharedMemory};
use farside_lender_protocol::{RemoteError, STATE_PAGE, served};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use crate::refusals::{internal, invalid};

/// See [`farside_lender_protocol::Request::BorrowAndKeep`].
#[derive(Debug)]
pub(crate) struct StateFile {
    pub(crate) file: OwnedFd,
    /// It has the state of the lease that this one goes on with.
    pub(crate) goes_on: bool,
}

impl StateFile {
    /// Maps the file, which has `bytes`: its first page, and the rest.
    pub(crate) fn map(
        self,
        id: &DeviceId,
        bytes: u64,
    ) -> Result<(LeasePage, HostSlice), RemoteError> {
        let Self { file, .. } = self;
        // The device's memory must not shrink under it, and its size is what both sides compute offsets from.
        let sealed = SealFlags::SHRINK | SealFlags::GROW;
        let seals = fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(sealed) {
            return Err(invalid(format!(
                "device {id}: the file of its state is not sealed against resizing (F_SEAL_SHRINK, F_SEAL_GROW)"
            )));
        }
        let size = fstat(&file)
            .map_err(|errno| internal(io::Error::from(errno)))?
            .st_size;
        if bytes == 0 || u64::try_from(size) != Ok(bytes) {
            return Err(invalid(format!(
                "device {id}: the file of its state has {size} bytes, and not {bytes}"
            )));
        }
        let memory = SharedMemory::map(file, 0, bytes as usize, true).map_err(internal)?;
        let rest = STATE_PAGE as usize;
        let parts = memory
            .slice(0, rest)
            .zip(memory.slice(rest, memory.len() - rest));
        let (page, rest) = parts.ok_or_else(|| internal(io::Error::other("no state")))?;
        let before = served(&page);
        Ok((LeasePage { page, before }, rest))
    }
}

/// The first page of the file.
pub(crate) struct LeasePage {
    page: HostSlice,
    /// How many register accesses the former processes have served.
    before: u64,
}

impl LeasePage {
    /// The page, of which the first word is taken.
    pub(crate) fn page(&self) -> &HostSlice {
        &self.page
    }

    /// This process has served `count` register accesses.
    pub(crate) fn served(&self, count: u64) {
        let _ = self
            .page
            .store_u64(0, self.before.wrapping_add(count), Ordering::Release);
    }
}
