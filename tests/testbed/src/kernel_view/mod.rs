//! What a kernel itself says about devices: which addresses its IOMMU maps, which
//! DMA it refused, which interrupts came. Tests believe these, not the product.
//!
//! The parsers are pure; [`HostVm`](crate::HostVm) has the methods that read a
//! VM's kernel with them.

mod faults;
mod interrupts;
mod iommu;

pub use faults::{DmarFault, dmar_faults};
pub use interrupts::{Interrupt, interrupts};
pub use iommu::{Change, LiveMappings, Mapping, TraceEvent, iommu_trace};
