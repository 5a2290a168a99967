//! Physical PCI functions and their IOMMU domains, through Linux VFIO.
//!
//! - [`Api`]: which of the kernel's two interfaces is used, found out at start.
//! - [`Domain`]: one IOMMU domain: a fresh container (type1) or I/O address
//!   space (iommufd), empty until something is mapped. One for each borrow.
//! - [`Function`]: an opened vfio-pci function: configuration space, BARs,
//!   interrupts, reset.
//! - [`SecondHandle`]: an open function, as another process holds it.
//! - [`LocalPath`]: the fabric's path of a DMA where lender and borrower are
//!   one machine: windows and guest RAM, composed into mappings of a [`Domain`].
//!
//! Specification: the kernel's `Documentation/driver-api/vfio.rst` and
//! `userspace-api/iommufd.rst`, `linux/vfio.h`, `linux/iommufd.h`.
//!
//! # Use of vfio-ioctls
//!
//! vfio-ioctls opens containers, groups, devices and iommufd, and reads region and interrupt
//! information. It is not used for:
//!
//! - mapping: it cannot map read-only, and loses the number of bytes that an
//!   unmap took (`iommu`, `ioctl`);
//! - a domain's capabilities: usable IOVA, page sizes, mappings left (`ioctl`);
//! - interrupts: only whole indexes, by its own eventfd type, errno lost
//!   (`ioctl`, `irqs`);
//! - register access and reset: errors are only logged (`function`, `ioctl`).
//!
//! Its devices panic on drop when sysfs no longer has the function (hot unplug in
//! the very moment); `function::open` catches that. And they only log that a group
//! could not leave its container because another process still has the device open;
//! [`Function::close`] finds that out by itself.

#![deny(unsafe_code)]

mod api;
mod description;
mod domain;
mod error;
mod function;
mod ioctl;
mod iommu;
mod irqs;
mod local;
mod mmio;
mod second_handle;
mod usable;

pub use api::Api;
pub use description::{Region, config_size, describe};
pub use domain::{Domain, DomainUsage, WeakDomain};
pub use error::VfioError;
pub use function::{Function, check_free, nodes, reset_bus};
pub use ioctl::requests;
pub use local::{Composition, LocalPath, Mapper, Piece};
pub use mmio::RegionMemory;
pub use second_handle::{HandleParts, SecondHandle};
pub use usable::UsableIova;
