//! A binary that takes QEMU's place in tests where a nested QEMU would take minutes.
//!
//! It is VMM and guest in one: it connects to a backend's device socket with a third-party
//! vfio-user client (the crate `vfio_user`), provides guest RAM, does what firmware and a
//! Linux guest do to a PCI function, and has its own NVMe driver. A run is a list of
//! [`step::Step`]s; its results are a [`report::Report`].
//!
//! - [`ram`]: guest RAM in a memfd, with guard patterns and snapshots;
//! - [`device`]: the client, and BAR accesses by mapping or by trap;
//! - [`pci`]: configuration space as firmware and drivers use it;
//! - [`vectors`]: the eventfds of MSI-X, with interrupt counts;
//! - [`nvme`]: the driver;
//! - [`session`]: performs steps; [`checks`] and [`workload`] are the longer ones;
//! - [`watchdog`]: ends the process when the client blocks on a reply that never arrives.
//!
//! It depends on no crate of the product, so that it cannot share the product's misreadings
//! of the specifications.

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
pub mod virtio;
pub mod watchdog;
pub mod workload;
