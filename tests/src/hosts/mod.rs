//! The product in VMs that play hosts: each has an emulated VT-d and Linux's VFIO, and one
//! has the physical device. The guests that use it are nested VMs, run by stock QEMU.
//!
//! - [`same_host`]: lender and borrower are one host;
//! - [`two_hosts`]: each is a separate host, connected by an NTB and a network;
//! - [`shared_windows`]: the same, with two devices of one guest;
//! - [`network`]: each is a separate host, connected by a network alone, and the lender has an image;
//!   a VM moves between the two and a third;
//! - [`moves_through_ntb`]: two hosts that an NTB and a network connect; a VM with a physical device moves
//!   between them;
//! - [`grouped`]: lender and borrower are one host, and two functions of one IOMMU group are lent to one VM;
//! - [`peers`]: lender and borrower are one host, and the devices of one VM reach each other's BARs;
//! - [`peers_through_ntb`]: the same, with two lenders at another host;
//! - [`plugged`]: lender and borrower are one host, and the device is attached to a running guest;
//! - [`virtual_functions`]: two virtual functions of one device, each lent to a different
//!   guest;
//! - [`nvme_virtual_functions`]: two virtual functions of an NVMe controller, lent to one guest;
//! - [`fencing`]: three hosts that a network connects; an image of one is shared by guests of the two others, which fence each other;
//! - [`cloud_hypervisor`]: one host, and another VMM than QEMU;
//! - [`iommufd`]: one host whose kernel has VFIO's newer interface.
//!
//! Each returns facts, most of them from the kernel's own output, and does not judge them.

mod cloud_hypervisor;
mod facts;
mod fencing;
mod grouped;
mod host;
mod iommufd;
mod moves;
mod network;
mod nvme_vfs;
mod peers;
mod play;
mod plugged;
mod programs;
mod scripted;
mod sharing;
mod stage;
mod vfs;
mod with_programs;

pub use cloud_hypervisor::{CloudHypervisorFacts, cloud_hypervisor};
pub use facts::{
    Facts, GroupFacts, NetworkFacts, NtbMoves, NtbPeerFacts, NtbPlugFacts, PeerFacts, PlugFacts,
    SharingFacts, VfFacts,
};
pub use iommufd::{IommufdFacts, iommufd};
pub use programs::{Programs, stripped};
pub use with_programs::{disk_of, start_with_fio};

use anyhow::Result;
use farside_testbed::{IommufdModules, Testbed};

use crate::Cluster;

/// How often a scene makes the device access addresses outside guest RAM.
const ROGUES: u64 = 3;

/// The requirements of a scene.
pub struct Set<'a> {
    /// QEMU, kernel, guests.
    pub testbed: &'a Testbed,
    /// The product.
    pub programs: &'a Programs,
    /// A directory for sockets and images, and the processes outside all VMs.
    pub cluster: &'a Cluster,
    /// Reports progress.
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

/// An image of one host, lent to a guest of another over the network, which then moves.
pub fn network(set: &Set<'_>) -> Result<NetworkFacts> {
    network::network(set)
}

/// Two devices of one VM, lent across an NTB.
pub fn shared_windows(set: &Set<'_>) -> Result<SharingFacts> {
    sharing::sharing(set)
}

/// A VM with a physical device moves between its host and one that reaches it through an NTB.
pub fn moves_through_ntb(set: &Set<'_>) -> Result<NtbMoves> {
    moves::through_ntb(set)
}

/// A physical device is attached to a running guest of its host, and detached.
pub fn plugged(set: &Set<'_>) -> Result<PlugFacts> {
    plugged::plugged(set)
}

/// The same with a device of another host, through an NTB.
pub fn plugged_through_ntb(set: &Set<'_>) -> Result<NtbPlugFacts> {
    plugged::plugged_through_ntb(set)
}

/// Two functions of one IOMMU group, lent to one VM.
pub fn grouped(set: &Set<'_>) -> Result<GroupFacts> {
    grouped::grouped(set)
}

/// The devices of one VM reach each other's BARs. With modules, through VFIO's newer interface.
pub fn peers(set: &Set<'_>, iommufd: Option<&IommufdModules>) -> Result<PeerFacts> {
    peers::peers(set, iommufd)
}

/// The same with devices of two lenders at another host, through an NTB and over a network.
pub fn peers_through_ntb(set: &Set<'_>) -> Result<NtbPeerFacts> {
    peers::peers_through_ntb(set)
}

/// An image of one host, shared by guests of two others over the network, of which one is cut off and fenced.
pub fn fencing(set: &Set<'_>) -> Result<()> {
    fencing::fencing(set)
}

/// Two virtual functions of one device, lent simultaneously to two guests.
pub fn virtual_functions(set: &Set<'_>) -> Result<VfFacts> {
    vfs::vfs(set)
}

/// Two virtual functions of an NVMe controller, lent to one guest, and then to another one.
pub fn nvme_virtual_functions(set: &Set<'_>) -> Result<()> {
    nvme_vfs::nvme_vfs(set)
}
