//! A function whose worker is gone, as it runs: its DMA and interrupts go on, and so does its lease, in another worker.

use farside_daemon::VmName;
use farside_error_chain::Chain;
use farside_lender_protocol::RemoteError;
use farside_vfio::SecondHandle;

use super::{
    device::{Kind, WorkerDevice},
    kept::Record,
};
use crate::{chains, refusals::failed, registry::Lease, source::Report, vfio_user::no_bar_memory};

/// A function, for the VM that goes on with it.
pub(crate) struct KeptFunction {
    pub(crate) vm: VmName,
    pub(crate) handle: SecondHandle,
    /// What the keeper has, until it has the next lease.
    pub(crate) record: Option<Record>,
}

impl WorkerDevice {
    /// Refuses to lend a function with memory for BARs, or with another VM's state. One that was kept is let go,
    /// unless this is the lease that goes on with it.
    pub(crate) fn prepare(&mut self, lease: &Lease) -> Result<(), RemoteError> {
        let function = match &self.device {
            Kind::Model(_) => return Ok(()),
            Kind::Server(_) => return no_bar_memory(&lease.bar_memory),
            Kind::Function(function) => function.clone(),
        };
        let resumes = lease.chain.is_some_and(|chain| chain.goes_on);
        if resumes {
            let is_kept = self.kept.as_ref().is_some_and(|kept| kept.vm == lease.vm);
            return match is_kept {
                true => no_bar_memory(&lease.bar_memory),
                false => Err(chains::ended(&self.id, &lease.vm, "it was reset since")),
            };
        }
        self.let_go_for_a_lease()?;
        function.check_lease(&lease.bar_memory)
    }

    /// Keeps a function as it runs.
    pub(crate) fn keep(&mut self, kept: KeptFunction, report: Option<Report>) {
        if let Some(report) = report {
            self.last = self.completed(report);
        }
        self.kept = Some(kept);
    }

    /// Whether a function is kept as it runs.
    pub(crate) fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// The function that was kept, for the worker that has started.
    pub(crate) fn take_kept(&mut self) -> Option<KeptFunction> {
        self.kept.take()
    }

    /// Whether another worker can go on with the device: with a function, if this one had it open, as its `handle` says.
    pub(crate) fn may_go_on(&self, handle: Option<&SecondHandle>) -> bool {
        match &self.device {
            Kind::Model(_) | Kind::Server(_) => true,
            Kind::Function(_) => handle.is_some_and(SecondHandle::can_be_adopted),
        }
    }

    /// Lets a function go that another lease is about to open.
    pub(crate) fn let_go_for_a_lease(&mut self) -> Result<(), RemoteError> {
        match self.let_function_go() {
            true => Ok(()),
            false => Err(failed(format_args!(
                "the DMA of device {} cannot be stopped: see the lender's log",
                self.id
            ))),
        }
    }

    /// See [`Available::let_go`](crate::source::Available::let_go).
    pub(super) fn let_function_go(&mut self) -> bool {
        let Kind::Function(function) = &self.device else {
            return true;
        };
        match self.kept.as_ref().map(|kept| kept.handle.take_down()) {
            None => true,
            Some(Err(error)) => {
                log::error!("device {}: {}", self.id, Chain(&error));
                false
            }
            Some(Ok(())) => {
                if let Some(KeptFunction { vm, handle, record }) = self.kept.take() {
                    function.ended(vm, handle.close());
                    let _ = record.map(|mut record| record.forget());
                }
                true
            }
        }
    }
}
