//! What a borrower knows.

use std::{
    collections::BTreeMap,
    fmt,
    path::PathBuf,
    time::{Duration, Instant},
};

use farside_daemon::DeviceId;
use farside_error_chain::Chain;
use farside_lender_protocol::Address;
use serde::{Deserialize, Serialize};

use crate::{
    EtcdConfig, EtcdError,
    cache::Cache,
    etcd::{Etcd, chain},
    mdns,
    record::{Keys, Record, shown},
};

/// Maximum number of lenders that are taken from etcd, from the file that remembers them, and from mDNS,
/// each.
pub const MAX_KNOWN: usize = 100;

/// Maximum number of devices that are read from etcd.
const MAX_DEVICES: usize = 8192;

/// Time limit for etcd's answer.
const ETCD: Duration = Duration::from_secs(5);

/// Interval at which a watch reads all again, whatever it has seen.
const WATCH: Duration = Duration::from_secs(30);

/// Pause of a watch that etcd does not answer.
const RETRY: Duration = Duration::from_secs(2);

/// How a host finds lenders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Discovery {
    /// In this cluster.
    pub etcd: Option<EtcdConfig>,
    /// On the LAN.
    pub mdns: bool,
    /// The directory with this host's certificates.
    pub pki: PathBuf,
    /// The file that remembers the lenders that etcd has named.
    pub cache: PathBuf,
}

/// Lenders that were found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Those that announce themselves, or did when etcd answered last.
    pub now: Vec<Address>,
    /// Those that etcd named in the last week and does not name now: they may have ended, or etcd and they
    /// do not reach each other. To be asked for a device that no other lender has.
    pub before: Vec<Address>,
}

impl Discovery {
    /// The lenders that are found. Takes some seconds at most. What fails is logged.
    pub fn lenders(&self) -> Known {
        let mut known = match &self.etcd {
            Some(config) => self.in_etcd(config),
            None => Known::default(),
        };
        if self.mdns {
            match mdns::browse() {
                Ok(found) => {
                    let fresh = found.into_iter().filter(|at| !known.now.contains(at));
                    let fresh: Vec<_> = fresh.collect();
                    known.now.extend(fresh);
                }
                Err(error) => log::warn!("{}", Chain(&error)),
            }
        }
        known.before.retain(|former| !known.now.contains(former));
        known
    }

    fn in_etcd(&self, config: &EtcdConfig) -> Known {
        let mut cache = Cache::read(&self.cache);
        match self.ask(config) {
            Ok(answer) => cache.update(&answer.lenders()),
            Err(error) => log::warn!("{}: asking the lenders that it named last", chain(&error)),
        }
        Known {
            now: cache.current(),
            before: cache.former(),
        }
    }

    fn ask(&self, config: &EtcdConfig) -> Result<Answer, EtcdError> {
        let etcd = Etcd::new(config, &self.pki)?;
        read(&etcd, &Keys::new(&config.prefix), Instant::now() + ETCD)
    }

    /// Whether etcd answers: `None` if none is configured.
    pub fn check(&self) -> Option<Result<(), EtcdError>> {
        let config = self.etcd.as_ref()?;
        Some(self.ask(config).map(drop))
    }

    /// The changes from now on of what lenders announce in etcd; `None` if none is configured.
    ///
    /// # Errors
    /// The certificates for etcd cannot be read.
    pub fn watch(&self) -> Result<Option<Watch>, EtcdError> {
        let Some(config) = &self.etcd else {
            return Ok(None);
        };
        Ok(Some(Watch {
            etcd: Etcd::new(config, &self.pki)?,
            keys: Keys::new(&config.prefix),
            last: None,
            answers: true,
        }))
    }
}

/// What etcd has.
struct Answer {
    revision: i64,
    devices: BTreeMap<DeviceId, Record>,
}

impl Answer {
    /// Each lender once.
    fn lenders(&self) -> Vec<Address> {
        let mut lenders: Vec<Address> = Vec::new();
        for record in self.devices.values() {
            if lenders.contains(&record.address) {
                continue;
            }
            if lenders.len() >= MAX_KNOWN {
                log::warn!(
                    "more than {MAX_KNOWN} lenders are announced in etcd: the others are not asked"
                );
                break;
            }
            lenders.push(record.address.clone());
        }
        lenders
    }
}

fn read(etcd: &Etcd, keys: &Keys, deadline: Instant) -> Result<Answer, EtcdError> {
    let range = etcd.range(keys.prefix(), MAX_DEVICES, deadline)?;
    if range.more || range.kvs.len() > MAX_DEVICES {
        log::warn!(
            "etcd has more than {MAX_DEVICES} devices below {}: the others are not seen",
            keys.prefix()
        );
    }
    let mut devices = BTreeMap::new();
    let mut foreign = Vec::new();
    for kv in range.kvs.into_iter().take(MAX_DEVICES) {
        match (keys.device(&kv.key.0), Record::parse(&kv.value.0)) {
            (Some(device), Some(record)) => {
                devices.insert(device, record);
            }
            _ => foreign.push(kv),
        }
    }
    if let Some(first) = foreign.first() {
        log::warn!(
            "etcd has {} keys below {} that no lender of this version has written, such as {} with {}: ignoring them",
            foreign.len(),
            keys.prefix(),
            shown(&first.key.0),
            shown(&first.value.0)
        );
    }
    Ok(Answer {
        revision: range.revision,
        devices,
    })
}

/// A change of what lenders announce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A lender announces a device.
    Announced {
        /// Its id.
        device: DeviceId,
        /// The lender, in words.
        by: String,
    },
    /// A device is not announced any more.
    Gone {
        /// Its id.
        device: DeviceId,
        /// The lender that announced it, in words.
        by: String,
    },
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Announced { device, by } => write!(f, "{device}: announced by {by}"),
            Self::Gone { device, by } => write!(f, "{device}: no longer announced by {by}"),
        }
    }
}

/// The changes of what lenders announce.
#[derive(Debug)]
pub struct Watch {
    etcd: Etcd,
    keys: Keys,
    /// What etcd had.
    last: Option<(i64, BTreeMap<DeviceId, Record>)>,
    answers: bool,
}

impl Watch {
    /// Waits for the next changes; first for all that is announced. None may be lost: what a watch misses
    /// while etcd does not answer is a change when it does. Logs when it stops answering and when it does
    /// again.
    pub fn wait(&mut self) -> Vec<Change> {
        loop {
            match self.poll() {
                Ok(changes) => {
                    if !std::mem::replace(&mut self.answers, true) {
                        log::warn!("etcd answers again");
                    }
                    if !changes.is_empty() {
                        return changes;
                    }
                }
                Err(error) => {
                    if std::mem::replace(&mut self.answers, false) {
                        log::warn!("{}", chain(&error));
                    }
                    std::thread::sleep(RETRY);
                }
            }
        }
    }

    fn poll(&mut self) -> Result<Vec<Change>, EtcdError> {
        if let Some((revision, _)) = &self.last
            && self.answers
        {
            self.etcd
                .wait_change(self.keys.prefix(), *revision, WATCH)?;
        }
        let answer = read(&self.etcd, &self.keys, Instant::now() + ETCD)?;
        let empty = BTreeMap::new();
        let before = self.last.as_ref().map_or(&empty, |(_, devices)| devices);
        let changes = changes(before, &answer.devices);
        self.last = Some((answer.revision, answer.devices));
        Ok(changes)
    }
}

fn changes(before: &BTreeMap<DeviceId, Record>, after: &BTreeMap<DeviceId, Record>) -> Vec<Change> {
    let mut changes = Vec::new();
    for (device, record) in before {
        if after.get(device).is_none_or(|now| !now.is_of(record)) {
            changes.push(Change::Gone {
                device: device.clone(),
                by: record.to_string(),
            });
        }
    }
    for (device, record) in after {
        if before.get(device).is_none_or(|was| !was.is_of(record)) {
            changes.push(Change::Announced {
                device: device.clone(),
                by: record.to_string(),
            });
        }
    }
    changes
}

#[cfg(test)]
mod tests;
