//! Builds the small kernel with iommufd, for the tests that need it.

use anyhow::Result;
use farside_testbed::{Progress, build_iommufd_kernel};

/// Builds it, unless it is cached.
pub(crate) fn run() -> Result<()> {
    let image = build_iommufd_kernel(&Progress::auto())?;
    println!("{}", image.display());
    Ok(())
}
