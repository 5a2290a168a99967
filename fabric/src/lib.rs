//! Address domains between a lender and a borrower: IOMMU domains, NTB windows
//! and their limits.

pub mod memory;

mod fault;

pub use fault::{Access, Fault, FaultReason};
