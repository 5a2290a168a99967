//! The disk of a lease grows.

use std::sync::mpsc::SyncSender;

use farside_lender_protocol::RemoteError;

use super::{Waiting, WorkerLease};
use crate::{
    refusals::unsupported,
    source::{Available, Resized},
    worker::Order,
};

/// The version of workers since which they are ordered to resize a disk.
const RESIZES: u32 = 2;

impl WorkerLease<'_> {
    /// The order to take the size that the medium has, unless that is refused.
    pub(super) fn resize(
        &mut self,
        reply: SyncSender<Result<Resized, RemoteError>>,
    ) -> Option<(Order, Waiting)> {
        match self.take_size() {
            Ok(resized) => {
                let order = Order::Resize { to: resized.to };
                Some((order, Waiting::Resize(resized, reply)))
            }
            Err(error) => {
                // Fails if the requester has gone.
                let _ = reply.try_send(Err(error));
                None
            }
        }
    }

    /// Takes the size of the medium. It is recorded before the worker gets the order: whatever is killed, no guest sees the disk
    /// shrink.
    fn take_size(&mut self) -> Result<Resized, RemoteError> {
        let record = self.record.as_ref();
        if let Some(record) = record.filter(|record| record.lease.worker < RESIZES) {
            return Err(unsupported(&format!(
                "its worker process {} was started by an earlier farside, which resizes no disk: kill that process, after which the lease goes on in another, and repeat the command",
                record.lease.pid
            )));
        }
        let resized = self.device.take_size()?;
        if let Some(record) = &mut self.record {
            record.resized(resized.to);
        }
        Ok(resized)
    }
}
