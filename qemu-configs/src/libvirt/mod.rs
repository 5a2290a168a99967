//! Domains of libvirt that borrow devices.
//!
//! libvirt (checked: 11.3 and 12.8) has no element for a vfio-user device, so the devices and their
//! root ports are arguments in `<qemu:commandline>`, at addresses that libvirt does not assign. An
//! element in `<metadata>` lists farside's parts of a domain:
//!
//! ```xml
//! <farside:vm xmlns:farside='urn:farside:libvirt:1' spare-ports='2' added='metadata commandline'>
//!   <farside:device id='disk0' port='0'/>
//!   <farside:lender address='tcp:10.0.0.2:7410'/>
//! </farside:vm>
//! ```
//!
//! libvirt preserves it when it reformats a domain, which drops comments and changes white space,
//! so this element also serves to find the devices again for a change or removal. `added` lists the
//! parent elements that were created for them, and are removed with them.

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

/// Namespace of farside's element in `<metadata>`.
pub const NAMESPACE: &str = "urn:farside:libvirt:1";
/// libvirt's namespace for QEMU arguments.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";
