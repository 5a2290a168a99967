//! What the next backend needs to go on with a device, in [files](farside_keeper) that outlive this process.
//!
//! The snapshot is that of the client's view after its last answered request. A request that is held when the process is
//! killed is processed again, from its beginning. What the lease needs is written by the borrow's thread, when it changes.

mod saved;

use std::{
    fmt, io,
    ops::{Deref, DerefMut},
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    sync::{Arc, Mutex, PoisonError},
};

use farside_error_chain::Chain;
use farside_irq_relay::SetIrqs;
use farside_keeper::{DeviceFile, Journal, Kept, Snapshots, Words};
use farside_lender_protocol::{Client, Secret};
use farside_vfio_user::Connection;

use crate::{borrow::Setup, dma_table::DmaTable};
pub(crate) use saved::{Saved, SavedDescription};

/// What a backend has from its keeper, and from the process before, if that was killed. Clones share it.
#[derive(Clone, Default)]
pub struct Past {
    kept: Kept,
    devices: Arc<Mutex<Vec<Start>>>,
}

impl Past {
    /// Claims what the process before has left, and closes its other descriptors. Call it before this process starts
    /// another one, which would have a share in those.
    pub fn new(kept: Kept) -> Self {
        let mut devices = Vec::new();
        for (place, file) in kept.files() {
            match Start::left(place, file, &kept) {
                Ok(start) => devices.extend(start),
                Err(error) => {
                    log::error!("a device of the process before is lost: {}", Chain(&error));
                    kept.forget(place);
                }
            }
        }
        kept.close_others();
        let devices = Arc::new(Mutex::new(devices));
        Self { kept, devices }
    }

    /// See [`Kept::deliver_signals`].
    ///
    /// # Errors
    ///
    /// Those of it.
    pub fn deliver_signals(&self) -> io::Result<()> {
        self.kept.deliver_signals()
    }

    /// Whether a VM has devices of the process before.
    pub fn goes_on(&self) -> bool {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        !devices.is_empty()
    }

    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }

    /// The devices that were left: once.
    pub(crate) fn take(&self) -> Vec<Start> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *devices)
    }
}

impl fmt::Debug for Past {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Past")
    }
}

/// What a device begins with.
pub(crate) struct Start {
    pub(crate) records: Records,
    pub(crate) log: Words,
    pub(crate) lease: (LeaseRecord, LeftLease),
    pub(crate) left: Option<Left>,
}

/// A device that the process before has left, with its client.
pub(crate) struct Left {
    pub(crate) saved: Saved,
    pub(crate) memory: DmaTable,
    pub(crate) irqs: Vec<SetIrqs>,
    pub(crate) bars: Vec<OwnedFd>,
    pub(crate) state: Option<OwnedFd>,
    pub(crate) connection: Connection,
}

impl Start {
    /// A device without a past.
    pub(crate) fn fresh(kept: &Kept) -> io::Result<Self> {
        let file = DeviceFile::new()?;
        let place = kept.register(&file);
        let snapshots = file.snapshots(&file.journal()?)?;
        // The lender may not have noticed yet that the process before has ended.
        let left = match kept.restarts() {
            Some(1..) => LeftLease::None(Vec::new()),
            _ => LeftLease::Fresh,
        };
        Ok(Self {
            log: file.log()?,
            lease: (LeaseRecord::new(file.lease()?), left),
            records: Records::new(file, place, snapshots, kept.clone()),
            left: None,
        })
    }

    /// The device in `file`, whose descriptors it claims. `None` if it has no client.
    pub(crate) fn left(place: usize, file: DeviceFile, kept: &Kept) -> io::Result<Option<Self>> {
        let lost = |what: &str| io::Error::other(format!("{what} cannot be taken over"));
        let journal = file.journal()?;
        let snapshots = file.snapshots(&journal)?;
        let lease = LeaseRecord::new(file.lease()?);
        let log = file.log()?;
        // From here on it is forgotten, unless all of it is there.
        let records = |file, snapshots| Records::new(file, Some(place), snapshots, kept.clone());
        if journal.client().is_none() {
            drop(records(file, snapshots));
            return Ok(None);
        }
        let saved: Saved = farside_hand_over::decode(snapshots.inherited())
            .map_err(|error| lost(&format!("the state of a device ({error})")))?;
        let counts = farside_lender_protocol::irq_counts(&saved.described.description)
            .map_err(io::Error::other)?;
        let memory = saved.claim_memory(kept);
        let irqs = saved.claim_irqs(&counts, kept);
        let files = saved.claim_files(kept);
        let left_lease = lease.claim(kept);
        let connection = Connection::take_over(journal, kept);
        let device = &saved.device;
        let (bars, state) = files.ok_or_else(|| lost(&format!("memory of device {device}")))?;
        let left = Left {
            memory: memory.ok_or_else(|| lost(&format!("guest memory of device {device}")))?,
            irqs: irqs.ok_or_else(|| lost(&format!("interrupts of device {device}")))?,
            connection: connection
                .ok_or_else(|| lost(&format!("the client of device {device}")))?,
            saved,
            bars,
            state,
        };
        Ok(Some(Self {
            records: records(file, snapshots),
            log,
            lease: (lease, left_lease),
            left: Some(left),
        }))
    }
}

/// The records of a device while it is served.
pub(crate) struct Records {
    file: DeviceFile,
    /// Where the next backend finds the file.
    place: Option<usize>,
    kept: Kept,
    snapshots: Snapshots,
    /// The state has changed since the last snapshot.
    pub(crate) is_dirty: bool,
    leaves_nothing: bool,
    /// What the descriptors in the snapshots belong to, the current one's first: they stay open.
    holds: [Option<Setup>; 2],
}

impl Records {
    pub(crate) fn new(
        file: DeviceFile,
        place: Option<usize>,
        snapshots: Snapshots,
        kept: Kept,
    ) -> Self {
        Self {
            file,
            place,
            kept,
            snapshots,
            is_dirty: false,
            leaves_nothing: false,
            holds: [None, None],
        }
    }

    /// The journal for the next client.
    pub(crate) fn journal(&self) -> io::Result<Journal> {
        self.file.journal()
    }

    /// See [`DeviceFile::turn`].
    pub(crate) fn turn(&self) -> u8 {
        self.file.turn()
    }

    /// Whether there will be a next backend.
    pub(crate) fn are_kept(&self) -> bool {
        self.place.is_some()
    }

    /// The current snapshot is that of the process before. `setup` has the descriptors in it.
    pub(crate) fn took_over(&mut self, setup: Setup) {
        self.holds[0] = Some(setup);
    }

    /// The client has gone, and with it what the snapshots are of.
    pub(crate) fn client_gone(&mut self) {
        self.holds = [None, None];
    }

    /// Has the snapshot become current with the next answer, or the next client. `setup` has the descriptors in it.
    pub(crate) fn stage(&mut self, saved: &Saved, setup: Setup) -> io::Result<()> {
        let bytes = postcard::to_stdvec(saved).map_err(io::Error::other)?;
        self.holds.swap(0, 1);
        self.holds[0] = Some(setup);
        self.is_dirty = false;
        self.leaves_nothing = false;
        self.snapshots.stage(&bytes)
    }

    /// Has the next backend find no state. Returns false if it is so already.
    pub(crate) fn leave_nothing(&mut self) -> bool {
        self.is_dirty = false;
        let is_new = !std::mem::replace(&mut self.leaves_nothing, true);
        if is_new {
            // No state fits.
            let _ = self.snapshots.stage(&[]);
        }
        is_new
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.kept.forget(place);
        }
    }
}

/// Words of the lease: what there is, the chain, then the connections and 1.
const STATUS: usize = 0;
const CHAIN: usize = 1;
const CONNECTIONS: std::ops::Range<usize> = 8..8 + MOST_CONNECTIONS;

/// Most connections that a lease may be of: one for each process that was killed while it asked for it.
const MOST_CONNECTIONS: usize = 128;

const NONE: u64 = 0;
const ENDS: u64 = 1;
const GOES_ON: u64 = 2;

/// The lease, for the next backend. Written by the borrow's thread. Clones share it.
#[derive(Clone)]
pub(crate) struct LeaseRecord(Arc<Words>);

/// A lease of the process before.
pub(crate) enum LeftLease {
    /// There was no process before.
    Fresh,
    /// It had none, but for what is being returned over these connections.
    None(Vec<LeftConnection>),
    /// It ended with its process.
    Ended(Vec<LeftConnection>),
    GoesOn {
        /// The connections that it may be of: while they are open, the lender keeps the device.
        connections: Vec<LeftConnection>,
        chain: Secret,
    },
}

/// A connection that is [recorded](Recorded) here.
pub(crate) struct LeftConnection {
    slot: usize,
    socket: OwnedFd,
}

impl LeaseRecord {
    pub(crate) fn new(words: Words) -> Self {
        Self(Arc::new(words))
    }

    /// Claims what the process before has left.
    pub(crate) fn claim(&self, kept: &Kept) -> LeftLease {
        let mut connections = Vec::new();
        for slot in CONNECTIONS {
            let Some(fd) = self.0.get(slot).checked_sub(1) else {
                continue;
            };
            // It stays recorded: this process may be killed, too.
            match kept.claim(fd as RawFd) {
                Some(socket) => connections.push(LeftConnection { slot, socket }),
                None => self.0.set(slot, 0),
            }
        }
        match self.0.get(STATUS) {
            NONE => LeftLease::None(connections),
            GOES_ON => {
                let [high, low] = [0, 1].map(|n| u128::from(self.0.get(CHAIN + n)));
                LeftLease::GoesOn {
                    connections,
                    chain: Secret::from_bits(high << 64 | low),
                }
            }
            _ => LeftLease::Ended(connections),
        }
    }

    /// There is no lease.
    pub(crate) fn clear(&self) {
        self.0.set(STATUS, NONE);
    }

    /// There is a lease, of one of the [recorded](Recorded) connections.
    pub(crate) fn set(&self, chain: Option<Secret>) {
        if let Some(chain) = chain {
            let bits = chain.bits();
            self.0.set(CHAIN, (bits >> 64) as u64);
            self.0.set(CHAIN + 1, bits as u64);
        }
        self.0.set(STATUS, chain.map_or(ENDS, |_| GOES_ON));
    }
}

/// A connection that the next backend finds, until it is closed.
pub(crate) struct Recorded {
    client: Client,
    record: LeaseRecord,
    /// `None` if there are too many.
    slot: Option<usize>,
}

impl Recorded {
    pub(crate) fn new(client: Client, record: &LeaseRecord) -> Self {
        let words = &record.0;
        let slot = CONNECTIONS.into_iter().find(|slot| words.get(*slot) == 0);
        if let Some(slot) = slot {
            words.set(slot, client.as_fd().as_raw_fd() as u64 + 1);
        }
        Self {
            client,
            record: record.clone(),
            slot,
        }
    }

    /// One of the process before.
    pub(crate) fn left(
        left: LeftConnection,
        record: &LeaseRecord,
        client: impl FnOnce(OwnedFd) -> Client,
    ) -> Self {
        Self {
            client: client(left.socket),
            record: record.clone(),
            slot: Some(left.slot),
        }
    }
}

impl Deref for Recorded {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl DerefMut for Recorded {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // Before it is closed: the number is reused.
        if let Some(slot) = self.slot {
            self.record.0.set(slot, 0);
        }
    }
}

#[cfg(test)]
mod tests;
