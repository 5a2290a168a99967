//! DMA faults from the kernel's log.
//!
//! VFIO has no call to report the DMA that an IOMMU refused; the IOMMU driver logs a line.
//! [`FaultReader`] follows `/dev/kmsg` for those lines, and the pure parsers [`Record::parse`] and
//! [`parse_message`] read them, for Intel VT-d, AMD-Vi and Arm SMMUv3.
//!
//! The kernel prints at most some ten faults every five seconds and then logs the number of
//! suppressed lines; [`KernelEvent::Suppressed`] and [`KernelEvent::Lost`] keep a count honest.

mod message;
mod reader;
mod record;

pub use message::{Access, BlockedInterrupt, KernelDmaFault, KernelEvent, parse_message};
pub use reader::FaultReader;
pub use record::Record;
