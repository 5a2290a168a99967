//! What is known from the lender's Welcome.

use super::{CallError, Client};
use crate::{Greeted, Instance};

impl Client {
    /// The connection to a lender at a UNIX socket, for another process to go on with.
    ///
    /// # Errors
    /// The lender has not accepted Hello.
    pub fn into_greeted(self) -> Result<Greeted, CallError> {
        let instance = self.instance()?;
        Ok(Greeted {
            socket: self.channel.into_socket(),
            lender: self.lender,
            instance,
        })
    }

    /// The lender's run.
    ///
    /// # Errors
    /// The lender has not accepted Hello.
    pub fn instance(&self) -> Result<Instance, CallError> {
        let missing = || CallError::Unexpected("no Welcome".to_owned());
        self.instance.ok_or_else(missing)
    }
}
