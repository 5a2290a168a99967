//! QEMU command lines for VMs that borrow devices.
//!
//! A borrowed device works only when several options agree: guest RAM that other processes can map,
//! a port for each device, a message timeout that fits the RAM. [`Vm`] describes a VM,
//! [`Vm::command_line`] is all of QEMU's arguments for it. For other command lines,
//! [`check_shared_memory`] reports missing options. [`QemuBinary::probe`] checks whether a QEMU
//! binary supports borrowed devices.
//!
//! For libvirt, [`Vm::libvirt_domain`] writes a whole domain; [`add_devices`], [`remove_devices`]
//! and [`check_domain`] work on an existing one, and [`read_domain`] returns the devices that a
//! domain borrows.
//!
//! Everything here is text: only the probe runs a process, and only for QEMU's own help.

#![forbid(unsafe_code)]

mod check;
mod command_line;
mod json_form;
mod layout;
mod libvirt;
mod parts;
mod ports;
mod probe;
mod read_config;
mod shared_memory;
mod timeout;
mod viommu;
mod vm;

pub use check::VmError;
pub use command_line::CommandLine;
pub use layout::ram_split;
pub use libvirt::{
    ANCHOR_FILE, Borrowed, BorrowedDevice, DomainDevice, DomainError, DomainOptions, DomainVm,
    NAMESPACE, add_devices, anchor_image, check_domain, read_domain, remove_all, remove_devices,
};
pub use probe::{ProbeError, QemuBinary, SANDBOX_OPTION, Version};
pub use read_config::ReadConfig;
pub use shared_memory::{SharedMemoryError, check_shared_memory};
pub use timeout::message_timeout_ms;
pub use viommu::{ViommuError, check_viommu, has_viommu};
pub use vm::{Accel, Device, Firmware, HugePages, Machine, MonitorSocket, Vm, qemu_id};
