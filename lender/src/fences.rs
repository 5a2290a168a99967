//! Persistent record of the VMs that moved, and of leases that may go on: the [`Fence`] of each VM and
//! device, and the [`Chain`] of each device, in one small file.
//!
//! Safe because of the order: a fence is written to the file before it is sent to a peer, and
//! before the lease of the old host ends.

use std::{collections::BTreeMap, io, path::PathBuf};

use farside_daemon::{DeviceId, RateLimit, VmName, files};
use farside_lender_protocol::{
    ErrorKind, Fence, Generation, HeldFence, MAX_FENCES, RemoteError, Secret,
};
use serde::{Deserialize, Serialize};

use crate::{
    chains::Chain,
    refusals::{internal, invalid},
};

/// The version of the file.
const VERSION: u32 = 3;

/// The former versions: without chains, and with fences without secrets.
const FORMER_VERSIONS: [u32; 2] = [2, 1];

/// Maximum size of the file, in bytes.
const MAX_FILE: u64 = 64 << 20;

/// The fences of all devices, by device id.
#[derive(Debug, Default)]
pub(crate) struct FenceBook {
    devices: BTreeMap<DeviceId, Vec<KeptFence>>,
    chains: BTreeMap<DeviceId, Chain>,
    /// The file; without one, handovers are refused.
    file: Option<PathBuf>,
    /// The file has chains that have ended since, because it could not be written.
    outdated: bool,
    /// Limits the log lines on a failed write, of which each borrow causes one.
    unwritten: RateLimit,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    version: u32,
    devices: BTreeMap<DeviceId, Vec<KeptFence>>,
    #[serde(default)]
    chains: BTreeMap<DeviceId, Chain>,
}

/// A fence and its secret, which no list has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct KeptFence {
    #[serde(flatten)]
    fence: Fence,
    /// None in a file of the former version: only an operator's handover passes this fence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    secret: Option<Secret>,
}

impl KeptFence {
    /// Whether `shown` passes this fence.
    fn is_passed_by(&self, shown: Option<HeldFence>) -> bool {
        shown.is_some_and(|shown| {
            let newest = shown.generation >= self.fence.generation;
            newest && self.secret.is_some() && shown.secret == self.secret
        })
    }
}

/// A tool's handover request.
#[derive(Clone, Copy)]
pub(crate) struct Claim<'a> {
    pub(crate) device: &'a DeviceId,
    pub(crate) vm: &'a VmName,
    pub(crate) migration: &'a str,
    pub(crate) supersedes: Option<HeldFence>,
    pub(crate) secret: Secret,
    /// The tool is an operator's, or of a peer that a rule allows to claim: it needs no proof.
    pub(crate) operator: bool,
}

impl FenceBook {
    /// Reads the file. Fails if it is unreadable, because ignoring it would lose fences.
    pub(crate) fn load(file: Option<PathBuf>) -> io::Result<Self> {
        let (mut devices, mut chains) = (BTreeMap::new(), BTreeMap::new());
        if let Some(path) = &file
            && let Some(bytes) = files::read_bounded(path, MAX_FILE)?
        {
            let bad = |why: String| {
                let text = format!(
                    "{}: {why}; the file records the VMs that were moved to other hosts and may not borrow their devices here: restore it, or remove it if no VM was moved",
                    path.display()
                );
                io::Error::new(io::ErrorKind::InvalidData, text)
            };
            let kept: Kept =
                serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
            if kept.version != VERSION && !FORMER_VERSIONS.contains(&kept.version) {
                return Err(bad(format!("version {}, not {VERSION}", kept.version)));
            }
            (devices, chains) = (kept.devices, kept.chains);
        }
        Ok(Self {
            devices,
            chains,
            file,
            outdated: false,
            unwritten: RateLimit::new(),
        })
    }

    fn kept(&self, device: &DeviceId) -> &[KeptFence] {
        self.devices.get(device).map_or(&[], Vec::as_slice)
    }

    /// The fences of a device that fit in a message: all, unless the file has more than are allowed
    /// now.
    pub(crate) fn newest(&self, device: &DeviceId) -> impl Iterator<Item = &Fence> {
        let fences = self.kept(device);
        let newest = &fences[fences.len().saturating_sub(MAX_FENCES)..];
        newest.iter().map(|kept| &kept.fence)
    }

    /// The largest generation of a device that was ever issued as a fence.
    pub(crate) fn largest(&self, device: &DeviceId) -> Generation {
        let generations = self.kept(device).iter();
        let generations = generations.map(|kept| kept.fence.generation);
        generations.max().unwrap_or_default()
    }

    /// Checks that `vm`, which presents `shown`, may borrow the device.
    pub(crate) fn check(
        &self,
        device: &DeviceId,
        vm: &VmName,
        shown: Option<HeldFence>,
    ) -> Result<(), RemoteError> {
        for kept in self.kept(device) {
            let fence = &kept.fence;
            if fence.vm == *vm && !kept.is_passed_by(shown) {
                return Err(match shown {
                    Some(shown) if shown.generation >= fence.generation => fence.unproven(device),
                    shown => fence.refusal(device, shown.map(|shown| shown.generation)),
                });
            }
            if fence.vm != *vm && fence.reserved {
                return Err(fence.reservation(device));
            }
        }
        Ok(())
    }

    /// Records that `vm` has borrowed the device: ends its reservation. A fence that it presented and
    /// that is not known leaves no trace: it could be made up to lock the VM out.
    pub(crate) fn borrowed(&mut self, device: &DeviceId, vm: &VmName) {
        let mut kept = self.kept(device).iter();
        let reserved = kept.find(|kept| kept.fence.vm == *vm && kept.fence.reserved);
        let Some(mut reserved) = reserved.cloned() else {
            return;
        };
        reserved.fence.reserved = false;
        if let Err(error) = self.put(device, reserved) {
            // At worst the reservation reappears after a restart.
            if let Some(held_back) = self.unwritten.allow() {
                log::warn!("device {device}: {error}{held_back}");
            }
        }
    }

    /// The generation of an earlier handover with the same id, or `None` for a new handover. Neither
    /// is given to a peer without the earlier one's secret.
    pub(crate) fn asked_before(
        &self,
        claim: &Claim<'_>,
    ) -> Result<Option<Generation>, RemoteError> {
        let Claim {
            device,
            vm,
            migration,
            supersedes,
            secret,
            operator,
        } = *claim;
        let supersedes = supersedes.map(|fence| fence.generation);
        for kept in self.kept(device) {
            let fence = &kept.fence;
            if fence.vm == *vm && fence.migration == migration {
                let same = match kept.secret {
                    Some(kept) => kept == secret,
                    None => operator,
                };
                return match same {
                    true => Ok(Some(fence.generation)),
                    false => Err(fence.unproven(device)),
                };
            }
            if fence.vm == *vm && fence.generation > supersedes.unwrap_or_default() {
                return Err(RemoteError {
                    kind: ErrorKind::Fenced,
                    message: format!(
                        "device {device}: VM {vm} was moved by another migration meanwhile ({}, fence {}), which migration {migration} (it knows of {}) does not follow",
                        fence.migration,
                        fence.generation,
                        supersedes.map_or("no fence".to_owned(), |generation| format!(
                            "fence {generation}"
                        )),
                    ),
                });
            }
            if fence.vm != *vm && fence.reserved {
                return Err(fence.reservation(device));
            }
        }
        Ok(None)
    }

    /// Checks that a peer that is no operator may take the device from the VM, which has it if it is
    /// `leased`.
    pub(crate) fn check_proof(&self, claim: &Claim<'_>, leased: bool) -> Result<(), RemoteError> {
        let Claim { device, vm, .. } = *claim;
        let known = self.kept(device).iter().find(|kept| kept.fence.vm == *vm);
        match known {
            _ if claim.operator => Ok(()),
            None if !leased => Ok(()),
            None => Err(RemoteError {
                kind: ErrorKind::Denied,
                message: format!(
                    "device {device} is borrowed by VM {vm}: only root and the lender's user, at its UNIX socket, and peers with the option claim in `borrowers` take it from a VM that runs; stop the VM first"
                ),
            }),
            Some(known) if known.is_passed_by(claim.supersedes) => Ok(()),
            Some(known) => Err(known.fence.unproven(device)),
        }
    }

    /// Records a handover persistently, and with it the end of the device's chain: a repeated request
    /// must not end the chain of the lease that the handover was for.
    pub(crate) fn hand_over(
        &mut self,
        claim: &Claim<'_>,
        generation: Generation,
    ) -> Result<(), RemoteError> {
        if self.file.is_none() {
            return Err(invalid(
                "this lender has nowhere to remember a handover: name a file with `state` in lender.toml".into(),
            ));
        }
        let fence = Fence {
            vm: claim.vm.to_owned(),
            generation,
            migration: claim.migration.to_owned(),
            reserved: true,
        };
        let secret = Some(claim.secret);
        let mut chains = self.chains.clone();
        chains.remove(claim.device);
        self.put_with(claim.device, KeptFence { fence, secret }, chains)
    }

    /// Allows other VMs to borrow the device again, for an operator or who presents the fence's
    /// secret.
    pub(crate) fn end_reservation(
        &mut self,
        device: &DeviceId,
        secret: Option<Secret>,
        operator: bool,
    ) -> Result<(), RemoteError> {
        let mut kept = self.kept(device).iter();
        let Some(mut reserved) = kept.find(|kept| kept.fence.reserved).cloned() else {
            return Ok(());
        };
        if !operator && (secret.is_none() || secret != reserved.secret) {
            return Err(reserved.fence.unproven(device));
        }
        reserved.fence.reserved = false;
        self.put(device, reserved)
    }

    /// Replaces the VM's fence, in the file first. Has no effect on error.
    fn put(&mut self, device: &DeviceId, kept: KeptFence) -> Result<(), RemoteError> {
        self.put_with(device, kept, self.chains.clone())
    }

    fn put_with(
        &mut self,
        device: &DeviceId,
        kept: KeptFence,
        chains: BTreeMap<DeviceId, Chain>,
    ) -> Result<(), RemoteError> {
        let mut devices = self.devices.clone();
        let fences = devices.entry(device.to_owned()).or_default();
        let full = fences.len() >= MAX_FENCES;
        let vm = &kept.fence.vm;
        match fences.iter_mut().find(|known| known.fence.vm == *vm) {
            Some(known) => *known = kept,
            None if !full => fences.push(kept),
            None => {
                return Err(RemoteError {
                    kind: ErrorKind::Limit,
                    message: format!(
                        "device {device} has moved with {MAX_FENCES} different VMs, which is the most that a lender remembers"
                    ),
                });
            }
        }
        self.write(devices, chains)
    }

    /// The lease of a device that may go on.
    pub(crate) fn chain(&self, device: &DeviceId) -> Option<&Chain> {
        self.chains.get(device)
    }

    /// Sets the chain of a device that is being lent, in the file first, and ends the chains for which
    /// `ends`. Has no effect on error.
    pub(crate) fn lend(
        &mut self,
        device: &DeviceId,
        chain: Option<Chain>,
        ends: impl Fn(&DeviceId, &Chain) -> bool,
    ) -> Result<(), RemoteError> {
        let mut chains = self.chains.clone();
        chains.retain(|id, chain| id != device && !ends(id, chain));
        chains.extend(chain.map(|chain| (device.to_owned(), chain)));
        match chains == self.chains && !self.outdated {
            true => Ok(()),
            false => self.write(self.devices.clone(), chains),
        }
    }

    /// Ends a device's chain. If the file cannot be written, it has ended all the same, and no device is
    /// lent until the file has been written: after a restart the lease would go on.
    pub(crate) fn end_chain(&mut self, device: &DeviceId) -> Result<(), RemoteError> {
        let ended = self.lend(device, None, |_, _| false);
        if ended.is_err() {
            self.chains.remove(device);
            self.outdated = true;
        }
        ended
    }

    fn write(
        &mut self,
        devices: BTreeMap<DeviceId, Vec<KeptFence>>,
        chains: BTreeMap<DeviceId, Chain>,
    ) -> Result<(), RemoteError> {
        let kept = Kept {
            version: VERSION,
            devices,
            chains,
        };
        if let Some(path) = &self.file {
            let text = serde_json::to_vec_pretty(&kept).map_err(internal)?;
            files::replace_private(path, &text).map_err(internal)?;
        }
        (self.devices, self.chains) = (kept.devices, kept.chains);
        self.outdated = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
