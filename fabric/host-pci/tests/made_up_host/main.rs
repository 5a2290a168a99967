//! The crate on made-up hosts: directories that look like sysfs and proc, with a stand-in
//! for the kernel that reacts to writes.

mod binding;
mod finding;
mod groups;
mod host;
mod nvme;
mod sriov;
mod usage;
