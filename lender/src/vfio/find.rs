//! Finds the configured functions and binds them to vfio-pci.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use farside_daemon::{DeviceId, GroupError, NameError};
use farside_host_pci::{Binding, CreatedVfs, Filter, Force, HostPci, PciError};
use farside_pci::Bdf;
use farside_vfio::{Api, VfioError};

use super::{
    rom::{BadRom, Rom},
    shared::SharedGroup,
};
use crate::{
    config::{Borrower, Config, DeviceConfig, Source, VfioConfig, VfsConfig},
    registry::Group,
};

/// A function bound to vfio-pci.
pub(crate) struct Found {
    pub(crate) id: DeviceId,
    pub(crate) bdf: Bdf,
    pub(crate) binding: Binding,
    pub(crate) allow_dirty: bool,
    pub(crate) host: HostPci,
    pub(crate) rom: Rom,
    /// Who may borrow it.
    pub(crate) borrowers: Vec<Borrower>,
    /// Its IOMMU group, if others of it are lent, too.
    pub(crate) group: Option<Arc<SharedGroup>>,
}

/// Why the functions of a lender cannot be bound, or returned to their drivers.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Of one device.
    #[error("cannot lend device {id}")]
    Device {
        /// The device.
        id: DeviceId,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A function, its IOMMU group, or virtual functions.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// VFIO is missing, or a function cannot be opened.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// A device node cannot be given to the lender's group.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The record of the functions that are bound.
    #[error(
        "cannot use {}, the record of the functions that are bound: if it is damaged, return functions that lender.toml no longer has to their drivers by hand, and remove it",
        path.display()
    )]
    Record {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Functions that stay on vfio-pci, each with its own message in the log.
    #[error("not returned to their drivers: {}: see above", .0.join(", "))]
    NotReturned(Vec<String>),
}

#[derive(Debug, thiserror::Error)]
enum FindError {
    #[error(transparent)]
    Pci(#[from] PciError),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error(transparent)]
    Rom(#[from] BadRom),
    #[error("function {bdf} is lent as {first} already; name it once")]
    Twice { bdf: Bdf, first: DeviceId },
}

/// Creates the virtual functions of `config`.
pub(crate) fn create_vfs(host: &HostPci, config: &Config) -> Result<Vec<CreatedVfs>, BindError> {
    let create = |vfs: &VfsConfig| host.create_vfs(&vfs.of, vfs.count, Force::No);
    Ok(config.vfs.iter().map(create).collect::<Result<_, _>>()?)
}

/// Binds all functions of `config`, and checks that each can have an IOMMU domain that no driver of the host shares. `bound` gets
/// each binding at once: on an error they are dropped.
pub(crate) fn find(
    host: &HostPci,
    config: &Config,
    bound: fn(Binding) -> Binding,
) -> Result<Vec<Found>, BindError> {
    let mut found = Vec::new();
    for device in &config.device {
        if let Source::Vfio(vfio) = &device.source {
            find_of(host, device, vfio, bound, &mut found).map_err(|error| BindError::Device {
                id: device.id.clone(),
                source: error.into(),
            })?;
        }
    }
    let lent: Vec<Bdf> = found.iter().map(|found| found.bdf).collect();
    let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (n, bdf) in lent.iter().enumerate() {
        let group = host.group(bdf)?;
        group.viable(bdf, &lent)?;
        groups.entry(group.id).or_default().push(n);
    }
    groups.retain(|_, members| members.len() > 1);
    for (number, members) in groups {
        let devices = members.iter().map(|&n| found[n].id.clone()).collect();
        let group = SharedGroup::new(Group { number, devices });
        for n in members {
            found[n].group = Some(Arc::clone(&group));
        }
    }
    Ok(found)
}

/// The VFIO API that `config` names, else this host's.
pub(crate) fn api(config: &Config) -> Result<Api, VfioError> {
    config.vfio_api.map_or_else(Api::detect, Ok)
}

/// Binds all functions that `config` selects for `device`, and adds them to `found`.
fn find_of(
    host: &HostPci,
    device: &DeviceConfig,
    config: &VfioConfig,
    bound: fn(Binding) -> Binding,
    found: &mut Vec<Found>,
) -> Result<(), FindError> {
    let id = &device.id;
    let force = match config.force {
        true => Force::Yes,
        false => Force::No,
    };
    let rom = Rom::new(&config.rom)?;
    let functions = host.select(&config.function)?;
    let several = functions.len() > 1 || matches!(config.function, Filter::VfsOf(_));
    for (n, function) in functions.into_iter().enumerate() {
        let bdf = function.bdf;
        if let Some(first) = found.iter().find(|found| found.bdf == bdf) {
            let first = first.id.clone();
            return Err(FindError::Twice { bdf, first });
        }
        host.check_vf_online(&bdf)?;
        found.push(Found {
            id: match several {
                true => format!("{id}-{n}").parse()?,
                false => id.clone(),
            },
            bdf,
            binding: bound(host.bind_to_vfio(&bdf, force)?),
            allow_dirty: config.allow_dirty,
            host: host.clone(),
            rom: rom.clone(),
            borrowers: device.borrowers.clone(),
            group: None,
        });
    }
    Ok(())
}
