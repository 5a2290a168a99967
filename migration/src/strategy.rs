//! How the guest gets to the other host: chosen when a migration is planned, and
//! recorded in the journals of both hosts.

use std::{net::IpAddr, time::Duration};

use farside_daemon::VmName;
use serde::{Deserialize, Serialize};

use crate::{LiveRunner, Result, Runner, Step, live::Guest};

/// The strategy of a migration. [`crate::live`] compares the steps of the two.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Strategy {
    /// The guest powers off here, and boots there.
    Cold,
    /// QEMU sends the running guest.
    Live {
        /// The address of the other host at which its QEMU listens.
        address: IpAddr,
    },
}

/// At the host that the VM leaves.
impl Strategy {
    /// ShutDown: has the devices returned to their lenders.
    pub(crate) fn release(
        &self,
        host: &(impl Runner + LiveRunner + ?Sized),
        vm: &VmName,
        limit: Duration,
    ) -> Result<()> {
        match self {
            Self::Cold => host.stop(vm, limit),
            Self::Live { .. } => host.release_devices(vm, limit),
        }
    }

    /// Whether the guest is known to be here, so that the other host cannot have it. With
    /// `cancel`, cancels a transfer in progress.
    pub(crate) fn guest_is_here(
        &self,
        host: &(impl LiveRunner + ?Sized),
        vm: &VmName,
        cancel: bool,
    ) -> bool {
        match self {
            Self::Cold => false,
            Self::Live { .. } => host.query_transfer(vm, cancel) == Ok(Guest::Here),
        }
    }

    /// Finish: stops the remaining processes here of a VM that has arrived.
    pub(crate) fn end_source(&self, host: &(impl LiveRunner + ?Sized), vm: &VmName) -> Result<()> {
        match self {
            Self::Cold => Ok(()),
            Self::Live { .. } => host.end_paused(vm),
        }
    }

    /// StartAgain: has the VM run here with its devices.
    pub(crate) fn start_again(
        &self,
        host: &(impl Runner + LiveRunner + ?Sized),
        vm: &VmName,
    ) -> Result<()> {
        match self {
            Self::Cold => host.start(vm),
            Self::Live { .. } => host.resume_here(vm),
        }
    }
}

/// At the destination host.
impl Strategy {
    /// Whether the VM may run at the host that it leaves while this one is at `step`. A
    /// live migration that fails at its end resumes the guest there.
    pub(crate) fn source_may_run(&self, step: Step) -> bool {
        match self {
            Self::Cold => step == Step::Prepare,
            Self::Live { .. } => step <= Step::Start,
        }
    }

    /// Start: has the VM run here with its devices.
    pub(crate) fn start(
        &self,
        host: &(impl Runner + LiveRunner + ?Sized),
        vm: &VmName,
    ) -> Result<()> {
        match self {
            Self::Cold => host.start(vm),
            Self::Live { .. } => host.resume_received(vm),
        }
    }

    /// StopThere: ends the VM. Fails if a guest that was sent here runs.
    pub(crate) fn end_destination(
        &self,
        host: &(impl Runner + LiveRunner + ?Sized),
        vm: &VmName,
        limit: Duration,
    ) -> Result<()> {
        match self {
            Self::Cold => host.stop(vm, limit),
            Self::Live { .. } => host.end_paused(vm),
        }
    }
}

impl Strategy {
    /// The guest runs meanwhile.
    pub fn is_live(&self) -> bool {
        matches!(self, Self::Live { .. })
    }

    /// The address at which QEMU at the other host listens for a running guest.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        match self {
            Self::Cold => None,
            Self::Live { address } => Some(*address),
        }
    }
}
