//! The operations that the fabric needs from VFIO: functions and IOMMU domains, as traits, so that
//! tests can substitute a model of the hardware.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use farside_fabric::memory::HostSlice;
use farside_fabric::{FabricError, Iova};
use farside_irq_relay::{Action, IrqData, IrqEventFd, IrqIndex, IrqRange, IrqTarget, SetIrqs};
use farside_pci::{Bdf, Description};
use farside_vfio::{Domain, Function, RegionMemory, VfioError};

use crate::Registers;

/// An IOMMU domain; as [`farside_vfio::Domain`].
pub trait DomainOps: Send + Sync {
    /// A part of a function's BAR, mapped into this process.
    type Bar: Registers + 'static;

    /// Lets the domain's functions reach `memory` at `at`, and pins it.
    ///
    /// # Errors
    /// What the system reports. Nothing is mapped then.
    fn map(&self, at: Iova, memory: &HostSlice, writable: bool) -> Result<(), FabricError>;

    /// Lets the domain's functions reach `len` bytes at `offset` of `bar`.
    ///
    /// # Errors
    /// What the system reports. Nothing is mapped then.
    fn map_bar(
        &self,
        at: Iova,
        bar: &Arc<Self::Bar>,
        offset: u64,
        len: u64,
    ) -> Result<(), FabricError>;

    /// Unmaps the `len` bytes at `at`.
    ///
    /// # Errors
    /// What the system reports. It may still be mapped then.
    fn unmap(&self, at: Iova, len: u64) -> Result<(), FabricError>;

    /// The usable IOVA ranges, as (first, last) pairs.
    ///
    /// # Errors
    /// What the system reports.
    fn usable(&self) -> Result<Vec<(u64, u64)>, FabricError>;

    /// Checks that each of `ranges`, as (first, bytes), is usable.
    ///
    /// # Errors
    /// The first unusable range, and the reason.
    fn check(&self, ranges: &[(Iova, u64)]) -> Result<(), FabricError>;
}

/// A PCI function that is open in this process; as [`farside_vfio::Function`].
pub trait FunctionOps: Send + Sync + 'static {
    /// What its DMA goes through.
    type Domain: DomainOps;

    /// Where it is.
    fn bdf(&self) -> Bdf;

    /// What its DMA goes through.
    fn domain(&self) -> &Self::Domain;

    /// Enables or disables bus mastering.
    ///
    /// # Errors
    /// What the system reports.
    fn set_bus_master(&self, enabled: bool) -> Result<(), FabricError>;

    /// Its description, with the areas of its BARs that can be mapped.
    ///
    /// # Errors
    /// What the system reports.
    fn description(&self) -> Result<Description, FabricError>;

    /// Maps a part of a BAR into this process.
    ///
    /// # Errors
    /// What the system reports.
    fn map_region(&self, bar: u8, offset: u64, len: u64) -> Result<Arc<BarOf<Self>>, FabricError>;

    /// A descriptor to map a BAR from, and the BAR's offset in it.
    ///
    /// # Errors
    /// What the system reports.
    fn bar_file(&self, bar: u8) -> Result<(OwnedFd, u64), FabricError>;

    /// Routes an MSI-X vector to an eventfd.
    ///
    /// # Errors
    /// What the system reports.
    fn signal(&self, vector: u16, to: IrqEventFd) -> Result<(), FabricError>;
}

/// A mapped part of a BAR of a function of this kind.
pub type BarOf<F> = <<F as FunctionOps>::Domain as DomainOps>::Bar;

impl Registers for RegionMemory {
    fn read32(&self, offset: u64) -> u32 {
        self.load_u32(offset).unwrap_or(u32::MAX)
    }

    fn write32(&self, offset: u64, value: u32) {
        // Out of range: nothing is written, as the trait requires.
        let _ = self.store_u32(offset, value);
    }

    fn read64(&self, offset: u64) -> u64 {
        self.load_u64(offset).unwrap_or(u64::MAX)
    }

    fn write64(&self, offset: u64, value: u64) {
        let _ = self.store_u64(offset, value);
    }
}

impl DomainOps for Domain {
    type Bar = RegionMemory;

    fn map(&self, at: Iova, memory: &HostSlice, writable: bool) -> Result<(), FabricError> {
        Ok(self.map(at, memory, writable)?)
    }

    fn map_bar(
        &self,
        at: Iova,
        bar: &Arc<RegionMemory>,
        offset: u64,
        len: u64,
    ) -> Result<(), FabricError> {
        Ok(self.map_bar(at, bar, offset, len)?)
    }

    fn unmap(&self, at: Iova, len: u64) -> Result<(), FabricError> {
        Ok(self.unmap(at, len)?)
    }

    fn usable(&self) -> Result<Vec<(u64, u64)>, FabricError> {
        Ok(self.iova_ranges()?)
    }

    fn check(&self, ranges: &[(Iova, u64)]) -> Result<(), FabricError> {
        Ok(self.usable_iova()?.check(ranges)?)
    }
}

impl FunctionOps for Function {
    type Domain = Domain;

    fn bdf(&self) -> Bdf {
        self.bdf()
    }

    fn domain(&self) -> &Domain {
        self.domain()
    }

    fn set_bus_master(&self, enabled: bool) -> Result<(), FabricError> {
        Ok(self.set_bus_master(enabled)?)
    }

    fn description(&self) -> Result<Description, FabricError> {
        Ok(self.description()?)
    }

    fn map_region(&self, bar: u8, offset: u64, len: u64) -> Result<Arc<RegionMemory>, FabricError> {
        Ok(self.map_region(bar, offset, len)?)
    }

    fn bar_file(&self, bar: u8) -> Result<(OwnedFd, u64), FabricError> {
        Ok(self.bar_file(bar)?)
    }

    fn signal(&self, vector: u16, to: IrqEventFd) -> Result<(), FabricError> {
        let other = |error| FabricError::Other(error);
        let index = IrqIndex::Msix;
        let range = IrqRange::new(&self.irq_counts(), index as u32, vector.into(), 1)
            .map_err(|error| other(error.into()))?;
        let data = IrqData::Targets(vec![Some(IrqTarget::from(to))]);
        let request = SetIrqs::new(range, Action::Trigger, data);
        let request = request.map_err(|error| other(error.into()))?;
        self.set_irqs(&request).map_err(VfioError::into)
    }
}
