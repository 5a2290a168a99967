//! Leases that go on over another connection: see [`crate::chains`].

use std::{convert::Infallible, sync::mpsc, time::Duration};

use farside_daemon::{DeviceId, VmName};
use farside_devices::block::ImageId;
use farside_error_chain::Chain as Causes;
use farside_lender_protocol::{
    ErrorKind, Generation, HeldFence, KeptFor, RemoteError, Secret, Transport,
};

use super::{DeviceRequest, Grant, Records, Registry, Slot, unknown};
use crate::{
    chains::{self, Chain, Kept},
    fences::FenceBook,
    lease_owner::LeaseOwner,
    refusals::{internal, no_medium},
};

/// Longest time for which a device is kept, unless the configuration sets another.
pub(crate) const DEFAULT_KEEP_AT_MOST: Duration = Duration::from_secs(600);

/// The chain of a lease that is granted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GrantedChain {
    pub(crate) secret: Secret,
    /// Its VM has the secret already.
    pub(crate) goes_on: bool,
}

/// A borrow whose lease goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Going {
    /// Time for which the device is kept after a cut.
    pub(crate) keep: Duration,
    /// The chain of the lease that this one goes on with.
    pub(crate) resumes: Option<Secret>,
}

impl Slot {
    /// By which medium a lease that goes on by `transport` is told from one of another device of the same id, if it can go
    /// on at all. One that runs on has none: its process is told from others by what it has open. A model without one
    /// has no state that would outlive its process.
    fn goes_on(&self, transport: Transport) -> Option<ImageId> {
        match (self.medium, transport) {
            (Some(ImageId::None), Transport::Network) => self.medium,
            (Some(ImageId::None), _) => None,
            (None, Transport::SharedMemory) if self.runs_on => Some(ImageId::None),
            (medium, _) => medium,
        }
    }

    /// The VM for which it is kept.
    pub(super) fn kept(&self) -> Option<KeptFor> {
        self.kept.as_ref()?.shown()
    }

    /// Refuses another VM than that for which it is kept.
    pub(super) fn check_kept(&self, id: &DeviceId, vm: &VmName) -> Result<(), RemoteError> {
        match self.kept() {
            Some(kept) if kept.vm != *vm => Err(kept.refusal(id)),
            _ => Ok(()),
        }
    }
}

impl Records {
    /// Ends the chain of a device without a lease. Returns whether it was kept, and of one that runs on what is closed when it
    /// does no DMA: it may do that for longer than it is kept.
    pub(super) fn end_kept(
        &mut self,
        id: &DeviceId,
    ) -> Result<(bool, Option<mpsc::Receiver<Infallible>>), RemoteError> {
        let Self { slots, fences } = self;
        let slot = slots.get_mut(id).ok_or_else(|| unknown(id))?;
        if slot.lease.is_some() {
            return Ok((false, None));
        }
        let quiet = match slot.runs_on {
            true => {
                let (let_go, quiet) = mpsc::sync_channel(1);
                slot.queue.post(DeviceRequest::LetGo(let_go))?;
                Some(quiet)
            }
            false => None,
        };
        fences.end_chain(id)?;
        let was_kept = slot.kept.take().is_some_and(|kept| kept.shown().is_some());
        Ok((was_kept, quiet))
    }

    /// Writes the chain of a lease that begins, or that it has none. What is written to its medium ends
    /// the chain of any other device that had that medium: one was renamed. Devices that have it now
    /// share it: they do not write, or have reservations.
    pub(super) fn begin_chain(
        &mut self,
        id: &DeviceId,
        chain: Option<Chain>,
    ) -> Result<(), RemoteError> {
        let Self { slots, fences } = self;
        let medium_of = |id: &DeviceId| slots.get(id).and_then(|slot| slot.medium);
        let medium = medium_of(id);
        fences.lend(id, chain, |other, chain| {
            let had = Some(chain.medium) == medium && !chain.medium.is_empty();
            had && medium_of(other) != medium
        })
    }
}

/// Ends a device's chain. If the file cannot be written, the next lease writes it, or is refused.
pub(super) fn end_chain(fences: &mut FenceBook, id: &DeviceId) {
    if let Err(error) = fences.end_chain(id) {
        log::error!(
            "device {id}: the state file still says that its last lease may go on: {}",
            Causes(&error)
        );
    }
}

impl Registry {
    /// Sets the longest time for which devices are kept.
    pub(crate) fn keeping(mut self, at_most: Duration) -> Self {
        self.keep_at_most = at_most;
        self
    }

    /// Sets the medium of a device that can be lent over the network: [`ImageId::None`] of a model that has
    /// none. A lease of an earlier run may go on.
    pub(crate) fn set_medium(&self, id: &DeviceId, medium: ImageId) {
        let mut records = self.lock();
        let Records { slots, fences } = &mut *records;
        if let Some(slot) = slots.get_mut(id) {
            slot.medium = Some(medium);
            let chain = fences.chain(id).filter(|chain| chain.goes_on_with(medium));
            let chain = chain.filter(|_| slot.lease.is_none());
            slot.kept = chain.map(|chain| {
                let owner = LeaseOwner::new(chain.vm.clone(), None);
                Kept::from_now(owner, chain, self.keep_at_most)
            });
        }
    }

    /// Leases of the device go on within the host: its workers leave it as it is.
    pub(crate) fn set_runs_on(&self, id: &DeviceId) {
        if let Some(slot) = self.lock().slots.get_mut(id) {
            slot.runs_on = true;
        }
    }

    /// Whether a lease of the device can go on by this transport.
    pub(crate) fn can_go_on(&self, id: &DeviceId, transport: Transport) -> bool {
        let records = self.lock();
        let slot = records.slots.get(id);
        slot.is_some_and(|slot| slot.goes_on(transport).is_some())
    }

    /// Grants a lease that goes on by `transport`, with its chain.
    pub(crate) fn grant_medium<'a>(
        &'a self,
        id: &'a DeviceId,
        (owner, transport): (&LeaseOwner, Transport),
        fence: Option<HeldFence>,
        going: Going,
    ) -> Result<(Grant<'a>, GrantedChain), RemoteError> {
        let vm = owner.vm();
        let mut records = self.lock();
        let Records { slots, fences } = &mut *records;
        let slot = slots.get_mut(id).ok_or_else(|| unknown(id))?;
        let medium = slot.goes_on(transport).ok_or_else(no_medium)?;
        // First: what does not go on is given up, rather than asked for again.
        if let Some(secret) = going.resumes {
            Chain::check(fences.chain(id), vm, secret, medium)
                .map_err(|why| chains::ended(id, vm, &why))?;
        }
        slot.check_issued(id, fence)?;
        fences.check(id, vm, fence)?;
        slot.availability.check(id)?;
        if let (Some(held), true) = (&mut slot.lease, going.resumes.is_some()) {
            let generation = held.generation;
            // Once: nobody waits for an answer before asking again, so the queue would fill.
            if !held.superseded {
                slot.queue.post(DeviceRequest::Supersede { generation })?;
                held.superseded = true;
            }
            return Err(RemoteError {
                kind: ErrorKind::Busy,
                message: format!(
                    "device {id}: the lease that was cut is being ended (generation {generation}); ask again"
                ),
            });
        }
        if let Some(holder) = slot.holder() {
            return Err(holder.refusal(id));
        }
        slot.check_kept(id, vm)?;
        // A lease that resumes is its owner's by the secret.
        if going.resumes.is_none() {
            records.check_others(id, owner)?;
        }
        let chain = match (going.resumes, records.fences.chain(id)) {
            (Some(_), Some(chain)) => chain.clone(),
            _ => Chain::start(vm, medium, going.keep).map_err(internal)?,
        };
        let granted = GrantedChain {
            secret: chain.secret,
            goes_on: going.resumes.is_some(),
        };
        // Whoever resumes it with the secret: its memory is mapped as that of its owner.
        let slot = records.slots.get(id);
        let kept = slot.and_then(|slot| Some(slot.kept.as_ref()?.owner.clone()));
        let former = kept.filter(|it| granted.goes_on && it.verified().is_ok());
        let owner = former.as_ref().unwrap_or(owner);
        let grant = Grant::begin(records, id, owner, Some(chain), granted.goes_on)?;
        Ok((grant, granted))
    }

    /// The borrower for which a device was kept after the lease `generation` has gone: any VM may borrow it.
    pub(crate) fn left(&self, id: &DeviceId, generation: Generation) {
        let mut records = self.lock();
        let Records { slots, fences } = &mut *records;
        let slot = slots.get_mut(id);
        let kept = slot.filter(|slot| slot.lease.is_none() && slot.generation == generation);
        if kept.is_some_and(|slot| slot.kept.take().is_some()) {
            end_chain(fences, id);
        }
    }

    /// Ends the chain of a device, whose lease goes on until its connection is cut.
    pub(crate) fn end_chain(&self, id: &DeviceId) {
        end_chain(&mut self.lock().fences, id);
    }
}

#[cfg(test)]
mod tests;
