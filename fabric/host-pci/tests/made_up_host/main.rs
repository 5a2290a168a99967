//! The crate on made-up hosts: directories that look like sysfs and proc, with a
//! stand-in for the kernel that does what writing there does.

mod binding;
mod finding;
mod groups;
mod host;
mod sriov;
mod usage;
