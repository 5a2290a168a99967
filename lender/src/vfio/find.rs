//! Finds the configured functions and binds them to vfio-pci.

use farside_daemon::{DeviceId, NameError};
use farside_host_pci::{Binding, CreatedVfs, Filter, Force, HostPci, PciError};
use farside_pci::Bdf;

use crate::config::{VfioConfig, VfsConfig};

/// A function bound to vfio-pci.
pub(crate) struct Found {
    pub(crate) id: DeviceId,
    pub(crate) bdf: Bdf,
    pub(crate) binding: Binding,
    pub(crate) allow_dirty: bool,
    pub(crate) host: HostPci,
}

/// An error that prevents a function from being lent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FindError {
    #[error(transparent)]
    Pci(#[from] PciError),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("function {bdf} is lent as {first} already; name it once")]
    Twice { bdf: Bdf, first: DeviceId },
}

/// Creates virtual functions.
pub(crate) fn create_vfs(host: &HostPci, vfs: &[VfsConfig]) -> Result<Vec<CreatedVfs>, PciError> {
    let create = |vfs: &VfsConfig| host.create_vfs(&vfs.of, vfs.count, Force::No);
    vfs.iter().map(create).collect()
}

/// Binds all functions that `config` selects for device `id`, and adds them to `found`.
pub(crate) fn find(
    host: &HostPci,
    id: &DeviceId,
    config: &VfioConfig,
    found: &mut Vec<Found>,
) -> Result<(), FindError> {
    let force = match config.force {
        true => Force::Yes,
        false => Force::No,
    };
    let functions = host.select(&config.function)?;
    let several = functions.len() > 1 || matches!(config.function, Filter::VfsOf(_));
    for (n, function) in functions.into_iter().enumerate() {
        let bdf = function.bdf;
        if let Some(first) = found.iter().find(|found| found.bdf == bdf) {
            let first = first.id.clone();
            return Err(FindError::Twice { bdf, first });
        }
        found.push(Found {
            id: match several {
                true => format!("{id}-{n}").parse()?,
                false => id.clone(),
            },
            bdf,
            binding: host.bind_to_vfio(&bdf, force)?,
            allow_dirty: config.allow_dirty,
            host: host.clone(),
        });
    }
    Ok(())
}

/// Checks that each function can have its own IOMMU domain.
pub(crate) fn check_groups(host: &HostPci, found: &[Found]) -> Result<(), PciError> {
    let lent: Vec<Bdf> = found.iter().map(|found| found.bdf).collect();
    for bdf in &lent {
        host.group(bdf)?.viable(bdf, &lent)?;
    }
    Ok(())
}
