//! PCI functions of this host, through sysfs: their properties, drivers, IOMMU groups and DMA
//! faults.
//!
//! A lender binds a function to vfio-pci, and later back to its driver; both ends of a borrow
//! through an NTB do so with their NTB endpoint. This crate contains all parts of that which do not
//! need a VFIO descriptor:
//!
//! ```text
//!   Filter --select--> FunctionInfo --usage, group--> refused, with the reason
//!                           |
//!                     bind_to_vfio ---> Binding (its drop gives the function back)
//!                     create_vfs -----> CreatedVfs (its drop removes them); NVMe: set online
//!   /dev/kmsg --FaultReader--> KernelDmaFault
//! ```
//!
//! Nothing is cached: every call reads sysfs, since administrators, udev and hotplug change it
//! concurrently. All paths are relative to a root directory, so that the tests use artificial
//! trees; [`Kernel`] abstracts the operations that a plain directory cannot emulate.
#![deny(unsafe_code)]

mod binding;
mod error;
mod filter;
mod function;
mod group;
mod interrupts;
mod iommu;
pub mod kmsg;
mod nvme;
mod sriov;
mod sysfs;
mod usage;
mod vfio_driver;

pub use binding::{Binding, Force, Former};
pub use error::{NotLendable, PciError};
pub use filter::{ClassPrefix, Filter, FilterError, Kind};
pub use function::{FunctionInfo, FunctionKind, HostPci, Sriov};
pub use group::{Group, Member};
pub use interrupts::{InterruptCount, IrqKind, parse_interrupts};
pub use nvme::admin::AdminCommand;
pub use sriov::CreatedVfs;
pub use sysfs::{Kernel, LinuxKernel};
pub use usage::{InUse, Use};
