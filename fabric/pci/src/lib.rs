//! PCI vocabulary: a function's address, the registers of its configuration
//! space, its description as a borrower reads it, and the [policy] of what of it a
//! borrower reaches.
//!
//! Plain data; no I/O. "PCIe" is the PCI Express Base Specification 6.0.
#![forbid(unsafe_code)]

mod bdf;
mod description;
pub mod forwarding;
mod image;
pub mod policy;
mod quirks;
pub mod regs;
pub mod rom;

pub use bdf::{Bdf, BdfError};
pub use description::{Bar, BarKind, Description, SparseMmapArea};
pub use forwarding::{Forwarding, Piece};
pub use image::ConfigImage;
pub use quirks::ConfigMirror;
