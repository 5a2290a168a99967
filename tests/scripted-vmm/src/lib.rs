//! A program that stands where QEMU would, for tests in places where a nested
//! QEMU would take minutes.
//!
//! It is a VMM and its guest in one: it connects to a backend's device socket
//! with a vfio-user client that others wrote (the crate `vfio_user`), brings
//! guest RAM, does what firmware and a Linux guest do to a PCI function, and
//! drives an NVMe drive with a driver of its own. A run is a list of
//! [`step::Step`]s; what came of them is a [`report::Report`].
//!
//! - [`ram`]: guest RAM in a memfd, with guard patterns and snapshots;
//! - [`device`]: the client, and BARs by mapping or by trap;
//! - [`pci`]: configuration space as firmware and drivers use it;
//! - [`vectors`]: the eventfds of MSI-X, every interrupt counted;
//! - [`nvme`]: the driver;
//! - [`session`]: performs steps; [`checks`] and [`workload`] are the longer ones;
//! - [`watchdog`]: the client waits for ever where an answer never comes.
//!
//! It depends on no crate of the product, so that it misunderstands nothing in
//! the same way.

#![forbid(unsafe_code)]

pub mod checks;
pub mod device;
pub mod machine;
pub mod number;
pub mod nvme;
pub mod pattern;
pub mod pci;
pub mod ram;
pub mod report;
pub mod session;
pub mod step;
pub mod timing;
pub mod vectors;
pub mod watchdog;
pub mod workload;
