//! The description of a VM that borrows devices: one TOML file, from which its
//! backend, its QEMU command line, its libvirt domain and its move to another
//! host are all made, so that they agree.
//!
//! ```toml
//! name = "web1"
//! devices = ["disk0", { id = "disk1", port = 3 }]
//! memory = "4 GiB"
//! cpus = 2
//! ```
//!
//! [`places`] says where descriptions and what farside remembers of VMs are on
//! a host.

#![forbid(unsafe_code)]

mod description;
pub mod places;
mod ram;

pub use description::{DeviceConfig, Flash, LoadError, Manager, VmConfig, parse_memory};
pub use ram::ram_ranges;
