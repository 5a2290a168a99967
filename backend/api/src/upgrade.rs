//! The document that `farside upgrade --check --json` prints.

use std::path::PathBuf;

use farside_daemon::{DeviceId, VmName};
use serde::{Deserialize, Serialize};

/// The number of the format. It grows when a key goes or changes its type or meaning; new keys leave it as it is.
pub const FORMAT: u32 = 1;

/// What goes on with another farside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradeCheck {
    /// [`FORMAT`].
    pub format: u32,
    /// The farside that has checked this: the one that is installed.
    pub farside: String,
    /// Whether all that runs goes on.
    pub goes_on: bool,
    /// What it reads.
    pub reads: Reads,
    /// The lenders of this host.
    pub lenders: Vec<LenderCheck>,
    /// The VMs of this host whose backends run.
    pub vms: Vec<VmCheck>,
}

/// The versions that a farside reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reads {
    /// Leases that a former lender has left.
    pub leases: Versions,
    /// State of NVMe models.
    pub state: Versions,
    /// Records of a former backend.
    pub records: Versions,
    /// The lender protocol, of which it speaks one version.
    pub protocol: u32,
}

/// Versions of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// The first that is read.
    pub oldest: u32,
    /// The last, which is written.
    pub newest: u32,
}

/// Why something does not go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Obstacle {
    /// What cannot be read.
    pub what: String,
    /// The remedy.
    pub remedy: String,
}

/// A lender of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderCheck {
    /// Its socket.
    pub socket: PathBuf,
    /// The farside of what keeps its leases, if known.
    pub farside: Option<String>,
    /// The version of its leases' keeper. `None`: it has none, as there was no lease.
    pub version: Option<u32>,
    /// What is wrong with the keeper, or with asking it.
    pub obstacle: Option<Obstacle>,
    /// Its leases, if they are known.
    pub leases: Vec<LeaseCheck>,
}

/// A lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseCheck {
    /// The device.
    pub device: DeviceId,
    /// The VM that has it.
    pub vm: VmName,
    /// The version of its record.
    pub version: u32,
    /// The version of its worker's messages.
    pub worker_version: u32,
    /// The version of the state that its worker writes, of an NVMe model.
    pub state_version: Option<u32>,
    /// Why the lease does not go on.
    pub obstacle: Option<Obstacle>,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmCheck {
    /// The VM.
    pub vm: VmName,
    /// The farside of its backend, if known. The backend goes on as that one, also if it is killed.
    pub farside: Option<String>,
    /// The version of the backend's records; `None` without a keeper.
    pub records_version: Option<u32>,
    /// The version of the lender protocol that the backend speaks, if known.
    pub protocol_version: Option<u32>,
    /// Its devices.
    pub devices: Vec<DeviceCheck>,
}

/// A device of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceCheck {
    /// The device.
    pub device: DeviceId,
    /// The version of its state, if it has one.
    pub state_version: Option<u32>,
    /// Why the VM would lose it.
    pub obstacle: Option<Obstacle>,
}

impl UpgradeCheck {
    /// A document in this format.
    pub fn new(farside: &str, reads: Reads, lenders: Vec<LenderCheck>, vms: Vec<VmCheck>) -> Self {
        let lender = |it: &LenderCheck| {
            it.obstacle.is_none() && it.leases.iter().all(|lease| lease.obstacle.is_none())
        };
        let vm = |it: &VmCheck| it.devices.iter().all(|device| device.obstacle.is_none());
        Self {
            format: FORMAT,
            farside: farside.to_owned(),
            goes_on: lenders.iter().all(lender) && vms.iter().all(vm),
            reads,
            lenders,
            vms,
        }
    }
}
