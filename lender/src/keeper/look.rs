//! The versions of the leases that a keeper has.

use std::{io, os::unix::fs::MetadataExt, path::Path};

use farside_daemon::{DeviceId, VmName, peer_credentials};
use farside_devices::state;
use farside_hand_over::Unreadable;
use farside_lender_protocol::{Address, Channel, MAX_DEVICES};
use serde::Deserialize;

use super::{AsFd, FromKeeper, Hello, KEEPER, LEASES, TIMEOUT, TakeError, ToKeeper, fs, path};

/// Version 1 has no keys for versions.
fn first() -> u32 {
    1
}

/// The keys of a lease's record that all versions have.
#[derive(Debug, Deserialize)]
struct Head {
    #[serde(default = "first")]
    version: u32,
    #[serde(default)]
    farside: Option<String>,
    device: DeviceId,
    vm: VmName,
    #[serde(default = "first")]
    worker: u32,
    #[serde(default)]
    state: Option<u32>,
    /// Of version 1, whose keys are beside these.
    #[serde(default)]
    served: Option<serde_json::Value>,
}

/// The versions of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseFormat {
    /// The device.
    pub device: DeviceId,
    /// The VM that has it.
    pub vm: VmName,
    /// Of its record.
    pub version: u32,
    /// Of its worker's messages.
    pub worker: u32,
    /// Of the state of the model that its worker writes.
    pub state: Option<u32>,
    /// The farside that has written the record, since version 2.
    pub farside: Option<String>,
}

impl LeaseFormat {
    /// Of a record. `None` if it is none.
    fn of(lease: &[u8]) -> Option<Self> {
        let head: Head = serde_json::from_slice(lease).ok()?;
        let is_nvme = |served: &serde_json::Value| served.pointer("/Model/Nvme").is_some();
        let state = head.served.as_ref().filter(|it| is_nvme(it)).map(|_| 1);
        Some(Self {
            device: head.device,
            vm: head.vm,
            version: head.version,
            worker: head.worker,
            state: head.state.or(state),
            farside: head.farside,
        })
    }

    /// Whether this farside goes on with the lease.
    ///
    /// # Errors
    /// What it cannot read.
    pub fn check(&self) -> Result<(), Unreadable> {
        let farside = self.farside.as_deref();
        LEASES.check(self.version, farside)?;
        // Of a worker that is too old the version of farside is not known: another one has written the record since.
        LEASES.check(self.worker, None)?;
        match self.state {
            Some(state) => state::FORMAT.check(state, farside),
            None => Ok(()),
        }
    }
}

/// Refuses a lease of a version that is not read. Bytes that are no lease are not looked at here.
pub(super) fn check(lease: &[u8]) -> Result<(), TakeError> {
    let Some(lease) = LeaseFormat::of(lease) else {
        return Ok(());
    };
    lease.check().map_err(|why| TakeError::Unreadable {
        what: format!("device {} (VM {}): ", lease.device, lease.vm),
        why,
    })
}

/// What a keeper has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptLeases {
    /// Of the keeper's messages.
    pub version: u32,
    /// The keeper's version of farside, since version 2.
    pub farside: Option<String>,
    /// The leases. `None`: this keeper does not show them.
    pub leases: Option<Vec<LeaseFormat>>,
}

impl KeptLeases {
    /// Whether a lender of this farside can ask the keeper.
    ///
    /// # Errors
    /// What it cannot read.
    pub fn check(&self) -> Result<(), Unreadable> {
        KEEPER.check(self.version, self.farside.as_deref())
    }
}

/// Asks the keeper of the lender that listens at `socket` for the versions of its leases, and changes nothing. `None`:
/// there is no keeper, as there was no lease. The lender's user and root may.
///
/// # Errors
/// [`TakeError::Foreign`], also if this user may not.
pub fn look(socket: &Path) -> Result<Option<KeptLeases>, TakeError> {
    let path = path(socket);
    let foreign = |source| TakeError::Foreign {
        path: path.clone(),
        source,
    };
    let Some(directory) = path.parent() else {
        return Ok(None);
    };
    let owner = match fs::symlink_metadata(directory) {
        Ok(directory) if directory.is_dir() && directory.mode() & 0o077 == 0 => directory.uid(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(foreign(Some(error.into()))),
        Ok(_) => return Err(foreign(None)),
    };
    let address = Address::Unix(path.clone());
    let mut channel = match Channel::connect(&address, Path::new(""), TIMEOUT) {
        Ok(channel) => channel.appendable(),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(foreign(Some(error.into()))),
    };
    if !peer_credentials(&channel.as_fd()).is_ok_and(|peer| peer.uid == owner) {
        return Err(foreign(None));
    }
    let received = channel.receive::<Hello>(TIMEOUT);
    let (hello, _) = received.map_err(|error| foreign(Some(error)))?;
    let mut kept = KeptLeases {
        version: hello.version,
        farside: Some(hello.farside).filter(|farside| !farside.is_empty()),
        leases: None,
    };
    // Earlier ones show nothing; to later ones this is said as they have it.
    if hello.version < 2 {
        return Ok(Some(kept));
    }
    let sent = channel.send(&ToKeeper::Look, &[], TIMEOUT);
    sent.map_err(|error| foreign(Some(error)))?;
    let mut leases = Vec::new();
    loop {
        let received = channel.receive::<FromKeeper>(TIMEOUT);
        match received.map_err(|error| foreign(Some(error)))?.0 {
            FromKeeper::Lease { lease, .. } if leases.len() < 2 * MAX_DEVICES => {
                leases.extend(LeaseFormat::of(&lease));
            }
            _ => break,
        }
    }
    kept.leases = Some(leases);
    Ok(Some(kept))
}
