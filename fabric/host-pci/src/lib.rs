//! PCI functions of this host, through sysfs: what they are, which driver has
//! them, whether the IOMMU can keep them apart, and what their DMA did wrong.
//!
//! A lender takes a function from its driver, gives it to vfio-pci and back;
//! both ends of a borrow through an NTB do so with their NTB endpoint. This
//! crate is everything about that which needs no VFIO descriptor:
//!
//! ```text
//!   Filter --select--> FunctionInfo --usage, group--> refused, with the reason
//!                           |
//!                     bind_to_vfio ---> Binding (its drop gives the function back)
//!                     create_vfs -----> CreatedVfs (its drop removes them)
//!   /dev/kmsg --FaultReader--> KernelDmaFault
//! ```
//!
//! Nothing is cached: every call reads sysfs, since an administrator, udev and
//! hotplug change it beside us. Everything is read below a root directory, so that
//! the crate is tested on made-up trees; what a plain directory cannot do is behind
//! [`Kernel`].
#![forbid(unsafe_code)]

mod binding;
mod error;
mod filter;
mod function;
mod group;
mod interrupts;
mod iommu;
pub mod kmsg;
mod reserved;
mod reset;
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
pub use reserved::{Reserved, ReservedKind, parse_reserved};
pub use reset::ResetMethod;
pub use sriov::CreatedVfs;
pub use sysfs::{Kernel, LinuxKernel};
pub use usage::{InUse, Use};
