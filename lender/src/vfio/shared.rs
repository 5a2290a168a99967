//! Functions that share an IOMMU group, such as a GPU and its audio function.
//!
//! The IOMMU cannot tell their DMA apart, so they are in one domain, and one VM has them: the registry lends none of them
//! while another VM has one. The domain belongs to this process, so a device thread serves their leases, as those across
//! an NTB.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use farside_daemon::VmName;
use farside_error_chain::Chain;
use farside_host_pci::Binding;
use farside_pci::Bdf;
use farside_vfio::{Api, Domain, Function, VfioError, WeakDomain, check_free, nodes, reset_bus};

use crate::registry::Group;

/// An IOMMU group of which several functions are lent.
#[derive(Debug)]
pub(crate) struct SharedGroup {
    pub(crate) members: Arc<Group>,
    shared: Mutex<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// That of the VM that has some of the functions.
    domain: WeakDomain,
    /// That VM, or the last one.
    vm: Option<VmName>,
    /// The functions that cannot be reset alone.
    no_reset: Vec<Bdf>,
    /// A VM has had functions since those were last reset.
    is_used: bool,
    /// All functions: they go back to their drivers together, since none takes one while VFIO has another.
    bindings: Vec<Binding>,
}

impl SharedGroup {
    pub(super) fn new(members: Group) -> Arc<Self> {
        Arc::new(Self {
            members: Arc::new(members),
            shared: Mutex::default(),
        })
    }

    /// Adds a function, which was probed.
    pub(super) fn add(&self, binding: Binding, bdf: Bdf, can_reset: bool) {
        let mut shared = self.lock();
        shared.bindings.push(binding);
        if !can_reset {
            shared.no_reset.push(bdf);
        }
    }

    /// Opens one of the functions for `vm`, beside those that are open. Before the first one, those are reset that cannot be
    /// reset alone.
    pub(super) fn open(
        &self,
        api: Api,
        bdf: Bdf,
        vm: &VmName,
        allow_dirty: bool,
    ) -> Result<Function, VfioError> {
        let mut shared = self.lock();
        let opened = match shared.domain.upgrade() {
            Some(_) if shared.vm.as_ref() != Some(vm) => Err(busy(bdf, api)),
            Some(domain) => domain.open(bdf),
            None => shared
                .reset(api, allow_dirty)
                .and_then(|()| Domain::new(api)?.open(bdf)),
        };
        let function = opened.map_err(|error| held(error, api))?;
        shared.domain = function.domain().downgrade();
        shared.vm = Some(vm.clone());
        shared.is_used = true;
        Ok(function)
    }

    /// Closes one of the functions. Checks with the last one that no other process has any of them open.
    pub(super) fn close(&self, function: Function) -> Result<(), VfioError> {
        let shared = self.lock();
        let (bdf, api) = (function.bdf(), function.domain().api());
        drop(function);
        match shared.domain.upgrade() {
            Some(_) => Ok(()),
            None => check_free(bdf, api).map_err(|error| held(error, api)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // Its fields do not depend on each other.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Resets each bus that has functions which cannot be reset alone, while no function is open. Fails if one cannot be
    /// reset and may have a former VM's state.
    fn reset(&mut self, api: Api, allow_dirty: bool) -> Result<(), VfioError> {
        let buses: BTreeMap<_, _> = (self.no_reset.iter())
            .map(|bdf| ((bdf.domain(), bdf.bus()), *bdf))
            .collect();
        let mut resets = buses.values().map(|bdf| reset_bus(*bdf, api));
        match resets.find_map(Result::err) {
            None => {
                for bdf in buses.values() {
                    log::info!("all functions on the bus of {bdf} were reset");
                }
                self.is_used = false;
            }
            Some(error @ VfioError::ResetBus { .. }) if !self.is_used || allow_dirty => {
                log::warn!("{}", Chain(&error));
            }
            Some(error) => return Err(error),
        }
        Ok(())
    }
}

/// What an error of a function means that was open before: its IOMMU has interrupt remapping, so iommufd refuses it since
/// another process has a function of its group.
pub(super) fn held(error: VfioError, api: Api) -> VfioError {
    match error {
        VfioError::NoInterruptRemapping { bdf } if api == Api::Iommufd => busy(bdf, api),
        error => error,
    }
}

fn busy(bdf: Bdf, api: Api) -> VfioError {
    let nodes = nodes(bdf, api).unwrap_or_default();
    VfioError::Busy {
        bdf,
        node: nodes.into_iter().next_back().unwrap_or_default(),
    }
}
