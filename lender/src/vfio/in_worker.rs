//! A function in the worker process that serves its lease.

use std::{os::fd::OwnedFd, sync::Arc};

use farside_daemon::{DeviceId, VmName, Wakeup};
use farside_lender_protocol::{Described, RamRange, RemoteError, Transport};
use farside_pci::Bdf;
use farside_vfio::{Api, Function, HandleParts};
use serde::{Deserialize, Serialize};

use super::leased::{LeasedFunction, Opened, Owner, open_clean};
use crate::{
    lease_owner::LeaseOwner,
    refusals::{internal, unsupported},
    source::{Available, BorrowerMemory, DeviceSource, Leased, NotLeased, Report},
};

/// A function to be opened.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct FunctionConfig {
    pub(super) bdf: Bdf,
    pub(super) api: Api,
    /// The VM that used it last.
    pub(super) last_vm: Option<VmName>,
    /// As it was found when it was not open.
    pub(crate) described: Described,
    /// It is open, and goes on: with these parts, of which the descriptors come along.
    pub(crate) adopts: Option<HandleParts>,
}

/// A function that was opened for one lease, and stays open until the process ends: closing it
/// takes files that a worker cannot open any more.
pub(crate) struct WorkerFunction {
    id: DeviceId,
    described: Described,
    function: Arc<Function>,
}

impl WorkerFunction {
    /// Opens and resets the function.
    pub(crate) fn open(
        id: &DeviceId,
        config: FunctionConfig,
        stop: &Wakeup,
    ) -> Result<Self, RemoteError> {
        let function = open_clean(id, &config, stop)?;
        Ok(Self::with(id, config.described, function))
    }

    /// Goes on with a function as a worker before has left it, by its descriptors.
    pub(crate) fn adopt(
        id: &DeviceId,
        described: Described,
        parts: HandleParts,
        fds: [OwnedFd; 2],
    ) -> Result<Self, RemoteError> {
        let function = Function::adopt(parts, fds).map_err(internal)?;
        Ok(Self::with(id, described, Arc::new(function)))
    }

    fn with(id: &DeviceId, described: Described, function: Arc<Function>) -> Self {
        // Never dropped.
        std::mem::forget(Arc::clone(&function));
        Self {
            id: id.clone(),
            described,
            function,
        }
    }

    /// The function for the lender's process.
    pub(crate) fn share(&self) -> Result<(HandleParts, [OwnedFd; 2]), RemoteError> {
        self.function.share().map_err(internal)
    }
}

impl Available for WorkerFunction {
    fn kind(&self) -> &'static str {
        crate::registry::FUNCTION
    }

    fn described(&self) -> &Described {
        &self.described
    }

    fn check(
        &self,
        _: Option<&LeaseOwner>,
        _: Transport,
        _: &[RamRange],
    ) -> Result<(), RemoteError> {
        Err(unsupported("the lender's process checks that"))
    }

    fn flush(&mut self) -> Result<(), RemoteError> {
        // The medium is the function's own, and the guest's driver flushes it.
        Ok(())
    }

    /// The lender's process counts interrupts and faults.
    fn report(&self) -> Report {
        Report::default()
    }
}

impl DeviceSource for WorkerFunction {
    fn lease(
        self: Box<Self>,
        _: Transport,
        lease_owner: &LeaseOwner,
        memory: BorrowerMemory,
    ) -> Result<Leased, NotLeased> {
        let page = memory.state.map(|state| {
            let (page, _) = state.map(&self.id, self.described.state)?;
            Ok(page)
        });
        let opened = page
            .transpose()
            .and_then(|page| Opened::local(&self.described, Arc::clone(&self.function), page));
        match opened {
            Ok(opened) => Ok(LeasedFunction::lease(
                self.id.clone(),
                self,
                lease_owner.vm(),
                opened,
            )),
            Err(error) => Err(NotLeased {
                source: self,
                error,
            }),
        }
    }
}

impl Owner for WorkerFunction {
    fn ended(self: Box<Self>, function: Arc<Function>, _: VmName) -> Box<dyn DeviceSource> {
        function.stop();
        self
    }
}
