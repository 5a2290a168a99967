//! What a controller on a medium that fails is tested by. The fuzz targets, which share `world`, have none of it.

pub use super::watch::Watch;
pub use crate::block::faulty::Faults;
