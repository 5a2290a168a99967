//! The operations that a migration needs from a host, one trait for each concern.
//!
//! | trait | used by |
//! | --- | --- |
//! | [`Store`] | everyone: the journal is read and written there |
//! | [`Runner`] | [`crate::Mover`], [`crate::Arrival`], [`crate::Plan`] |
//! | [`LiveRunner`] | the steps of a live migration |
//! | [`Lenders`] | [`crate::Plan`], handovers, [`crate::claim`] |
//! | [`HostFacts`] | checks before a migration |
//!
//! [`crate::LocalHost`] implements them for the host of this process. Tests implement
//! them for a host in memory, where the process can end at every call. No method
//! has a default that passes a check: each implementation states what it checks.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use farside_daemon::{DeviceId, VmName};
use farside_lender_protocol::{Address, Fence, Fences, Generation, HeldFence, Secret};
use serde::{Deserialize, Serialize};

use crate::{
    Error, Identity, Journal, Reply, Request, Result,
    check::Facts,
    live::{Guest, Report},
};

/// A VM's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Configuration {
    /// The text of its configuration file (TOML).
    pub toml: String,
    /// For a VM of libvirt, the XML of its domain.
    pub domain: Option<String>,
    /// libvirt starts the domain with its host.
    #[serde(default)]
    pub autostart: bool,
}

/// A host's record of a VM that moved away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedMarker {
    /// The host that it moved to.
    pub to: String,
    /// The migration's id.
    pub migration: String,
}

/// Run state of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunState {
    /// It does not run.
    Stopped,
    /// It runs, and can be shut down.
    Running,
    /// Neither stopped nor able to shut down, such as paused or saved: the reason and
    /// the remedy.
    Other(String),
}

/// A device of a VM, as its lender describes it to this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDevice {
    /// Its id.
    pub id: DeviceId,
    /// The number of its port.
    pub port: u16,
    /// The lender's address.
    pub lender: Address,
    /// The name that the lender gives itself.
    pub lender_name: String,
    /// The device's description.
    pub identity: Identity,
    /// Its holder: VM and generation.
    pub holder: Option<(VmName, Generation)>,
    /// The VMs that moved with it.
    pub fences: Vec<Fence>,
}

/// What a host keeps on disk of its VMs. A change is durable when the call returns, and
/// idempotent.
pub trait Store {
    /// The journal of the VM's last migration.
    fn journal(&self, vm: &VmName) -> Result<Option<Journal>>;

    /// Replaces the journal.
    fn write_journal(&self, journal: &Journal) -> Result<()>;

    /// The VM's configuration on this host.
    fn configuration(&self, vm: &VmName) -> Result<Option<Configuration>>;

    /// Adds the VM's configuration.
    fn install(&self, vm: &VmName, configuration: &Configuration) -> Result<()>;

    /// Removes the VM's configuration.
    fn uninstall(&self, vm: &VmName) -> Result<()>;

    /// The VM's fences.
    fn fences(&self, vm: &VmName) -> Result<Fences>;

    /// Replaces the VM's fences; empty ones are removed.
    fn write_fences(&self, vm: &VmName, fences: &Fences) -> Result<()>;

    /// The host that the VM moved to.
    fn moved_marker(&self, vm: &VmName) -> Result<Option<MovedMarker>>;

    /// Replaces or removes that.
    fn write_moved_marker(&self, vm: &VmName, marker: Option<&MovedMarker>) -> Result<()>;
}

/// Runs VMs of this host.
pub trait Runner {
    /// The VM's run state.
    fn run_state(&self, vm: &VmName) -> Result<RunState>;

    /// Boots the VM from its configuration, unless it runs.
    fn start(&self, vm: &VmName) -> Result<()>;

    /// Shuts the guest down, and ends the VM's backend. If the guest does not power off
    /// within `limit`, this fails and the VM runs on.
    fn stop(&self, vm: &VmName, limit: Duration) -> Result<()>;
}

/// Moves running guests; see [`crate::live`].
pub trait LiveRunner {
    /// Hot-unplugs the guest's borrowed devices, each within `limit`.
    fn release_devices(&self, vm: &VmName, limit: Duration) -> Result<()>;

    /// Starts a QEMU that waits for a guest at this address. Returns its port.
    fn incoming(&self, vm: &VmName, address: IpAddr) -> Result<u16>;

    /// Sends the guest to that QEMU. After a failure the guest still runs here.
    fn send(&self, vm: &VmName, to: SocketAddr) -> Result<Report>;

    /// Where the guest is that [`LiveRunner::send`] was to send. Waits for a transfer in
    /// progress, or cancels it first.
    fn query_transfer(&self, vm: &VmName, cancel: bool) -> Result<Guest>;

    /// At the host that the guest leaves: resumes it, or boots it if it died with its
    /// QEMU, and plugs its devices in.
    fn resume_here(&self, vm: &VmName) -> Result<()>;

    /// At the host that the guest goes to: resumes it if it was received completely, and
    /// plugs its devices in.
    fn resume_received(&self, vm: &VmName) -> Result<()>;

    /// Ends a QEMU whose guest is paused, if there is one. Fails if the guest runs.
    fn end_paused(&self, vm: &VmName) -> Result<()>;
}

/// The lenders of a VM, as this host reaches them.
pub trait Lenders {
    /// Looks up each of the VM's devices at the lenders of its configuration.
    fn find_each(
        &self,
        vm: &VmName,
        configuration: &Configuration,
    ) -> Result<Vec<Result<FoundDevice>>>;

    /// Looks up all of the VM's devices.
    fn find_all(&self, vm: &VmName, configuration: &Configuration) -> Result<Vec<FoundDevice>> {
        self.find_each(vm, configuration)?.into_iter().collect()
    }

    /// Refuses a device whose lender cannot map all RAM of the VM, as far as that lender can
    /// determine.
    fn check_windows(
        &self,
        vm: &VmName,
        configuration: &Configuration,
        device: &FoundDevice,
    ) -> Result<()>;

    /// Requests a handover from a lender; see [`farside_lender_protocol::Request::Handover`].
    fn hand_over(
        &self,
        lender: &Address,
        device: &DeviceId,
        vm: &VmName,
        migration: &str,
        supersedes: Option<HeldFence>,
        secret: Secret,
    ) -> Result<Generation>;
}

/// Facts about this host that decide whether a VM may leave it or move to it.
pub trait HostFacts {
    /// The host's name, for messages.
    fn name(&self) -> String;

    /// Refuses a VM of which a part would stay behind on this host, or to be moved while it runs if it is `live`, one whose guest
    /// cannot release its devices.
    fn check_movable(&self, vm: &VmName, configuration: &Configuration, live: bool) -> Result<()>;

    /// Refuses a VM whose name something other than farside uses on this host.
    fn check_name_free(&self, vm: &VmName, configuration: &Configuration) -> Result<()>;

    /// The files and binaries that the configuration names and this host lacks, as errors.
    fn missing(&self, vm: &VmName, configuration: &Configuration) -> Result<Vec<Error>>;

    /// What the VM runs with on this host; or would, unless it `runs`.
    fn facts(&self, vm: &VmName, configuration: &Configuration, runs: bool) -> Result<Facts>;
}

/// A whole host, for users that need every part of it. It has no methods of its own.
pub trait Host: Store + Runner + LiveRunner + Lenders + HostFacts {}

impl<T: Store + Runner + LiveRunner + Lenders + HostFacts> Host for T {}

/// The other host.
pub trait Peer {
    /// Sends a request, and waits for the reply.
    fn ask(&mut self, request: Request) -> Result<Reply>;
}
