//! Device ids and leases: the one record of who has what.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    time::Instant,
};

use farside_control::{
    BorrowedBy, Channel, Described, DeviceEntry, DeviceStatus, Epoch, ErrorKind, RamRange,
    RemoteError, Route, Wakeup,
};

use crate::tickets::Tickets;

/// A message to a device's thread.
pub(crate) enum Mail {
    /// Serve this borrower.
    Lease(Lease),
    /// Say how it stands.
    Status(mpsc::SyncSender<DeviceStatus>),
    /// Say whether a guest with this RAM could borrow the device.
    Check {
        route: Route,
        ram: Vec<RamRange>,
        reply: mpsc::SyncSender<Result<(), RemoteError>>,
    },
}

/// A borrow that the registry has granted.
pub(crate) struct Lease {
    /// The borrower's connection.
    pub(crate) connection: Channel,
    /// The borrower's VM.
    pub(crate) vm: String,
    /// Fencing number.
    pub(crate) epoch: Epoch,
    /// How the device reaches the VM.
    pub(crate) route: Route,
    /// Files behind the BARs with mappable areas.
    pub(crate) bar_memory: Vec<std::os::fd::OwnedFd>,
}

/// Most messages that wait for a device's thread: one lease, and questions by
/// peers that each wait for the answer. A thread that is held up by a stuck
/// medium does not make memory grow.
pub(crate) const MAX_MAIL: usize = 64;

/// How to reach a device's thread.
pub(crate) struct Mailbox {
    sender: mpsc::SyncSender<Mail>,
    wake: Wakeup,
}

impl Mailbox {
    pub(crate) fn new(sender: mpsc::SyncSender<Mail>, wake: Wakeup) -> Self {
        Self { sender, wake }
    }

    /// Fails when the thread is gone or does not get to its mail.
    pub(crate) fn post(&self, mail: Mail) -> Result<(), RemoteError> {
        self.sender.try_send(mail).map_err(|error| RemoteError {
            kind: ErrorKind::Internal,
            message: match error {
                mpsc::TrySendError::Full(_) => {
                    format!("the device's thread is held up: {MAX_MAIL} messages wait for it")
                }
                mpsc::TrySendError::Disconnected(_) => {
                    "the device's thread has stopped; see the lender's log".into()
                }
            },
        })?;
        self.wake.raise();
        Ok(())
    }
}

struct Slot {
    summary: String,
    source: &'static str,
    described: Arc<Described>,
    mailbox: Arc<Mailbox>,
    /// The last epoch given out.
    epoch: Epoch,
    lease: Option<(String, Instant)>,
}

impl Slot {
    fn holder(&self) -> Option<BorrowedBy> {
        self.lease.as_ref().map(|(vm, since)| BorrowedBy {
            vm: vm.clone(),
            epoch: self.epoch,
            seconds: since.elapsed().as_secs(),
        })
    }
}

/// All devices of a lender.
#[derive(Default)]
pub(crate) struct Registry {
    slots: Mutex<BTreeMap<String, Slot>>,
    tickets: Arc<Tickets>,
}

impl Registry {
    /// Adds a device. `epoch` is the one before its first lease.
    pub(crate) fn add(
        &self,
        id: &str,
        source: &'static str,
        described: Described,
        mailbox: Mailbox,
        epoch: Epoch,
    ) {
        let slot = Slot {
            summary: described.description.summary.clone(),
            source,
            described: Arc::new(described),
            mailbox: Arc::new(mailbox),
            epoch,
            lease: None,
        };
        self.lock().insert(id.to_owned(), slot);
    }

    /// Those of leases that wait for their register channel.
    pub(crate) fn tickets(&self) -> &Arc<Tickets> {
        &self.tickets
    }

    /// Grants a lease, or says who has it.
    pub(crate) fn borrow_device(
        &self,
        id: &str,
        vm: &str,
    ) -> Result<(Epoch, Arc<Mailbox>), RemoteError> {
        let mut slots = self.lock();
        let slot = slots.get_mut(id).ok_or_else(|| unknown(id))?;
        if let Some(holder) = slot.holder() {
            return Err(holder.refusal(id));
        }
        slot.epoch.0 += 1;
        slot.lease = Some((vm.to_owned(), Instant::now()));
        Ok((slot.epoch, Arc::clone(&slot.mailbox)))
    }

    /// Ends the lease `epoch`; a later one is left alone.
    pub(crate) fn release(&self, id: &str, epoch: Epoch) {
        if let Some(slot) = self.lock().get_mut(id)
            && slot.epoch == epoch
        {
            slot.lease = None;
        }
    }

    pub(crate) fn described(&self, id: &str) -> Result<Arc<Described>, RemoteError> {
        let slots = self.lock();
        let slot = slots.get(id).ok_or_else(|| unknown(id))?;
        Ok(Arc::clone(&slot.described))
    }

    pub(crate) fn mailbox(&self, id: &str) -> Result<Arc<Mailbox>, RemoteError> {
        let slots = self.lock();
        let slot = slots.get(id).ok_or_else(|| unknown(id))?;
        Ok(Arc::clone(&slot.mailbox))
    }

    pub(crate) fn entry(&self, id: &str) -> Option<DeviceEntry> {
        self.lock()
            .get_key_value(id)
            .map(|(id, slot)| entry(id, slot))
    }

    pub(crate) fn entries(&self) -> Vec<DeviceEntry> {
        self.lock()
            .iter()
            .map(|(id, slot)| entry(id, slot))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        // Every change is one assignment: a panic elsewhere leaves it whole.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn entry(id: &str, slot: &Slot) -> DeviceEntry {
    DeviceEntry {
        id: id.to_owned(),
        source: slot.source.to_owned(),
        summary: slot.summary.clone(),
        borrowed_by: slot.holder(),
    }
}

fn unknown(id: &str) -> RemoteError {
    RemoteError {
        kind: ErrorKind::UnknownDevice,
        message: format!(
            "no device {id:?} at this lender; `farside devices` lists what can be borrowed"
        ),
    }
}
