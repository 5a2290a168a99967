//! The borrower's memory in which a model's state outlives this process.

use farside_lender_protocol::{ErrorKind, RemoteError};

use super::ModelDevice;
use crate::state_file::{LeasePage, StateFile};

impl ModelDevice {
    /// Has the device keep its state in the borrower's file, from what is there if the lease goes on. Returns the first
    /// page.
    pub(super) fn take_state(&mut self, state: StateFile) -> Result<LeasePage, RemoteError> {
        let id = &self.id;
        let goes_on = state.goes_on;
        let (page, rest) = state.map(id, self.described.state)?;
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
        Ok(page)
    }
}
