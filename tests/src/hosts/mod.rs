//! The product in VMs that play hosts: each has an emulated VT-d and Linux's own
//! VFIO, one has the physical device, and the guests that use it are VMs in these
//! VMs, run by stock QEMU.
//!
//! - [`same_host`]: lender and borrower are one host;
//! - [`two_hosts`]: each is a host of its own, joined by an NTB and a network;
//! - [`virtual_functions`]: two virtual functions of one device, each lent to a guest of its own;
//! - [`iommufd`]: one host whose kernel offers VFIO's newer interface.
//!
//! Each returns facts, most of them from the kernel's own output, and judges none.

mod facts;
mod host;
mod iommufd;
mod play;
mod programs;
mod scripted;
mod stage;
mod vfs;

pub use facts::{Facts, VfFacts};
pub use iommufd::{IommufdFacts, iommufd};
pub use programs::{Programs, stripped};

use anyhow::Result;
use farside_testbed::Testbed;

use crate::Cluster;

/// How often a scene tells the drive to reach outside of guest RAM.
const ROGUES: u64 = 3;

/// What a scene needs.
pub struct Set<'a> {
    /// QEMU, kernel, guests.
    pub testbed: &'a Testbed,
    /// The product.
    pub programs: &'a Programs,
    /// A folder for sockets and images, and what runs outside of all VMs.
    pub cluster: &'a Cluster,
    /// Told what is being done.
    pub tell: &'a dyn Fn(&str),
}

/// Lender, backend and guest on one host.
pub fn same_host(set: &Set<'_>) -> Result<Facts> {
    stage::same_host(set)
}

/// Lender on one host, backend and guest on another.
pub fn two_hosts(set: &Set<'_>) -> Result<Facts> {
    stage::two_hosts(set)
}

/// Two virtual functions of one device, lent to two guests at once.
pub fn virtual_functions(set: &Set<'_>) -> Result<VfFacts> {
    vfs::vfs(set)
}
