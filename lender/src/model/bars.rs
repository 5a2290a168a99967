//! The borrower's memory behind a model's BARs.

use std::os::fd::OwnedFd;

use farside_fabric::memory::SharedMemory;
use farside_lender_protocol::RemoteError;

use super::ModelDevice;
use crate::refusals::{internal, invalid};

impl ModelDevice {
    /// Passes the borrower's files for BARs with sparse mmap areas to the device.
    pub(super) fn take_bar_memory(&mut self, files: Vec<OwnedFd>) -> Result<(), RemoteError> {
        let bars: Vec<_> = (0u8..)
            .zip(self.device.description().bars.clone())
            .filter_map(|(n, bar)| bar.map(|bar| (n, bar.mappable)))
            .filter(|(_, mappable)| !mappable.is_empty())
            .collect();
        if files.len() != bars.len() {
            return Err(invalid(format!(
                "device {} has {} BARs with sparse mmap areas, but the borrower gave memory for {}",
                self.id,
                bars.len(),
                files.len()
            )));
        }
        for ((bar, mappable), file) in bars.into_iter().zip(files) {
            for (n, area) in mappable.into_iter().enumerate() {
                let file = file.try_clone().map_err(internal)?;
                let memory = SharedMemory::map(file, area.offset, area.len as usize, true)
                    .map_err(internal)?;
                let whole = memory.slice(0, memory.len());
                self.device.set_bar_memory(bar, n, whole);
            }
        }
        Ok(())
    }

    /// Removes the borrower's memory from the device.
    pub(super) fn drop_bar_memory(&mut self) {
        let bars = self.device.description().bars.clone();
        for (bar, description) in bars.iter().enumerate() {
            for n in 0..description.iter().map(|bar| bar.mappable.len()).sum() {
                self.device.set_bar_memory(bar as u8, n, None);
            }
        }
    }
}
