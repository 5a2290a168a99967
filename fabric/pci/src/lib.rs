//! PCI vocabulary: a function's address, the registers of its configuration
//! space, and its description as a borrower reads it.
//!
//! Plain data; no I/O. "PCIe" is the PCI Express Base Specification 6.0.
#![forbid(unsafe_code)]

mod bdf;
mod description;
mod image;
pub mod regs;

pub use bdf::{Bdf, BdfError};
pub use description::{Bar, BarKind, Description, SparseMmapArea};
pub use image::ConfigImage;
