//! The kernel's own reports about devices: IOMMU mappings, DMA faults, interrupts. Tests
//! rely on these, not on the product's reports.
//!
//! The parsers are pure; [`HostVm`](crate::HostVm) has the methods that read a VM's kernel
//! with them.

mod faults;
mod interrupts;
mod iommu;

pub use faults::{DmarFault, dmar_faults};
pub use interrupts::{Interrupt, interrupts};
pub use iommu::{Change, LiveMappings, Mapping, TraceEvent, iommu_trace};
