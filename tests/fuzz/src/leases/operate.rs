//! An operator revokes, adds and removes devices, as `server::Devices` and `connection` do it at the
//! lender: they check the rights and open media, apart from the registry.

use std::{sync::mpsc::sync_channel, time::Duration};

use farside_daemon::{DeviceId, Wakeup};
use farside_lender_protocol::{
    BarOwner, Described, ErrorKind, Generation, RemoteError, Reply, Request,
};

use super::{
    chains::image,
    check::Cause,
    device::Device,
    host::{DEVICES, OPERATOR, borrowers, is_operator},
    world::{World, index, name},
};
use crate::{
    access::Access,
    image::Image,
    refusals::invalid,
    registry::{MAX_REQUESTS, Registry, RequestQueue},
};

/// Adds a device, with the queue of its thread.
pub fn add_device(
    registry: &Registry,
    at: usize,
    generation: Generation,
    medium: u8,
) -> Result<Device, RemoteError> {
    let (sender, requests) = sync_channel(MAX_REQUESTS);
    let queue = RequestQueue::new(sender, Wakeup::new().expect("an eventfd"));
    let id: DeviceId = name(DEVICES[at]);
    let described = Described {
        description: Image::nvme().0,
        bars: BarOwner::Borrower,
        rom: 0,
        state: 0,
    };
    let access = Access::new(&id, OPERATOR, borrowers(at));
    registry.add(&id, "model", described, queue, access, generation)?;
    registry.set_medium(&id, image(medium));
    Ok(Device::new(requests))
}

impl World {
    pub(super) fn operate(&mut self, host: usize, request: Request) -> Result<Reply, RemoteError> {
        if !is_operator(host) {
            return Err(RemoteError {
                kind: ErrorKind::Denied,
                message: "not an operator".into(),
            });
        }
        let device = match &request {
            Request::Revoke { device, .. }
            | Request::SetAvailable { device, .. }
            | Request::RemoveDevice { device } => index(device),
            // The id alone stands for a table.
            Request::AddDevice { table } => DEVICES.iter().position(|id| id == table),
            other => panic!("{other:?} is not an operator's request"),
        };
        let at = device.ok_or_else(|| invalid("no such device".into()))?;
        let id: DeviceId = name(DEVICES[at]);
        let (reply, cause) = match request {
            Request::Revoke { limit_ms, .. } => {
                // The requester waits no longer than that.
                let limit = Duration::from_millis(limit_ms % 1000);
                let revoked = self.registry.revoke(&id, limit, Duration::ZERO)?;
                let kept =
                    self.ledgers[at].holder().is_none() && self.chains.kept_for(at).is_some();
                self.ledgers[at].check_revocation(revoked, kept);
                self.chains.end(at);
                (Reply::Revocation(revoked), Cause::Revoke)
            }
            Request::SetAvailable { available, .. } => {
                self.registry.set_available(&id, available)?;
                if !available && self.ledgers[at].holder().is_none() {
                    self.chains.end(at);
                }
                (Reply::Done, Cause::SetAvailable(available))
            }
            Request::RemoveDevice { .. } => {
                // The requester waits for the end of the thread.
                drop(self.registry.remove(&id)?);
                self.chains.end(at);
                (Reply::Done, Cause::Remove)
            }
            _ => {
                let generation = self.clock(0);
                let medium = self.chains.media[at];
                let device = add_device(&self.registry, at, generation, medium)?;
                // The thread before has closed the medium.
                while !self.devices[at].ended {
                    self.step(at);
                }
                self.devices[at] = device;
                (Reply::Done, Cause::Add(generation))
            }
        };
        self.cause = Some((at, cause));
        Ok(reply)
    }
}
