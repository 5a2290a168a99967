//! Functions that share an IOMMU group, such as a GPU and its audio function.
//!
//! The IOMMU cannot tell their DMA apart, so they are in one domain, and one VM has them: the registry lends none of them
//! while another VM has one. The domain belongs to this process, so a device thread serves their leases, as those across
//! an NTB.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farside_daemon::DeviceId;
use farside_error_chain::Chain;
use farside_pci::Bdf;
use farside_vfio::{Api, Domain, Function, VfioError, WeakDomain, check_free, reset_bus};

/// An IOMMU group of which several functions are lent.
#[derive(Debug)]
pub(crate) struct SharedGroup {
    /// Its number.
    pub(crate) number: u32,
    /// Its functions that are lent.
    pub(crate) devices: Vec<DeviceId>,
    shared: Mutex<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// That of the VM that has some of the functions.
    domain: WeakDomain,
    /// How often all of them were reset.
    resets: u64,
}

impl SharedGroup {
    pub(crate) fn new(number: u32, devices: Vec<DeviceId>) -> Arc<Self> {
        Arc::new(Self {
            number,
            devices,
            shared: Mutex::default(),
        })
    }

    /// Opens one of the functions, beside those that are open. The first one resets all if it cannot be reset alone.
    pub(super) fn open(&self, api: Api, bdf: Bdf, can_reset: bool) -> Result<Function, VfioError> {
        let mut shared = self.lock();
        let domain = match shared.domain.upgrade() {
            Some(domain) => domain,
            None => {
                if !can_reset {
                    shared.reset(api, bdf)?;
                }
                Domain::new(api)?
            }
        };
        let function = domain.open(bdf)?;
        shared.domain = domain.downgrade();
        Ok(function)
    }

    /// Closes one of the functions. Checks with the last one that no other process has any of them open.
    pub(super) fn close(&self, function: Function) -> Result<(), VfioError> {
        let shared = self.lock();
        let (bdf, api) = (function.bdf(), function.domain().api());
        drop(function);
        match shared.domain.upgrade() {
            Some(_) => Ok(()),
            None => check_free(bdf, api),
        }
    }

    /// How often all of them were reset.
    pub(super) fn resets(&self) -> u64 {
        self.lock().resets
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // Its fields do not depend on each other.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Resets all functions, none of which is open. A failure is logged, but for one that may pass.
    fn reset(&mut self, api: Api, bdf: Bdf) -> Result<(), VfioError> {
        match reset_bus(bdf, api) {
            Ok(()) => {
                log::info!("all functions on the bus of {bdf} were reset");
                self.resets += 1;
            }
            Err(error @ VfioError::Busy { .. }) => return Err(error),
            Err(error) => log::warn!(
                "{bdf} cannot be reset with all other functions of its bus, which have to be lent, too: {error}",
                error = Chain(&error)
            ),
        }
        Ok(())
    }
}
