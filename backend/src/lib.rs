//! The per-VM process: serves borrowed devices to QEMU over vfio-user.

pub mod config_space;
pub mod vfio_user;
