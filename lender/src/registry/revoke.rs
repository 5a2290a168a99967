//! Devices that their lender takes back.

use std::{
    sync::{PoisonError, mpsc},
    time::{Duration, Instant},
};

use farside_daemon::DeviceId;
use farside_lender_protocol::{Availability, ErrorKind, RemoteError, Revocation};

use super::{DeviceRequest, Records, Registry, keep::end_chain, unknown};

/// Timeout for the DMA of a function that is made unavailable to stop.
const QUIET_TIMEOUT: Duration = Duration::from_secs(3);

impl Registry {
    /// Sets whether VMs may borrow a device.
    pub(crate) fn set_available(&self, id: &DeviceId, available: bool) -> Result<(), RemoteError> {
        let mut records = self.lock();
        let quiet = match available {
            true => None,
            false => records.end_kept(id)?.1,
        };
        let slot = records.slots.get_mut(id).ok_or_else(|| unknown(id))?;
        slot.availability = match (available, slot.availability) {
            (true, Availability::Revoking) => {
                return Err(RemoteError {
                    kind: ErrorKind::Busy,
                    message: format!(
                        "device {id} is being revoked, which cannot be undone: its guest may have been asked already; wait for the end"
                    ),
                });
            }
            (false, Availability::Revoking) => Availability::Revoking,
            (true, _) => {
                slot.revoked = Revocation::NotLent;
                Availability::Available
            }
            (false, _) => Availability::Unavailable,
        };
        drop(records);
        match quiet.map(|quiet| quiet.recv_timeout(QUIET_TIMEOUT)) {
            Some(Err(mpsc::RecvTimeoutError::Timeout)) => Err(RemoteError {
                kind: ErrorKind::Busy,
                message: format!(
                    "device {id} is unavailable now, but its DMA is not stopped yet: see the lender's log, and ask again"
                ),
            }),
            _ => Ok(()),
        }
    }

    /// Makes a device unavailable, and has its thread end the lease within `limit`. Waits for that,
    /// up to `patience`.
    pub(crate) fn revoke(
        &self,
        id: &DeviceId,
        limit: Duration,
        patience: Duration,
    ) -> Result<Revocation, RemoteError> {
        let mut records = self.lock();
        let (was_kept, quiet) = records.end_kept(id)?;
        let Records { slots, fences } = &mut *records;
        let slot = slots.get_mut(id).ok_or_else(|| unknown(id))?;
        let Some(held) = &slot.lease else {
            slot.availability = Availability::Unavailable;
            if was_kept {
                slot.revoked = Revocation::Ended;
            }
            let revoked = slot.revoked;
            drop(records);
            return match quiet.map(|quiet| quiet.recv_timeout(patience)) {
                Some(Err(mpsc::RecvTimeoutError::Timeout)) => Ok(Revocation::Pending),
                _ => Ok(revoked),
            };
        };
        let generation = held.generation;
        slot.queue.post(DeviceRequest::Revoke {
            generation,
            until: Instant::now() + limit,
        })?;
        slot.availability = Availability::Revoking;
        slot.revoked = Revocation::Pending;
        // A lender that starts anew does not know of the revocation.
        end_chain(fences, id);
        let revoked = |records: &Records| {
            let slot = records.slots.get(id);
            slot.map_or(Revocation::NotLent, |slot| slot.revoked)
        };
        let waited = self
            .revoked
            .wait_timeout_while(records, patience, |records| {
                revoked(records) == Revocation::Pending
            });
        let (records, _) = waited.unwrap_or_else(PoisonError::into_inner);
        Ok(revoked(&records))
    }
}
