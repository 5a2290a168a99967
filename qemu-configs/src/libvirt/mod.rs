//! Domains of libvirt that borrow devices.
//!
//! libvirt (11.3 and 12.8 looked at) has no element for a vfio-user device, so
//! the devices and the root ports above them are arguments in
//! `<qemu:commandline>`, at addresses that libvirt does not give out itself. What
//! is ours in a domain is named in an element of `<metadata>`:
//!
//! ```xml
//! <farside:vm xmlns:farside='urn:farside:libvirt:1' spare-ports='2' added='metadata commandline'>
//!   <farside:device id='disk0' port='0'/>
//!   <farside:lender address='tcp:10.0.0.2:7410'/>
//! </farside:vm>
//! ```
//!
//! libvirt keeps it as it is when it writes the domain in its own way, which drops
//! comments and changes white space; so this is also how the devices are found
//! again, to be changed or taken out. `added` says which surroundings were made
//! for them, to go with them.

mod anchor;
mod check;
mod domain;
mod edit;
mod error;
mod fragments;
mod generate;
mod memory;
mod metadata;
mod remove;
mod splice;
mod syntax;

pub use anchor::{ANCHOR_FILE, anchor_image};
pub use check::check_domain;
pub use domain::{DomainVm, read_domain};
pub use edit::{Borrowed, BorrowedDevice, add_devices};
pub use error::DomainError;
pub use generate::DomainOptions;
pub use metadata::DomainDevice;
pub use remove::{remove_all, remove_devices};

/// Namespace of our element in `<metadata>`.
pub const NAMESPACE: &str = "urn:farside:libvirt:1";
/// libvirt's namespace of arguments for QEMU.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";
