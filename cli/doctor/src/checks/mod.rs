//! Judges facts: one file for each kind of problem.

mod certificates;
mod descriptions;
mod devices;
mod domains;
mod etcd;
mod hook;
mod hugepages;
mod iommu;
mod kvm;
mod lenders;
mod libvirt_confinement;
mod libvirt_user;
mod memlock;
mod memory_notes;
mod open_files;
mod qemu;
mod ram;
mod runtime;
mod sockets;
mod units;

use crate::{Facts, Finding};

/// The host first, then VMs, then lenders.
const CHECKS: &[fn(&Facts) -> Vec<Finding>] = &[
    qemu::judge,
    kvm::judge,
    iommu::judge,
    runtime::judge,
    sockets::judge,
    units::judge,
    descriptions::judge,
    ram::judge,
    memlock::judge,
    hugepages::judge,
    memory_notes::judge,
    open_files::judge,
    hook::judge,
    libvirt_user::judge,
    libvirt_confinement::judge,
    domains::judge,
    certificates::judge,
    etcd::judge,
    lenders::judge,
    devices::judge,
];

pub(crate) fn all(facts: &Facts) -> Vec<Finding> {
    CHECKS.iter().flat_map(|check| check(facts)).collect()
}

#[cfg(test)]
pub(crate) mod tests;
