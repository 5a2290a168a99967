//! The requests of a lender's operators.

use std::time::Duration;

use farside_daemon::{DeviceId, VmName};

use super::{CallError, Client};
use crate::{Generation, HeldFence, Reply, Request, ResizedDevice, Revocation, Secret};

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

    /// See [`Request::ResizeDevice`]. Returns the devices, and the number of those that the reply does not name.
    pub fn resize_device(
        &mut self,
        device: &DeviceId,
    ) -> Result<(Vec<ResizedDevice>, u32), CallError> {
        let device = device.to_owned();
        match self.call(Request::ResizeDevice { device }, &[])? {
            (Reply::Resized { devices, more }, _) => Ok((devices, more)),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// See [`Request::Handover`]. Returns the VM's fence.
    pub fn hand_over(
        &mut self,
        device: &DeviceId,
        vm: &VmName,
        migration: &str,
        supersedes: Option<HeldFence>,
        secret: Secret,
    ) -> Result<Generation, CallError> {
        let request = Request::Handover {
            device: device.to_owned(),
            vm: vm.to_string(),
            migration: migration.to_owned(),
            supersedes,
            secret,
        };
        match self.call(request, &[])? {
            (Reply::Fence { generation }, _) => Ok(generation),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// See [`Request::EndReservation`].
    pub fn end_reservation(
        &mut self,
        device: &DeviceId,
        secret: Option<Secret>,
    ) -> Result<(), CallError> {
        let device = device.to_owned();
        self.done(Request::EndReservation { device, secret }, &[])
    }
}
