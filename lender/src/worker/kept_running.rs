//! A device whose worker is gone, as it runs: its DMA and interrupts go on, and so does its lease, in another worker. That is
//! a function, or the device of a vfio-user server.

use farside_daemon::VmName;
use farside_error_chain::Chain;
use farside_lender_protocol::RemoteError;

use super::{
    device::{Kind, WorkerDevice},
    handle::Handle,
    kept::Record,
};
use crate::{chains, refusals::failed, registry::Lease, source::Report, vfio_user::no_bar_memory};

/// A device that runs, for the VM that goes on with it.
pub(crate) struct Running {
    pub(crate) vm: VmName,
    pub(crate) handle: Handle,
    /// What the keeper has, until it has the next lease.
    pub(crate) record: Option<Record>,
}

impl WorkerDevice {
    /// Refuses to lend a device that has BARs of its own with memory for them, and a function with another VM's state. One
    /// that was kept is let go, unless this is the lease that goes on with it.
    pub(crate) fn prepare(&mut self, lease: &Lease) -> Result<(), RemoteError> {
        let resumes = lease.chain.is_some_and(|chain| chain.goes_on);
        if matches!(self.device, Kind::Model(_)) {
            return match resumes {
                true => Ok(()),
                // What a lease has left that was kept for a VM, and did not go on.
                false => self.process_gone(true),
            };
        }
        if resumes {
            let is_kept = self
                .kept
                .as_ref()
                .is_some_and(|kept| kept.vm == *lease.owner.vm());
            return match is_kept {
                true => no_bar_memory(&lease.bar_memory),
                false => Err(chains::ended(
                    &self.id,
                    lease.owner.vm(),
                    "it was reset since",
                )),
            };
        }
        self.let_go_for_a_lease()?;
        match &self.device {
            Kind::Function(function) => function.check_lease(&lease.bar_memory),
            Kind::Model(_) | Kind::Server(_) => no_bar_memory(&lease.bar_memory),
        }
    }

    /// Keeps a device as it runs.
    pub(crate) fn keep(&mut self, kept: Running, report: Option<Report>) {
        if let Some(report) = report {
            self.last = self.completed(report);
        }
        self.kept = Some(kept);
    }

    /// Whether it is kept as it runs.
    pub(crate) fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// What was kept, for the worker that has started.
    pub(crate) fn take_kept(&mut self) -> Option<Running> {
        self.kept.take()
    }

    /// Whether another worker can go on with the device: with one that runs, if this one had it open, as its `handle` says.
    pub(crate) fn may_go_on(&self, handle: Option<&Handle>) -> bool {
        match &self.device {
            Kind::Model(_) => true,
            Kind::Function(_) | Kind::Server(_) => handle.is_some_and(Handle::can_be_adopted),
        }
    }

    /// Lets a device go that another lease is about to open.
    pub(crate) fn let_go_for_a_lease(&mut self) -> Result<(), RemoteError> {
        match self.let_run_end() {
            true => Ok(()),
            false => Err(failed(format_args!(
                "the DMA of device {} cannot be stopped: see the lender's log",
                self.id
            ))),
        }
    }

    /// See [`Available::let_go`](crate::source::Available::let_go).
    pub(super) fn let_run_end(&mut self) -> bool {
        match self.kept.as_ref().map(|kept| kept.handle.take_down()) {
            None => true,
            Some(Err(error)) => {
                log::error!("device {}: {}", self.id, Chain(&error));
                false
            }
            Some(Ok(())) => {
                if let Some(Running { vm, handle, record }) = self.kept.take() {
                    self.close(vm, handle);
                    let _ = record.map(|mut record| record.forget());
                }
                true
            }
        }
    }
}
