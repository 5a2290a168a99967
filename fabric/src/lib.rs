//! The path of a DMA from a borrowed device to the borrower's memory.
//!
//! A device at the lender puts an IOVA on its bus, and the bytes must land in guest
//! RAM at another host. Three tables stand between, each with a different owner,
//! each able to refuse:
//!
//! ```text
//!            lender                                borrower
//!   device ──► lender's IOMMU ──► NTB window ──► borrower's IOMMU ──► memory
//!       IOVA (= GPA)       BusAddress       PeerAddress          fd + offset
//!              │                  │                  │
//!        LenderDomain           Window         BorrowerDomain     a refusal is a Fault
//! ```
//!
//! [`LenderPath`] sets up the first two for one borrow, [`BorrowerDomain`] the
//! third. [`soft`] implements all of them on one machine and enforces in
//! software the limits ([`NtbLimits`]) that an adapter has in hardware; Linux
//! VFIO and register-programmed NTBs are further implementations of the same
//! calls.
//!
//! [`memory`] maps what the other side shares, and survives its being
//! truncated; [`SharedFiles`] maps each file once, within a [`Quota`]; [`pin`] keeps it resident while a device may reach it, if
//! [`host_memory`] has room for it.
#![deny(unsafe_code)]

pub mod host_memory;
pub mod limits;
pub mod memory;
pub mod pin;
pub mod soft;

mod address;
mod backing;
mod error;
mod fault;
mod fault_log;
mod files;
mod lut;
mod mapping;
mod owner;
mod pages;
mod path;
mod quota;
mod range_table;
mod sigbus;
mod size;
mod tables;
mod vfio_device;

pub use address::{Address, AddressRange, BusAddress, Iova, PeerAddress};
pub use error::FabricError;
pub use fault::{Access, Fault, FaultReason};
pub use fault_log::{FaultLog, FaultRecord, FaultSummary, ReasonCounts};
pub use files::SharedFiles;
pub use limits::{LimitError, NtbLimits, NtbUse, VmShare, fits};
pub use memory::MemoryRange;
pub use owner::Owner;
pub use pages::{PAGE_SIZE, PageCounts};
pub use path::{BorrowerDomain, LenderPath, Usage, WindowUse};
pub use quota::{Budget, Quota, QuotaError, SharedQuota};
pub use range_table::{MAX_MAPPINGS, RangeTable};
pub use size::{Size, deserialize_optional_size, deserialize_size, parse_size};
pub use tables::{AdapterUsage, LutRange, NtbTables, TakenWindow};
pub use vfio_device::GET_DEVICE_INFO;
