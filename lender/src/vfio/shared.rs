//! Functions that share an IOMMU group, such as a GPU and its audio function.
//!
//! The IOMMU cannot tell their DMA apart, so they are in one domain, and one VM has them: the registry lends none of them
//! while another VM has one. The domain belongs to this process, so a device thread serves their leases, as those across
//! an NTB.

use std::sync::{Arc, Mutex, PoisonError};

use farside_daemon::DeviceId;
use farside_pci::Bdf;
use farside_vfio::{Api, Domain, Function, VfioError, WeakDomain};

/// An IOMMU group of which several functions are lent.
#[derive(Debug)]
pub(crate) struct SharedGroup {
    /// Its number.
    pub(crate) number: u32,
    /// Its functions that are lent.
    pub(crate) devices: Vec<DeviceId>,
    /// That of the VM that has some of them.
    domain: Mutex<WeakDomain>,
}

impl SharedGroup {
    pub(crate) fn new(number: u32, devices: Vec<DeviceId>) -> Arc<Self> {
        Arc::new(Self {
            number,
            devices,
            domain: Mutex::default(),
        })
    }

    /// Opens one of the functions, beside those that are open.
    pub(super) fn open(&self, api: Api, bdf: Bdf) -> Result<Function, VfioError> {
        let mut current = self.domain.lock().unwrap_or_else(PoisonError::into_inner);
        let domain = current.upgrade().map_or_else(|| Domain::new(api), Ok)?;
        let function = domain.open(bdf)?;
        *current = domain.downgrade();
        Ok(function)
    }

    /// Closes one of the functions. Checks with the last one that no other process has any of them open.
    pub(super) fn close(&self, function: Function) -> Result<(), VfioError> {
        let current = self.domain.lock().unwrap_or_else(PoisonError::into_inner);
        let (bdf, api) = (function.bdf(), function.domain().api());
        drop(function);
        match current.upgrade() {
            Some(_) => Ok(()),
            None => farside_vfio::check_free(bdf, api),
        }
    }
}
