//! Functions that share an IOMMU group, such as a GPU and its audio function.
//!
//! The IOMMU cannot tell their DMA apart, so they are in one domain, and one VM has them: the registry lends none of them
//! while another VM has one. The domain belongs to this process, so a device thread serves their leases, as those across
//! an NTB.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use farside_error_chain::Chain;
use farside_host_pci::Binding;
use farside_pci::Bdf;
use farside_vfio::{Api, Domain, Function, VfioError, WeakDomain, check_free, nodes, reset_bus};

use crate::{lease_owner::LeaseOwner, registry::Group};

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
    /// That VM's owner, or the last one.
    owner: Option<LeaseOwner>,
    /// The functions that cannot be reset alone.
    no_reset: Vec<NoReset>,
    /// All functions: they go back to their drivers together, since none takes one while VFIO has another.
    bindings: Vec<Binding>,
}

/// A function that cannot be reset alone.
#[derive(Debug)]
struct NoReset {
    bdf: Bdf,
    /// Another VM may have it as it is.
    allow_dirty: bool,
    /// A VM has had it since it was last reset.
    is_used: bool,
}

impl SharedGroup {
    pub(super) fn new(members: Group) -> Arc<Self> {
        Arc::new(Self {
            members: Arc::new(members),
            shared: Mutex::default(),
        })
    }

    /// Adds a function, which was probed.
    pub(super) fn add(&self, binding: Binding, bdf: Bdf, can_reset: bool, allow_dirty: bool) {
        let mut shared = self.lock();
        shared.bindings.push(binding);
        if !can_reset {
            shared.no_reset.push(NoReset {
                bdf,
                allow_dirty,
                is_used: false,
            });
        }
    }

    /// Opens one of the functions for `owner`, beside those that are open. Before the first one, those are reset that cannot be
    /// reset alone.
    pub(super) fn open(
        &self,
        api: Api,
        bdf: Bdf,
        owner: &LeaseOwner,
    ) -> Result<Function, VfioError> {
        let mut shared = self.lock();
        let opened = match shared.domain.upgrade() {
            Some(_) if !shared.owner.as_ref().is_some_and(|it| it.is(owner)) => Err(busy(bdf, api)),
            Some(domain) => domain.open(bdf),
            None => shared
                .reset(|bdf| reset_bus(bdf, api))
                .and_then(|()| Domain::new(api)?.open(bdf)),
        };
        let function = opened.map_err(|error| held(error, api))?;
        shared.domain = function.domain().downgrade();
        shared.owner = Some(owner.clone());
        for used in shared.no_reset.iter_mut().filter(|it| it.bdf == bdf) {
            used.is_used = true;
        }
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
    /// Resets each bus that has functions which cannot be reset alone, while no function is open. Fails if such a function
    /// has a former VM's state afterwards that no other VM may have.
    fn reset(&mut self, reset_bus: impl Fn(Bdf) -> Result<(), VfioError>) -> Result<(), VfioError> {
        let bus = |bdf: Bdf| (bdf.domain(), bdf.bus());
        let mut buses: BTreeMap<_, Vec<&mut NoReset>> = BTreeMap::new();
        for function in &mut self.no_reset {
            buses.entry(bus(function.bdf)).or_default().push(function);
        }
        let mut result = Ok(());
        for functions in buses.into_values() {
            let Some(bdf) = functions.first().map(|it| it.bdf) else {
                continue;
            };
            match reset_bus(bdf) {
                Ok(()) => {
                    log::info!("all functions on the bus of {bdf} were reset");
                    functions.into_iter().for_each(|it| it.is_used = false);
                }
                Err(error @ VfioError::ResetBus { .. })
                    if functions.iter().all(|it| it.allow_dirty || !it.is_used) =>
                {
                    log::warn!("{}", Chain(&error));
                }
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }
}

/// What an error of a function means that was open before: its IOMMU has interrupt remapping, so iommufd refuses it since
/// another process has a function of its group.
fn held(error: VfioError, api: Api) -> VfioError {
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

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn function(bdf: &str, allow_dirty: bool) -> NoReset {
        NoReset {
            bdf: bdf.parse().unwrap(),
            allow_dirty,
            is_used: true,
        }
    }

    /// Resets all buses but those that are `fixed`.
    fn reset(shared: &mut Shared, fixed: &[u8]) -> Result<(), VfioError> {
        shared.reset(|bdf| match fixed.contains(&bdf.bus()) {
            true => Err(VfioError::ResetBus {
                bdf,
                source: io::ErrorKind::InvalidInput.into(),
            }),
            false => Ok(()),
        })
    }

    #[test]
    fn no_function_of_a_group_passes_a_former_vms_state_on() {
        let mut shared = Shared {
            no_reset: vec![
                function("0000:01:00.0", false),
                function("0000:02:00.0", false),
                function("0000:03:00.0", true),
            ],
            ..Shared::default()
        };
        // One bus is not reset: the others are, and the group is not lent.
        let error = reset(&mut shared, &[1, 3]).unwrap_err();
        assert!(error.to_string().contains("0000:01:00.0"), "{error}");
        let used = |shared: &Shared| -> Vec<bool> {
            shared.no_reset.iter().map(|it| it.is_used).collect()
        };
        assert_eq!(used(&shared), [true, false, true]);
        // What may have that state, or no VM has had.
        reset(&mut shared, &[2, 3]).unwrap();
        assert_eq!(used(&shared), [false, false, true]);
        // Two functions of a bus, of which one must not pass it on.
        shared.no_reset.push(function("0000:03:00.1", false));
        reset(&mut shared, &[3]).unwrap_err();
        reset(&mut shared, &[]).unwrap();
        assert_eq!(used(&shared), [false; 4]);
    }
}
