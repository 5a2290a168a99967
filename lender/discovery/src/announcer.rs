//! A lender's device ids in etcd.
//!
//! A thread holds a lease, to which the key of each device belongs: the keys end [`TTL`] after the lender
//! has. A key is created only if it is absent, so an id is another lender's or ours, and never both.
//! Without etcd the lender lends on, and announces its devices anew when etcd is back.

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, LenderName};
use farside_lender_protocol::{Address, Instance};

use crate::{
    EtcdConfig, EtcdError,
    etcd::{Etcd, KeyValue, chain},
    record::{Keys, Record, shown},
};

/// Time after which etcd drops the keys of a lender that has ended.
const TTL: Duration = Duration::from_secs(15);

/// Interval at which the lease is extended.
const INTERVAL: Duration = Duration::from_secs(5);

/// As [`INTERVAL`], while etcd does not answer.
const RETRY: Duration = Duration::from_secs(2);

/// Time limit of all calls of one round. A round that it ends goes on with the next.
const ROUND: Duration = Duration::from_secs(8);

/// Time limit for the first round: a lender starts without etcd, too.
const FIRST_ROUND: Duration = Duration::from_secs(6);

/// Time limit for announcing a device that an operator adds.
const ADD: Duration = Duration::from_secs(2);

/// Time limit for the last call, of the 5 s in which a lender ends.
const LAST: Duration = Duration::from_secs(1);

/// Devices whose keys are checked in one call.
const CHECKED: usize = 100;

/// Attempts to write a key that changes meanwhile.
const ATTEMPTS: usize = 3;

/// What is announced, and where.
#[derive(Clone, Debug)]
pub struct Announcing {
    /// The cluster.
    pub etcd: EtcdConfig,
    /// The directory with this host's certificates.
    pub pki: PathBuf,
    /// The lender's name.
    pub lender: LenderName,
    /// Where other hosts reach it: a `tls:` address.
    pub address: Address,
    /// Its run.
    pub instance: Instance,
}

/// An error that prevents a lender from announcing a device.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum AnnounceError {
    /// A device is another lender's.
    #[error("{0}")]
    Taken(String),
    /// The configuration cannot be used.
    #[error("cannot announce devices in etcd")]
    Etcd(#[from] EtcdError),
    /// No thread.
    #[error("cannot announce devices in etcd")]
    System(#[from] io::Error),
}

/// Is called when a device's problem with its id begins, with the text, and when it ends.
pub type Report = Box<dyn Fn(&DeviceId, Option<String>) + Send>;

enum Order {
    Add(DeviceId, mpsc::SyncSender<Result<(), String>>),
    Remove(DeviceId),
}

/// Announces devices until it is dropped.
#[derive(Debug)]
pub struct Announcer {
    /// None once it ends.
    orders: Option<mpsc::Sender<Order>>,
    /// Disconnected when the thread has ended.
    ended: mpsc::Receiver<()>,
}

impl Announcer {
    /// Announces `devices`, and goes on doing so in a thread. Starts without etcd, too, after 6 s.
    ///
    /// # Errors
    /// A device is another lender's, the certificates for etcd cannot be read, or there is no thread. Then
    /// nothing is announced.
    pub fn start(
        announcing: &Announcing,
        devices: Vec<DeviceId>,
        report: Report,
    ) -> Result<Self, AnnounceError> {
        let mut worker = Worker::new(announcing, devices, report)?;
        worker.round(FIRST_ROUND);
        if let Some(conflict) = worker.conflict() {
            worker.leave();
            return Err(AnnounceError::Taken(conflict));
        }
        let (orders, received) = mpsc::channel();
        let (sender, ended) = mpsc::channel();
        thread::Builder::new()
            .name("announcer".into())
            .spawn(move || {
                worker.run(&received);
                drop(sender);
            })?;
        Ok(Self {
            orders: Some(orders),
            ended,
        })
    }

    /// Announces one device more. Without etcd, that is done later.
    ///
    /// # Errors
    /// The device is another lender's, in words.
    pub fn add(&self, device: &DeviceId) -> Result<(), String> {
        let (reply, answer) = mpsc::sync_channel(1);
        let sent = self
            .orders
            .as_ref()
            .map(|orders| orders.send(Order::Add(device.clone(), reply)));
        match sent {
            // The thread is in a call that etcd does not answer: it announces the device after that.
            Some(Ok(())) => answer.recv_timeout(ADD).unwrap_or(Ok(())),
            Some(Err(_)) | None => Ok(()),
        }
    }

    /// Withdraws a device.
    pub fn remove(&self, device: &DeviceId) {
        if let Some(orders) = &self.orders {
            // Fails if the thread has ended.
            let _ = orders.send(Order::Remove(device.clone()));
        }
    }
}

impl Drop for Announcer {
    fn drop(&mut self) {
        drop(self.orders.take());
        // The keys of a thread that etcd holds up end with the lease.
        let _ = self.ended.recv_timeout(LAST * 3 / 2);
    }
}

/// The key of a device.
#[derive(Debug, Default)]
struct Key {
    /// It is ours, under the present lease, as far as known.
    is_ours: bool,
    /// It was ours in this run.
    was_ours: bool,
    /// Why it is not.
    conflict: Option<String>,
}

struct Worker {
    etcd: Etcd,
    keys: Keys,
    own: Record,
    lease: Option<i64>,
    devices: BTreeMap<DeviceId, Key>,
    /// Whether etcd answered the last round; None before the first.
    answers: Option<bool>,
    report: Report,
}

impl Worker {
    fn new(
        announcing: &Announcing,
        devices: Vec<DeviceId>,
        report: Report,
    ) -> Result<Self, EtcdError> {
        Ok(Self {
            etcd: Etcd::new(&announcing.etcd, &announcing.pki)?,
            keys: Keys::new(&announcing.etcd.prefix),
            own: Record::new(
                announcing.lender.clone(),
                announcing.address.clone(),
                announcing.instance,
            ),
            lease: None,
            devices: devices.into_iter().map(|id| (id, Key::default())).collect(),
            answers: None,
            report,
        })
    }

    fn run(&mut self, orders: &mpsc::Receiver<Order>) {
        let mut next = Instant::now() + INTERVAL;
        loop {
            match orders.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Order::Add(device, reply)) => {
                    // The requester may have gone.
                    let _ = reply.send(self.add(device));
                }
                Ok(Order::Remove(device)) => self.remove(&device),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    self.round(ROUND);
                    let pause = match self.answers {
                        Some(true) => INTERVAL,
                        _ => RETRY,
                    };
                    next = Instant::now() + pause;
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return self.leave(),
            }
        }
    }

    fn add(&mut self, device: DeviceId) -> Result<(), String> {
        self.devices.insert(device.clone(), Key::default());
        let (Some(true), Some(lease)) = (self.answers, self.lease) else {
            return Ok(());
        };
        match self.announce(&device, lease, Instant::now() + ADD) {
            Ok(()) => {}
            // The next round reports it.
            Err(error) => log::debug!("device {device}: {}", chain(&error)),
        }
        let conflict = self
            .devices
            .get(&device)
            .and_then(|key| key.conflict.clone());
        match conflict {
            Some(conflict) => {
                self.devices.remove(&device);
                Err(conflict)
            }
            None => Ok(()),
        }
    }

    fn remove(&mut self, device: &DeviceId) {
        let Some(key) = self.devices.remove(device) else {
            return;
        };
        if let (true, Some(lease)) = (key.was_ours, self.lease) {
            let key = self.keys.key(device);
            let deleted = self.etcd.delete(&key, lease, Instant::now() + ADD);
            if let Err(error) = deleted {
                // A key that we no longer write, and the lease that we extend: they go together.
                log::warn!("device {device} stays announced: {}", chain(&error));
                self.lease = None;
            }
        }
    }

    /// Extends the lease, and announces what is not. Logs when etcd stops answering, and when it does
    /// again.
    fn round(&mut self, limit: Duration) {
        let tried = self.try_round(Instant::now() + limit);
        match (&tried, self.answers) {
            (Err(error), None | Some(true)) => log::warn!(
                "{}: devices are lent on, and announced again when it answers",
                chain(error)
            ),
            (Err(_), Some(false)) => {}
            (Ok(()), Some(false)) => log::info!("etcd answers again"),
            (Ok(()), None | Some(true)) => {}
        }
        if let Err(EtcdError::Refused { .. }) = tried {
            // Such as that there is no such lease.
            self.lease = None;
        }
        self.answers = Some(tried.is_ok());
    }

    fn try_round(&mut self, deadline: Instant) -> Result<(), EtcdError> {
        if let Some(lease) = self.lease
            && !self.etcd.keep_alive(lease, deadline)?
        {
            log::warn!("the lease in etcd has ended: announcing all devices anew");
            self.lease = None;
        }
        let lease = match self.lease {
            Some(lease) => lease,
            None => {
                let lease = self.etcd.grant(TTL, deadline)?;
                for key in self.devices.values_mut() {
                    key.is_ours = false;
                }
                *self.lease.insert(lease)
            }
        };
        self.check(lease, deadline)?;
        let missing: Vec<_> = self
            .devices
            .iter()
            .filter(|(_, key)| !key.is_ours)
            .map(|(id, _)| id.clone())
            .collect();
        for device in missing {
            self.announce(&device, lease, deadline)?;
        }
        Ok(())
    }

    /// Notices keys that others have deleted or written.
    fn check(&mut self, lease: i64, deadline: Instant) -> Result<(), EtcdError> {
        let ours: Vec<_> = self
            .devices
            .iter()
            .filter(|(_, key)| key.is_ours)
            .map(|(id, _)| id.clone())
            .collect();
        for some in ours.chunks(CHECKED) {
            let keys: Vec<_> = some.iter().map(|id| self.keys.key(id)).collect();
            if !self.etcd.all_belong_to(&keys, lease, deadline)? {
                for device in some {
                    if let Some(key) = self.devices.get_mut(device) {
                        key.is_ours = false;
                    }
                }
            }
        }
        Ok(())
    }

    /// Announces one device, or records the conflict.
    fn announce(
        &mut self,
        device: &DeviceId,
        lease: i64,
        deadline: Instant,
    ) -> Result<(), EtcdError> {
        let Some(was_ours) = self.devices.get(device).map(|key| key.was_ours) else {
            return Ok(());
        };
        let key = self.keys.key(device);
        let value = self.own.to_value();
        let mut conflict = Some(format!(
            "device {device}: its key in etcd, {key}, changes all the time"
        ));
        for _ in 0..ATTEMPTS {
            let present = match self.etcd.create(&key, &value, lease, deadline)? {
                Ok(()) => {
                    conflict = None;
                    break;
                }
                // It has just gone.
                Err(None) => continue,
                Err(Some(present)) => present,
            };
            if let Some(taken) = self.taken(device, &key, &present, was_ours) {
                conflict = Some(taken);
                break;
            }
            // Of this lender: of an earlier run, or of an earlier lease.
            let is_done = present.lease.0 == lease
                && Record::parse(&present.value.0).as_ref() == Some(&self.own);
            let revision = present.mod_revision.0;
            if is_done || self.etcd.replace(&key, revision, &value, lease, deadline)? {
                conflict = None;
                break;
            }
        }
        self.set(device, conflict);
        Ok(())
    }

    /// Why a key with a value cannot be ours.
    fn taken(
        &self,
        device: &DeviceId,
        key: &str,
        present: &KeyValue,
        was_ours: bool,
    ) -> Option<String> {
        let Some(record) = Record::parse(&present.value.0) else {
            return Some(format!(
                "device {device}: etcd has something else than a lender at {key}: {}; delete that key, or set another `prefix` in host.toml",
                shown(&present.value.0)
            ));
        };
        if record.instance == self.own.instance {
            return None;
        }
        match record.is_of(&self.own) {
            false => Some(format!(
                "device {device} is announced in etcd by {record}: a device id belongs to one device of the cluster, so rename one of the two, or stop that lender ({} s after a lender was killed, its ids are free)",
                TTL.as_secs()
            )),
            // Our successor has started, or another lender under our name.
            true if was_ours => Some(format!(
                "device {device} is announced in etcd by another run of {record}, while this one runs: give each lender its own `name` and address"
            )),
            true => None,
        }
    }

    /// Records whether a device's id is ours. Logs changes.
    fn set(&mut self, device: &DeviceId, conflict: Option<String>) {
        let Some(key) = self.devices.get_mut(device) else {
            return;
        };
        key.is_ours = conflict.is_none();
        key.was_ours |= key.is_ours;
        if key.conflict == conflict {
            return;
        }
        match &conflict {
            Some(conflict) => log::error!("{conflict}"),
            None => log::info!("device {device} is announced in etcd again"),
        }
        key.conflict.clone_from(&conflict);
        (self.report)(device, conflict);
    }

    /// The first device that is another lender's.
    fn conflict(&self) -> Option<String> {
        self.devices.values().find_map(|key| key.conflict.clone())
    }

    /// Ends the lease, and with it the keys.
    fn leave(&mut self) {
        if let Some(lease) = self.lease.take()
            && let Err(error) = self.etcd.revoke(lease, Instant::now() + LAST)
        {
            log::info!(
                "devices stay announced for {TTL:?} at most: {}",
                chain(&error)
            );
        }
    }
}

#[cfg(test)]
mod tests;
