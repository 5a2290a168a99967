//! The borrower's memory in which a model's state outlives this process.

use farside_fabric::memory::{HostSlice, SharedMemory};
use farside_lender_protocol::{ErrorKind, RemoteError, STATE_PAGE, served};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use super::ModelDevice;
use crate::{
    refusals::{internal, invalid},
    source::StateFile,
};

/// The first page of the file.
pub(super) struct LeasePage {
    pub(super) page: HostSlice,
    /// How many register accesses the former processes have served.
    pub(super) before: u64,
}

impl ModelDevice {
    /// Has the device keep its state in the borrower's file, from what is there if the lease goes on. Returns the first
    /// page.
    pub(super) fn take_state(&mut self, state: StateFile) -> Result<LeasePage, RemoteError> {
        let StateFile { file, goes_on } = state;
        let id = &self.id;
        let bytes = self.described.state;
        // The device's memory must not shrink under it, and its size is what both sides compute offsets from.
        let sealed = SealFlags::SHRINK | SealFlags::GROW;
        let seals = fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(sealed) {
            return Err(invalid(format!(
                "device {id}: the file of its state is not sealed against resizing (F_SEAL_SHRINK, F_SEAL_GROW)"
            )));
        }
        let size = fstat(&file)
            .map_err(|errno| internal(std::io::Error::from(errno)))?
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
        let (page, rest) = parts.ok_or_else(|| internal(std::io::Error::other("no state")))?;
        match self.device.set_state(rest, goes_on) {
            Ok(true) => log::info!("device {id}: goes on from the state of the process before"),
            Ok(false) if goes_on => {
                log::warn!("device {id}: there is no state to go on from: it is reset")
            }
            Ok(false) => {}
            Err(text) => {
                self.device.detach_state();
                self.device.reset();
                return Err(RemoteError {
                    kind: ErrorKind::ChainEnded,
                    message: format!("device {id} cannot go on: {text}"),
                });
            }
        }
        let before = served(&page);
        Ok(LeasePage { page, before })
    }
}
