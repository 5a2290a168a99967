//! PCI functions of this host, through sysfs.
#![forbid(unsafe_code)]

mod bdf;

pub use bdf::{Bdf, BdfError};
