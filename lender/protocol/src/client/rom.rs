//! Reads an expansion ROM.

use farside_daemon::DeviceId;

use super::{CallError, Client};
use crate::{Reply, Request};

impl Client {
    /// The expansion ROM of a device, with so many bytes.
    ///
    /// # Errors
    /// It is [larger](farside_pci::rom::MAX) or smaller, or the lender does not have it.
    pub fn rom(&mut self, device: &DeviceId, len: u32) -> Result<Vec<u8>, CallError> {
        let len = (len as usize).min(farside_pci::rom::MAX);
        let mut rom = Vec::new();
        while rom.len() < len {
            let request = Request::Rom {
                device: device.to_owned(),
                // At most `MAX`.
                offset: rom.len() as u32,
            };
            match self.call(request, &[])? {
                (Reply::Rom(part), _) if !part.is_empty() => rom.extend(part),
                (other, _) => return Err(self.unexpected(&other)),
            }
        }
        rom.truncate(len);
        Ok(rom)
    }
}
