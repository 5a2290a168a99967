//! The configuration of a VM that borrows devices: one TOML file, the common source of its backend,
//! QEMU command line, libvirt domain and migration, so that they agree.
//!
//! ```toml
//! name = "web1"
//! devices = ["disk0", { id = "disk1", port = 3 }]
//! memory = "4 GiB"
//! cpus = 2
//! ```
//!
//! [`places`] defines the directories of VM configurations and of farside's state.

#![forbid(unsafe_code)]

mod description;
mod host;
pub mod places;
mod ram;

pub use description::{DeviceConfig, Flash, LoadError, Manager, TlsConfig, VmConfig, parse_memory};
pub use host::HostConfig;
pub use ram::ram_ranges;
