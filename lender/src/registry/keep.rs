//! Leases of media that go on over another connection: see [`crate::chains`].

use std::time::{Duration, Instant};

use farside_daemon::{DeviceId, VmName};
use farside_devices::nvme::ImageId;
use farside_error_chain::Chain as Causes;
use farside_lender_protocol::{ErrorKind, HeldFence, KeptFor, RemoteError, Secret};

use super::{DeviceRequest, Grant, Held, Records, Registry, Slot, unknown};
use crate::{
    chains::{self, Chain, Kept},
    fences::FenceBook,
    refusals::{internal, no_medium},
};

/// Longest time for which a device is kept, unless the configuration sets another.
pub(crate) const DEFAULT_KEEP_AT_MOST: Duration = Duration::from_secs(600);

/// A borrow of a medium.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Going {
    /// Time for which the device is kept after a cut.
    pub(crate) keep: Duration,
    /// The chain of the lease that this one goes on with.
    pub(crate) resumes: Option<Secret>,
}

impl Slot {
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
    /// Ends the chain of a device without a lease. Returns whether it was kept.
    pub(super) fn end_kept(&mut self, id: &DeviceId) -> Result<bool, RemoteError> {
        let Self { slots, fences } = self;
        let slot = slots.get_mut(id).ok_or_else(|| unknown(id))?;
        if slot.lease.is_some() {
            return Ok(false);
        }
        let was_kept = slot.kept().is_some();
        fences.set_chain(id, None)?;
        slot.kept = None;
        Ok(was_kept)
    }
}

/// Ends a device's chain. If the file cannot be written, a later lease writes it, or is refused.
pub(super) fn end_chain(fences: &mut FenceBook, id: &DeviceId) {
    if let Err(error) = fences.set_chain(id, None) {
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

    /// Sets the medium of a device that can be lent over the network. A lease of an earlier run may go
    /// on.
    pub(crate) fn set_medium(&self, id: &DeviceId, medium: ImageId) {
        let mut records = self.lock();
        let Records { slots, fences } = &mut *records;
        if let Some(slot) = slots.get_mut(id) {
            slot.medium = Some(medium);
            let chain = fences.chain(id).filter(|chain| chain.goes_on_with(medium));
            slot.kept = chain.map(|chain| Kept::from_now(chain, self.keep_at_most));
        }
    }

    /// Grants a lease of a device's medium, with its chain.
    pub(crate) fn grant_medium<'a>(
        &'a self,
        id: &'a DeviceId,
        vm: &VmName,
        fence: Option<HeldFence>,
        going: Going,
    ) -> Result<(Grant<'a>, Secret), RemoteError> {
        let mut records = self.lock();
        let Records { slots, fences } = &mut *records;
        let slot = slots.get_mut(id).ok_or_else(|| unknown(id))?;
        let medium = slot.medium.ok_or_else(no_medium)?;
        // First: what does not go on is given up, rather than asked for again.
        if let Some(secret) = going.resumes {
            Chain::check(fences.chain(id), vm, secret, medium)
                .map_err(|why| chains::ended(id, vm, &why))?;
        }
        slot.check_issued(id, fence)?;
        fences.check(id, vm, fence)?;
        slot.availability.check(id)?;
        if let (Some(held), true) = (&slot.lease, going.resumes.is_some()) {
            let generation = held.generation;
            slot.queue.post(DeviceRequest::Supersede { generation })?;
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
        let chain = match (going.resumes, fences.chain(id)) {
            (Some(_), Some(chain)) => chain.clone(),
            _ => Chain::start(vm, medium, going.keep).map_err(internal)?,
        };
        let secret = chain.secret;
        fences.set_chain(id, Some(chain))?;
        slot.kept = None;
        slot.generation = slot.next(id)?;
        fences.borrowed(id, vm);
        slot.lease = Some(Held {
            vm: vm.to_owned(),
            generation: slot.generation,
            since: Instant::now(),
        });
        let generation = slot.generation;
        let grant = Grant {
            id,
            generation,
            records,
        };
        Ok((grant, secret))
    }

    /// Ends the chain of a device, whose lease goes on until its connection is cut.
    pub(crate) fn end_chain(&self, id: &DeviceId) {
        end_chain(&mut self.lock().fences, id);
    }
}

#[cfg(test)]
mod tests;
