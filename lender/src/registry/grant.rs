//! Leases that begin.

use std::{
    sync::{Arc, MutexGuard},
    time::Instant,
};

use farside_daemon::DeviceId;
use farside_lender_protocol::{ErrorKind, Generation, HeldFence, RemoteError};

use super::{
    DeviceRequest, FUNCTION, Group, Held, Lease, Records, Registry, Slot, keep::end_chain, unknown,
};
use crate::{
    chains::{Chain, Kept},
    lease_owner::LeaseOwner,
};

/// A lease that the registry has recorded, and the device's thread does not have yet. Holds the
/// registry's lock, so that a device's thread receives leases and handovers in the order of their
/// generations: the answer to a handover that overtook a lease would be that none has to end.
#[must_use = "a grant that is not posted keeps the device from all borrowers"]
pub(crate) struct Grant<'a> {
    id: &'a DeviceId,
    generation: Generation,
    /// Its VM has the secret of its chain.
    goes_on: bool,
    /// As before.
    kept: Option<Kept>,
    records: MutexGuard<'a, Records>,
}

impl<'a> Grant<'a> {
    /// Records a lease, its chain in the file first. Has no effect on error.
    pub(super) fn begin(
        mut records: MutexGuard<'a, Records>,
        id: &'a DeviceId,
        owner: &LeaseOwner,
        chain: Option<Chain>,
        goes_on: bool,
    ) -> Result<Self, RemoteError> {
        let slot = records.slots.get(id).ok_or_else(|| unknown(id))?;
        let generation = slot.next(id)?;
        records.begin_chain(id, chain)?;
        let Records { slots, fences } = &mut *records;
        let slot = slots.get_mut(id).ok_or_else(|| unknown(id))?;
        fences.borrowed(id, owner.vm());
        slot.generation = generation;
        slot.last = Some(owner.clone());
        slot.lease = Some(Held {
            owner: owner.clone(),
            generation,
            since: Instant::now(),
            superseded: false,
        });
        let kept = slot.kept.take();
        Ok(Self {
            id,
            generation,
            goes_on,
            kept,
            records,
        })
    }

    /// The fencing token of the lease.
    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    /// Posts the lease to the device's thread. On failure the device is free again, or kept for a VM that
    /// may still go on.
    pub(crate) fn post(mut self, lease: Lease) -> Result<(), RemoteError> {
        let Records { slots, fences } = &mut *self.records;
        let slot = slots.get_mut(self.id).ok_or_else(|| unknown(self.id))?;
        let posted = slot.queue.post(DeviceRequest::Lease(lease));
        if posted.is_err() {
            slot.lease = None;
            match self.goes_on {
                true => slot.kept = self.kept.take(),
                false => end_chain(fences, self.id),
            }
        }
        posted
    }
}

impl Registry {
    /// Records a lease of the former broker, which goes on, before the device can be borrowed.
    pub(crate) fn adopt(
        &self,
        id: &DeviceId,
        owner: LeaseOwner,
        generation: Generation,
        since: Instant,
    ) {
        if let Some(slot) = self.lock().slots.get_mut(id) {
            slot.generation = slot.generation.max(generation);
            slot.last = Some(owner.clone());
            slot.lease = Some(Held {
                owner,
                generation,
                since,
                superseded: false,
            });
        }
    }

    /// Grants a lease, or refuses with the current holder, or that of a function of the same IOMMU group, or the VM's fence.
    pub(crate) fn grant<'a>(
        &'a self,
        id: &'a DeviceId,
        owner: &LeaseOwner,
        fence: Option<HeldFence>,
    ) -> Result<Grant<'a>, RemoteError> {
        let records = self.lock();
        let slot = records.slots.get(id).ok_or_else(|| unknown(id))?;
        slot.check_issued(id, fence)?;
        records.fences.check(id, owner.vm(), fence)?;
        slot.availability.check(id)?;
        if let Some(holder) = slot.holder() {
            return Err(holder.refusal(id));
        }
        slot.check_kept(id, owner.vm())?;
        records.check_others(id, owner)?;
        Grant::begin(records, id, owner, None, false)
    }

    /// Records that a device shares its IOMMU group with others.
    pub(crate) fn set_group(&self, id: &DeviceId, group: Arc<Group>) {
        if let Some(slot) = self.lock().slots.get_mut(id) {
            slot.group = Some(group);
        }
    }
}

impl Records {
    /// Refuses a function that another one reaches, or whose memory it would.
    pub(super) fn check_others(
        &self,
        id: &DeviceId,
        owner: &LeaseOwner,
    ) -> Result<(), RemoteError> {
        self.check_group(id, owner)?;
        self.check_reached(id, owner)
    }

    /// Refuses a function whose BAR another function may still reach: one of the owner that had this one last. With VFIO
    /// type1 a mapping of a BAR lasts until it is unmapped, which a worker that was killed has not done.
    fn check_reached(&self, id: &DeviceId, owner: &LeaseOwner) -> Result<(), RemoteError> {
        let function = |slot: &&Slot| slot.source == FUNCTION;
        let slot = self.slots.get(id).filter(function);
        let Some(former) = slot.and_then(|slot| slot.last.as_ref()) else {
            return Ok(());
        };
        let is_formers = |other: &LeaseOwner| other.may_be(former) && !other.is(owner);
        let has = |slot: &Slot| {
            slot.lease.as_ref().is_some_and(|it| is_formers(&it.owner))
                || slot.kept.as_ref().is_some_and(|it| is_formers(&it.owner))
        };
        let mut others = self.slots.iter().filter(|(_, slot)| function(slot));
        match others.find(|(other, slot)| *other != id && has(slot)) {
            None => Ok(()),
            Some((other, _)) => Err(RemoteError {
                kind: ErrorKind::Busy,
                message: format!(
                    "device {id} may still be reached by {other}: VM {former}, which had both, has to return {other} first, or borrow and return it again; `farside revoke {other}` takes it back"
                ),
            }),
        }
    }

    /// Refuses a function while another owner has another of its IOMMU group: both would reach the memory of either.
    fn check_group(&self, id: &DeviceId, owner: &LeaseOwner) -> Result<(), RemoteError> {
        let Some(group) = self.slots.get(id).and_then(|slot| slot.group.as_deref()) else {
            return Ok(());
        };
        for other in &group.devices {
            let held = self.slots.get(other).and_then(|slot| slot.lease.as_ref());
            if let Some(held) = held
                && !held.owner.is(owner)
            {
                return Err(RemoteError {
                    kind: ErrorKind::Busy,
                    message: format!(
                        "device {id} shares IOMMU group {} with {other}, which VM {} has: one VM of one borrower at a time can have functions of a group; return {other}, or `farside revoke {other}`",
                        group.number, held.owner
                    ),
                });
            }
        }
        Ok(())
    }
}
