//! A fabric in software: the hardware of both hosts, simulated inside the
//! lender.
//!
//! An [`Adapter`] stands for the lender's NTB; all its devices share its limits.
//! [`Adapter::attach`] makes a [`Path`] for a borrowed device. A path holds
//! the three tables of the crate's picture, apart as in hardware, and a small
//! cache of what they make of an IOVA, as an IOTLB is.
//!
//! Only setting up and taking down take the adapter's lock. A path belongs to
//! the thread that runs the device: translating takes no lock and allocates
//! nothing, whether the cache hits or misses.

mod adapter;
mod iotlb;
mod path;

pub use crate::MAX_MAPPINGS;
pub use adapter::{Adapter, AdapterTables};
pub use path::Path;
