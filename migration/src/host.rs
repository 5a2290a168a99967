//! All that a migration does to a host, and asks of it.
//!
//! [`crate::LocalHost`] is the host that this process runs on. Tests have one of their
//! own, in which the process can end at every call.

use std::{net::IpAddr, time::Duration};

use farside_lender_protocol::{Address, Epoch, Fence, Fences};
use serde::{Deserialize, Serialize};

use crate::{
    Error, Identity, Journal, Reply, Request, Result,
    check::Facts,
    live::{Guest, Report},
};

/// What describes a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The text of its description (TOML).
    pub toml: String,
    /// Where libvirt runs it, the XML of its domain.
    pub domain: Option<String>,
    /// libvirt starts the domain with its host.
    #[serde(default)]
    pub autostart: bool,
}

/// What a host keeps of a VM that moved away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// The host that it moved to.
    pub to: String,
    /// The migration's id.
    pub migration: String,
}

/// What a VM does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunState {
    /// It does not run.
    Stopped,
    /// It runs, and can be asked to power off.
    Running,
    /// It can be neither taken for stopped nor asked to power off: paused, saved,
    /// and the like; why, and what to do.
    Other(String),
}

/// A device of a VM, as its lender describes it to this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDevice {
    /// Its id.
    pub id: String,
    /// The number of its port.
    pub port: u16,
    /// Where the lender is.
    pub lender: Address,
    /// What the lender calls itself.
    pub lender_name: String,
    /// What the device is.
    pub identity: Identity,
    /// Who has it: VM and epoch.
    pub holder: Option<(String, Epoch)>,
    /// The VMs that moved with it.
    pub fences: Vec<Fence>,
}

/// A host. What changes it lasts when the call returns, and may be done again: a
/// change that is there already is no error.
pub trait Host {
    /// Its name, for people.
    fn name(&self) -> String;

    /// The journal of the VM's last migration.
    fn journal(&self, vm: &str) -> Result<Option<Journal>>;

    /// Puts the journal in the place of what was there.
    fn write_journal(&self, journal: &Journal) -> Result<()>;

    /// What describes the VM on this host.
    fn description(&self, vm: &str) -> Result<Option<Description>>;

    /// Describes the VM.
    fn install(&self, vm: &str, description: &Description) -> Result<()>;

    /// Takes the VM's description away.
    fn uninstall(&self, vm: &str) -> Result<()>;

    /// The VM's fences.
    fn fences(&self, vm: &str) -> Result<Fences>;

    /// Replaces the VM's fences; empty ones are removed.
    fn write_fences(&self, vm: &str, fences: &Fences) -> Result<()>;

    /// Where the VM moved to.
    fn tombstone(&self, vm: &str) -> Result<Option<Tombstone>>;

    /// Replaces that.
    fn write_tombstone(&self, vm: &str, tombstone: Option<&Tombstone>) -> Result<()>;

    /// What the VM does.
    fn run_state(&self, vm: &str) -> Result<RunState>;

    /// Starts the VM from its description, if it does not run.
    fn start(&self, vm: &str) -> Result<()>;

    /// Has the guest power off, and ends the VM's backend. When this fails for
    /// want of time, the VM goes on.
    fn stop(&self, vm: &str, limit: Duration) -> Result<()>;

    /// Looks the VM's devices up at the lenders of its description, from here.
    fn devices(&self, vm: &str, description: &Description) -> Result<Vec<FoundDevice>>;

    /// The same, each by itself.
    fn each_device(&self, vm: &str, description: &Description) -> Result<Vec<Result<FoundDevice>>> {
        Ok(self.devices(vm, description)?.into_iter().map(Ok).collect())
    }

    /// Refuses a VM of which a part would stay behind on this host.
    fn moves_whole(&self, vm: &str, description: &Description) -> Result<()> {
        let _ = (vm, description);
        Ok(())
    }

    /// Refuses where something that is not farside's has the VM's name on this host.
    fn is_free(&self, vm: &str, description: &Description) -> Result<()> {
        let _ = (vm, description);
        Ok(())
    }

    /// What the description names and this host does not have: programs, files.
    fn missing(&self, vm: &str, description: &Description) -> Result<Vec<Error>>;

    /// Whether a device reaches the RAM of a VM of this description on this host, as far
    /// as its lender can tell.
    fn reaches(&self, vm: &str, description: &Description, device: &FoundDevice) -> Result<()>;

    /// What the VM runs by on this host; or would, unless it `runs`.
    fn facts(&self, vm: &str, description: &Description, runs: bool) -> Result<Facts>;

    /// Where the guest is that was to be sent by [`Host::send`]. A transfer that is
    /// under way is waited for, or called off first.
    fn whereabouts(&self, vm: &str, call_off: bool) -> Result<Guest> {
        let _ = call_off;
        Err(not_live(vm))
    }

    /// Has the VM's QEMU wait for a guest at this address. Returns where, as QEMU
    /// takes it.
    fn listen(&self, vm: &str, address: IpAddr) -> Result<String> {
        let _ = address;
        Err(not_live(vm))
    }

    /// Has the VM's QEMU send its guest there. When this fails, it runs on here.
    fn send(&self, vm: &str, uri: &str) -> Result<Report> {
        let _ = uri;
        Err(not_live(vm))
    }

    /// Asks a lender for a handover; see [`farside_lender_protocol::Request::Handover`].
    fn hand_over(
        &self,
        lender: &Address,
        device: &str,
        vm: &str,
        migration: &str,
        supersedes: Option<Epoch>,
    ) -> Result<Epoch>;
}

fn not_live(vm: &str) -> Error {
    Error::refused(format!("VM {vm} cannot be moved live by this host"))
}

/// The other host.
pub trait Peer {
    /// Asks it something, and waits for the answer.
    fn ask(&mut self, request: Request) -> Result<Reply>;
}
