//! Device ids and leases: the authoritative record.

mod grant;
mod keep;
mod revoke;
mod sizes;
mod viewer;

use std::{
    collections::BTreeMap,
    convert::Infallible,
    ops::Bound,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, Wakeup};
use farside_devices::block::ImageId;
use farside_lender_protocol::{
    Availability, BorrowedBy, Channel, Described, DeviceEntry, ErrorKind, Generation, HeldFence,
    Instance, MAX_DEVICES, RamRange, RemoteError, Revocation, Secret, Transport,
};

use serde::{Deserialize, Serialize};

use crate::{
    access::Access,
    chains::Kept,
    fences::{Claim, FenceBook},
    lease_owner::LeaseOwner,
    refusals::{failed, invalid, limit},
    source::{Report, Resized},
    tokens::RegisterTokens,
};
pub(crate) use grant::Grant;
use keep::end_chain;
pub(crate) use keep::{DEFAULT_KEEP_AT_MOST, Going, GrantedChain};
pub(crate) use sizes::Shared;
pub(crate) use viewer::Viewer;

/// A message to a device's thread.
pub(crate) enum DeviceRequest {
    /// Serve this borrower.
    Lease(Lease),
    /// Report the device's state.
    Report(mpsc::SyncSender<Report>),
    /// Check whether a guest with this RAM could borrow the device.
    Check {
        /// The guest's owner, if known.
        owner: Option<LeaseOwner>,
        transport: Transport,
        ram: Vec<RamRange>,
        reply: mpsc::SyncSender<Result<(), RemoteError>>,
    },
    /// End a lease that is older than `fence`, and flush the device's writes; then answer.
    HandOver {
        fence: Generation,
        reply: mpsc::SyncSender<Result<(), RemoteError>>,
    },
    /// Ask the borrower of the lease `generation` to release the device, and end that lease at
    /// `until`.
    Revoke {
        generation: Generation,
        until: Instant,
    },
    /// Take the size of the medium, see [`Available::take_size`](crate::source::Available::take_size), and have the borrower
    /// notified.
    TakeSize(mpsc::SyncSender<Result<Resized, RemoteError>>),
    /// To a worker: see [`Available::resize`](crate::source::Available::resize).
    Resize {
        to: u64,
        reply: mpsc::SyncSender<Result<(), RemoteError>>,
    },
    /// The borrower of this lease of a medium goes on over another connection: end the lease.
    Supersede { generation: Generation },
    /// The VM for which the device was kept has lost it: stop its DMA. The sender is dropped then.
    LetGo(mpsc::SyncSender<Infallible>),
    /// Close the device and end the thread. The sender is dropped when the device is closed.
    End(mpsc::SyncSender<Infallible>),
}

/// A borrow that the registry has granted.
pub(crate) struct Lease {
    /// The borrower's connection.
    pub(crate) connection: Channel,
    /// Whose it is.
    pub(crate) owner: LeaseOwner,
    /// The fencing token.
    pub(crate) generation: Generation,
    /// The transport of the device's DMA path.
    pub(crate) transport: Transport,
    /// Files behind the BARs with sparse mmap areas.
    pub(crate) bar_memory: Vec<std::os::fd::OwnedFd>,
    /// The file of the state that outlives the device's process, within the host.
    pub(crate) state: Option<std::os::fd::OwnedFd>,
    /// The lease's chain, if it may go on.
    pub(crate) chain: Option<GrantedChain>,
}

/// Maximum number of queued messages for a device thread: one lease, and requests of peers that
/// each wait for the answer. Bounds memory while a stuck medium blocks the thread.
pub(crate) const MAX_REQUESTS: usize = 64;

/// The request queue of a device thread.
#[derive(Debug)]
pub(crate) struct RequestQueue {
    sender: mpsc::SyncSender<DeviceRequest>,
    wake: Wakeup,
}

impl RequestQueue {
    pub(crate) fn new(sender: mpsc::SyncSender<DeviceRequest>, wake: Wakeup) -> Self {
        Self { sender, wake }
    }

    /// Fails if the thread is gone or its queue is full.
    pub(crate) fn post(&self, request: DeviceRequest) -> Result<(), RemoteError> {
        self.sender.try_send(request).map_err(|error| match error {
            mpsc::TrySendError::Full(_) => limit(format_args!(
                "the device's thread is held up: {MAX_REQUESTS} messages wait for it"
            )),
            mpsc::TrySendError::Disconnected(_) => {
                failed("the device's thread has stopped; see the lender's log")
            }
        })?;
        self.wake.raise();
        Ok(())
    }

    /// Ends the thread. Fails if its queue is full.
    fn end(&self, ended: mpsc::SyncSender<Infallible>) -> Result<(), RemoteError> {
        match self.post(DeviceRequest::End(ended)) {
            Err(error) if error.kind == ErrorKind::Limit => Err(error),
            // It has ended already.
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

struct Slot {
    summary: String,
    source: &'static str,
    described: Arc<Described>,
    /// Its expansion ROM, if it has one.
    rom: Arc<[u8]>,
    queue: Arc<RequestQueue>,
    access: Arc<Access>,
    /// The last issued generation.
    generation: Generation,
    lease: Option<Held>,
    /// The owner of the last lease.
    last: Option<LeaseOwner>,
    /// The device's problem, if any.
    problem: Option<String>,
    /// Why its id is not announced.
    conflict: Option<String>,
    availability: Availability,
    /// The last revocation since it was available.
    revoked: Revocation,
    /// The medium, if it can be told from others.
    medium: Option<ImageId>,
    /// The namespace, if it is shared.
    shared: Option<Shared>,
    /// It goes on as it runs when its worker is gone.
    runs_on: bool,
    /// Its IOMMU group, if others of it are lent, too.
    group: Option<Arc<Group>>,
    /// The connection of its last lease was cut, or its process has ended.
    kept: Option<Kept>,
}

/// The source of functions of this host.
pub(crate) const FUNCTION: &str = "vfio";

/// Functions that share an IOMMU group, and so a VM.
#[derive(Debug)]
pub(crate) struct Group {
    /// Its number.
    pub(crate) number: u32,
    /// Those that are lent.
    pub(crate) devices: Vec<DeviceId>,
}

/// The record of a lease.
struct Held {
    owner: LeaseOwner,
    generation: Generation,
    since: Instant,
    /// Its VM goes on over another connection: the device's thread has been asked to end it.
    superseded: bool,
}

impl Slot {
    fn holder(&self) -> Option<BorrowedBy> {
        self.lease.as_ref().map(|held| BorrowedBy {
            vm: held.owner.vm().clone(),
            generation: held.generation,
            seconds: held.since.elapsed().as_secs(),
        })
    }

    /// Refuses a generation that this lender has not issued yet: recorded as a fence, it would lock
    /// the device's VMs out.
    fn check_issued(&self, id: &DeviceId, shown: Option<HeldFence>) -> Result<(), RemoteError> {
        match shown.map(|shown| shown.generation) {
            Some(shown) if shown > self.generation => Err(RemoteError {
                kind: ErrorKind::Fenced,
                message: format!(
                    "device {id}: this lender has not issued generation {shown}: its last one is {}",
                    self.generation
                ),
            }),
            _ => Ok(()),
        }
    }

    /// The generation after the last one.
    fn next(&self, id: &DeviceId) -> Result<Generation, RemoteError> {
        let next = self.generation.0.checked_add(1).map(Generation);
        next.ok_or_else(|| RemoteError {
            kind: ErrorKind::Internal,
            message: format!(
                "device {id}: no generation is left after {}, which the lender's state file names: correct it there",
                self.generation
            ),
        })
    }
}

/// How a lease has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Release {
    /// For good, and as the end of a revocation, if one is pending, like this.
    Over(Revocation),
    /// The connection was cut: the lease may go on over another.
    Cut,
}

/// The mutable state of the registry.
#[derive(Default)]
struct Records {
    slots: BTreeMap<DeviceId, Slot>,
    fences: FenceBook,
}

/// The registry of a lender's devices.
pub(crate) struct Registry {
    records: Mutex<Records>,
    /// A revoked lease has ended.
    revoked: Condvar,
    tokens: Arc<RegisterTokens>,
    keep_at_most: Duration,
    instance: Instance,
}

impl Registry {
    /// Creates an empty registry.
    pub(crate) fn new(fences: FenceBook) -> Self {
        Self {
            records: Mutex::new(Records {
                fences,
                ..Records::default()
            }),
            revoked: Condvar::new(),
            tokens: Arc::default(),
            keep_at_most: DEFAULT_KEEP_AT_MOST,
            // As the standard library's maps, which fail for want of random numbers in the same way.
            instance: Instance::random().expect("the system has random numbers"),
        }
    }

    /// This run of the lender.
    pub(crate) fn instance(&self) -> Instance {
        self.instance
    }

    /// Adds a device. The generations of its leases are larger than `generation`. Fails if there is
    /// one of that id, or no room.
    pub(crate) fn add(
        &self,
        id: &DeviceId,
        source: &'static str,
        described: Described,
        queue: RequestQueue,
        access: Access,
        generation: Generation,
    ) -> Result<(), RemoteError> {
        let mut records = self.lock();
        if records.slots.contains_key(id) {
            return Err(invalid(format!(
                "device {id}: this lender has one of that id; choose another"
            )));
        }
        if records.slots.len() >= MAX_DEVICES {
            return Err(limit(format_args!(
                "device {id}: this lender has {MAX_DEVICES} devices, the maximum; remove one, or start another lender"
            )));
        }
        let generation = generation.max(records.fences.largest(id));
        let slot = Slot {
            summary: described.description.summary.clone(),
            source,
            described: Arc::new(described),
            rom: Arc::default(),
            queue: Arc::new(queue),
            access: Arc::new(access),
            generation,
            lease: None,
            last: None,
            problem: None,
            conflict: None,
            availability: Availability::Available,
            revoked: Revocation::NotLent,
            medium: None,
            shared: None,
            runs_on: false,
            group: None,
            kept: None,
        };
        records.slots.insert(id.to_owned(), slot);
        Ok(())
    }

    /// Removes a device that is not lent, and ends its thread. Its fences stay. Returns a receiver
    /// that is disconnected when the device is closed.
    pub(crate) fn remove(&self, id: &DeviceId) -> Result<mpsc::Receiver<Infallible>, RemoteError> {
        let mut records = self.lock();
        let slot = records.slots.get(id).ok_or_else(|| unknown(id))?;
        if let Some(holder) = &slot.lease {
            return Err(RemoteError {
                kind: ErrorKind::Busy,
                message: format!(
                    "device {id} is lent to VM {}: take it back first with `farside revoke {id}`",
                    holder.owner
                ),
            });
        }
        if let Some(kept) = slot.kept() {
            return Err(kept.refusal(id));
        }
        if slot.group.is_some() {
            return Err(invalid(format!(
                "device {id} shares its IOMMU group with other devices of this lender, which go back to their drivers together: remove all of them from lender.toml and restart the lender"
            )));
        }
        // From now on the medium may be changed unseen.
        let Records { slots, fences } = &mut *records;
        fences.end_chain(id)?;
        let slot = slots.get(id).ok_or_else(|| unknown(id))?;
        let (ended, end) = mpsc::sync_channel(1);
        slot.queue.end(ended)?;
        slots.remove(id);
        Ok(end)
    }

    /// Tokens for leases whose register channel has not connected yet.
    pub(crate) fn tokens(&self) -> &Arc<RegisterTokens> {
        &self.tokens
    }

    /// Records a handover: from now on the VM needs the returned fence to borrow the device. The
    /// device thread answers `reply` when no lease without that fence is left.
    pub(crate) fn hand_over(
        &self,
        claim: &Claim<'_>,
        reply: mpsc::SyncSender<Result<(), RemoteError>>,
    ) -> Result<Generation, RemoteError> {
        let mut records = self.lock();
        let Records { slots, fences } = &mut *records;
        let id = claim.device;
        let slot = slots.get_mut(id).ok_or_else(|| unknown(id))?;
        slot.check_issued(id, claim.supersedes)?;
        let fence = match fences.asked_before(claim)? {
            Some(generation) => generation,
            None => {
                if let Some(holder) = slot.holder()
                    && holder.vm != *claim.vm
                {
                    return Err(holder.refusal(id));
                }
                slot.check_kept(id, claim.vm)?;
                fences.check_proof(claim, slot.lease.is_some() || slot.kept().is_some())?;
                let generation = slot.next(id)?;
                fences.hand_over(claim, generation)?;
                slot.kept = None;
                slot.generation = generation;
                generation
            }
        };
        slot.queue.post(DeviceRequest::HandOver { fence, reply })?;
        Ok(fence)
    }

    /// Ends a device's reservation, so that any VM can borrow it.
    pub(crate) fn end_reservation(
        &self,
        id: &DeviceId,
        secret: Option<Secret>,
        operator: bool,
    ) -> Result<(), RemoteError> {
        let mut records = self.lock();
        if !records.slots.contains_key(id) {
            return Err(unknown(id));
        }
        records.fences.end_reservation(id, secret, operator)
    }

    /// Releases the lease `generation` of a device that does DMA on, which is kept for its VM. Returns false, and has no
    /// effect, if that may not go on: its chain has ended, as by a revocation or a handover.
    pub(crate) fn keep_running(&self, id: &DeviceId, generation: Generation) -> bool {
        let mut records = self.lock();
        let Records { slots, fences } = &mut *records;
        let slot = slots.get_mut(id).filter(|slot| {
            let held = slot.lease.as_ref().map(|held| held.generation);
            held == Some(generation) && slot.availability == Availability::Available
        });
        let (Some(slot), Some(chain)) = (slot, fences.chain(id)) else {
            return false;
        };
        let held = slot.lease.take();
        slot.kept = held.map(|held| Kept::from_now(held.owner, chain, self.keep_at_most));
        true
    }

    /// Releases the lease `generation`, but not a later one.
    pub(crate) fn release(&self, id: &DeviceId, generation: Generation, how: Release) {
        let mut records = self.lock();
        let Records { slots, fences } = &mut *records;
        let Some(slot) = slots.get_mut(id) else {
            return;
        };
        let held = slot.lease.take_if(|held| held.generation == generation);
        let Some(held) = held else {
            return;
        };
        let may_go_on = slot.availability == Availability::Available;
        match fences.chain(id) {
            Some(chain) if how == Release::Cut && may_go_on => {
                slot.kept = Some(Kept::from_now(held.owner, chain, self.keep_at_most));
            }
            _ => end_chain(fences, id),
        }
        if slot.revoked == Revocation::Pending {
            slot.revoked = match how {
                Release::Over(how) => how,
                Release::Cut => Revocation::Released,
            };
            slot.availability = Availability::Unavailable;
            self.revoked.notify_all();
        }
    }

    /// Records a device's problem, as reported by its thread.
    pub(crate) fn set_problem(&self, id: &DeviceId, problem: Option<String>) {
        if let Some(slot) = self.lock().slots.get_mut(id) {
            slot.problem = problem;
        }
    }

    /// Records why a device's id is not announced.
    pub(crate) fn set_conflict(&self, id: &DeviceId, conflict: Option<String>) {
        if let Some(slot) = self.lock().slots.get_mut(id) {
            slot.conflict = conflict;
        }
    }

    /// The number of devices.
    pub(crate) fn count(&self) -> usize {
        self.lock().slots.len()
    }

    pub(crate) fn described(&self, id: &DeviceId) -> Result<Arc<Described>, RemoteError> {
        let records = self.lock();
        let slot = records.slots.get(id).ok_or_else(|| unknown(id))?;
        Ok(Arc::clone(&slot.described))
    }

    /// Sets a device's expansion ROM.
    pub(crate) fn set_rom(&self, id: &DeviceId, rom: Arc<[u8]>) {
        if let Some(slot) = self.lock().slots.get_mut(id) {
            slot.rom = rom;
        }
    }

    /// A device's expansion ROM.
    pub(crate) fn rom(&self, id: &DeviceId) -> Result<Arc<[u8]>, RemoteError> {
        let records = self.lock();
        let slot = records.slots.get(id).ok_or_else(|| unknown(id))?;
        match slot.rom.is_empty() {
            true => Err(invalid(format!(
                "device {id} has no expansion ROM, or it was lent already when this lender started"
            ))),
            false => Ok(Arc::clone(&slot.rom)),
        }
    }

    pub(crate) fn queue(&self, id: &DeviceId) -> Result<Arc<RequestQueue>, RemoteError> {
        let records = self.lock();
        let slot = records.slots.get(id).ok_or_else(|| unknown(id))?;
        Ok(Arc::clone(&slot.queue))
    }

    pub(crate) fn access(&self, id: &DeviceId) -> Result<Arc<Access>, RemoteError> {
        let records = self.lock();
        let slot = records.slots.get(id).ok_or_else(|| unknown(id))?;
        Ok(Arc::clone(&slot.access))
    }

    /// A device's entry, with the fences that `viewer` may see.
    pub(crate) fn entry(
        &self,
        id: &DeviceId,
        viewer: &Viewer<'_>,
    ) -> Result<DeviceEntry, RemoteError> {
        let records = self.lock();
        let slot = records.slots.get(id).ok_or_else(|| unknown(id))?;
        Ok(DeviceEntry {
            fences: viewer.fences(id, slot, &records.fences),
            ..entry(id, slot)
        })
    }

    /// A device's entry, for its borrower.
    pub(crate) fn borrowers_entry(&self, id: &DeviceId) -> Option<DeviceEntry> {
        let records = self.lock();
        Some(entry(id, records.slots.get(id)?))
    }

    /// The entries after the device `after` that `viewer` may see, as many as fit in a reply.
    pub(crate) fn entries(
        &self,
        after: Option<&DeviceId>,
        viewer: &Viewer<'_>,
    ) -> Vec<DeviceEntry> {
        let records = self.lock();
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let slots = records
            .slots
            .range::<DeviceId, _>((start, Bound::Unbounded));
        let visible = slots.filter(|(_, slot)| viewer.sees(slot));
        DeviceEntry::page(visible.map(|(id, slot)| DeviceEntry {
            fences: viewer.fences(id, slot, &records.fences),
            ..entry(id, slot)
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Records> {
        // A panic cannot leave the records inconsistent: each update writes its decisive part
        // first.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn entry(id: &DeviceId, slot: &Slot) -> DeviceEntry {
    DeviceEntry {
        id: id.to_owned(),
        source: slot.source.to_owned(),
        summary: slot.summary.clone(),
        borrowed_by: slot.holder(),
        fences: Vec::new(),
        problem: slot.conflict.clone().or_else(|| slot.problem.clone()),
        availability: slot.availability,
        kept: slot.kept(),
    }
}

fn unknown(id: &DeviceId) -> RemoteError {
    RemoteError {
        kind: ErrorKind::UnknownDevice,
        message: format!(
            "no device {id:?} at this lender; `farside devices` lists what can be borrowed"
        ),
    }
}

#[cfg(test)]
mod tests;
