//! The requests of a lender's operators.

use std::time::Duration;

use farside_daemon::DeviceId;

use super::{CallError, Client};
use crate::{Reply, Request, Revocation};

impl Client {
    /// See [`Request::Revoke`]. Waits for a part of `limit` only.
    pub fn revoke(&mut self, device: &DeviceId, limit: Duration) -> Result<Revocation, CallError> {
        let request = Request::Revoke {
            device: device.to_owned(),
            limit_ms: limit.as_millis().try_into().unwrap_or(u64::MAX),
        };
        match self.call(request, &[])? {
            (Reply::Revocation(revocation), _) => Ok(revocation),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// See [`Request::SetAvailable`].
    pub fn set_available(&mut self, device: &DeviceId, available: bool) -> Result<(), CallError> {
        let device = device.to_owned();
        self.done(Request::SetAvailable { device, available }, &[])
    }

    /// See [`Request::AddDevice`].
    pub fn add_device(&mut self, table: String) -> Result<(), CallError> {
        self.done(Request::AddDevice { table }, &[])
    }

    /// See [`Request::RemoveDevice`].
    pub fn remove_device(&mut self, device: &DeviceId) -> Result<(), CallError> {
        let device = device.to_owned();
        self.done(Request::RemoveDevice { device }, &[])
    }
}
