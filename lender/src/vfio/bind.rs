//! Binds functions for a lender that has no privileges: `farside bind`.

use std::path::Path;

use farside_daemon::SocketGroup;
use farside_error_chain::Chain;
use farside_host_pci::{Binding, CreatedVfs, Force, HostPci};
use farside_pci::Bdf;
use farside_vfio::{Api, VfioError, check_free, nodes};

use super::find::{BindError, api, create_vfs, find};
use crate::config::{Config, Source};

/// Binds all functions of `config` to vfio-pci, creates its virtual functions first, and lets members
/// of `group` open them. On an error all functions are returned to their drivers, except those that
/// were on vfio-pci before: a VM may use them.
///
/// # Errors
/// A [`BindError`].
pub fn bind(config: &Config, group: &SocketGroup) -> Result<(), BindError> {
    let host = HostPci::new();
    let vfs = create_vfs(&host, config)?;
    // Dropped, and thereby undone, before the virtual functions.
    let mut bindings = Vec::new();
    if let Some(ntb) = config.ntb {
        let binding = host.bind_to_vfio(&ntb.function, Force::No)?;
        bindings.push((binding.leave_earlier(), Api::detect()?));
    }
    for found in find(&host, config, Binding::leave_earlier)? {
        bindings.push((found.binding, api(config)?));
    }
    if bindings.is_empty() {
        log::info!("no device of this lender is a function of this host");
    }
    for (binding, api) in &bindings {
        for node in nodes(binding.bdf(), *api)? {
            let path = Path::new(&node);
            // The functions' own nodes are for the group alone; other programs use this one, too.
            if path != Path::new("/dev/iommu") || !group.can_open(path) {
                group.admit(path)?;
            }
            log::info!("{}: group {} may open {node}", binding.bdf(), group.name());
        }
    }
    for (binding, _) in bindings {
        binding.leave();
    }
    vfs.into_iter().for_each(CreatedVfs::leave);
    Ok(())
}

/// Returns the functions that [`bind`] has bound to their drivers, except those that a process has
/// open, and virtual functions: these stay as they are.
///
/// # Errors
/// [`BindError::NotReturned`], after all functions were tried.
pub fn release(config: &Config) -> Result<(), BindError> {
    let host = HostPci::new();
    let mut failed = Vec::new();
    let mut tried = |what: String, result: Result<(), BindError>| {
        if let Err(error) = result {
            log::error!("{what}: {error}", error = Chain(&error));
            failed.push(what);
        }
    };
    let mut functions: Vec<Bdf> = config.ntb.iter().map(|ntb| ntb.function).collect();
    for device in &config.device {
        if let Source::Vfio(vfio) = &device.source {
            match host.select(&vfio.function) {
                Ok(selected) => functions.extend(selected.iter().map(|info| info.bdf)),
                Err(error) => tried(format!("device {}", device.id), Err(error.into())),
            }
        }
    }
    for bdf in functions {
        tried(bdf.to_string(), release_function(&host, config, bdf));
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(BindError::NotReturned(failed)),
    }
}

fn release_function(host: &HostPci, config: &Config, bdf: Bdf) -> Result<(), BindError> {
    if !host.was_bound(&bdf)? {
        return Ok(());
    }
    // Unbinding it would wait for the process.
    if let Err(error @ VfioError::Busy { .. }) = check_free(bdf, api(config)?) {
        log::warn!("{bdf} stays on vfio-pci: {error}", error = Chain(&error));
        return Ok(());
    }
    Ok(host.bind_to_vfio(&bdf, Force::No)?.restore()?)
}
