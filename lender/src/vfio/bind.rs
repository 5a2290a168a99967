//! Binds functions for a lender that has no privileges: `farside bind`.

use std::{collections::BTreeSet, io, path::Path};

use farside_daemon::{SocketGroup, files};
use farside_error_chain::Chain;
use farside_host_pci::{Binding, CreatedVfs, Force, Former, HostPci};
use farside_pci::Bdf;
use farside_vfio::{Api, VfioError, check_free, nodes};

use super::find::{BindError, api, create_vfs, find};
use crate::config::{Config, Source};

/// Longest record.
const MAX_RECORD: u64 = 1 << 20;

/// Binds all functions of `config` to vfio-pci, creates its virtual functions first, and lets members
/// of `group` open them. Adds the functions to those in the file `record`. On an error all functions
/// are returned to their drivers, except those that were on vfio-pci before: a VM may use them.
///
/// # Errors
/// A [`BindError`].
pub fn bind(config: &Config, group: &SocketGroup, record: &Path) -> Result<(), BindError> {
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
    let taken = bindings.iter().map(|(binding, _)| binding);
    let taken = taken.filter(|binding| !matches!(binding.former(), Former::Kept(_)));
    let mut bound = recorded(record)?;
    bound.extend(taken.map(Binding::bdf));
    write_record(record, &bound)?;
    for (binding, _) in bindings {
        binding.leave();
    }
    vfs.into_iter().for_each(CreatedVfs::leave);
    Ok(())
}

/// Returns the functions that [`bind`] has bound to their drivers, except those that a process has
/// open, and virtual functions: these stay as they are. They are those of `config` and those in the
/// file `record`, which `config` may have had before.
///
/// # Errors
/// [`BindError::NotReturned`], after all functions were tried.
pub fn release(config: &Config, record: &Path) -> Result<(), BindError> {
    let host = HostPci::new();
    let mut failed = Vec::new();
    let mut tried = |what: String, result: Result<(), BindError>| {
        if let Err(error) = result {
            log::error!("{what}: {error}", error = Chain(&error));
            failed.push(what);
        }
    };
    let mut functions: BTreeSet<Bdf> = config.ntb.iter().map(|ntb| ntb.function).collect();
    for device in &config.device {
        if let Source::Vfio(vfio) = &device.source {
            match host.select(&vfio.function) {
                Ok(selected) => functions.extend(selected.iter().map(|info| info.bdf)),
                Err(error) => tried(format!("device {}", device.id), Err(error.into())),
            }
        }
    }
    let recorded = match recorded(record) {
        Ok(recorded) => recorded,
        Err(error) => {
            tried(record.display().to_string(), Err(error));
            BTreeSet::new()
        }
    };
    functions.extend(still_bound(&host, &recorded));
    for bdf in functions {
        tried(bdf.to_string(), release_function(&host, config, bdf));
    }
    // A record that could not be read stays for the administrator.
    if !recorded.is_empty() {
        let left = still_bound(&host, &recorded).collect();
        tried(record.display().to_string(), write_record(record, &left));
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(BindError::NotReturned(failed)),
    }
}

/// Those of `functions` that are on vfio-pci because [`bind`] has bound them. Others were returned by
/// hand, or removed from the host.
fn still_bound(host: &HostPci, functions: &BTreeSet<Bdf>) -> impl Iterator<Item = Bdf> {
    let bound = |bdf: &&Bdf| host.was_bound(bdf).unwrap_or(false);
    functions.iter().filter(bound).copied()
}

/// The functions in a record; none if it is missing.
fn recorded(record: &Path) -> Result<BTreeSet<Bdf>, BindError> {
    let parse = |bytes: Vec<u8>| -> io::Result<BTreeSet<Bdf>> {
        let text = String::from_utf8(bytes).map_err(io::Error::other)?;
        let functions = text
            .lines()
            .map(|line| line.parse().map_err(io::Error::other));
        functions.collect()
    };
    let bytes = files::read_bounded(record, MAX_RECORD);
    let functions = bytes.and_then(|bytes| bytes.map_or_else(|| Ok(BTreeSet::new()), parse));
    functions.map_err(at(record))
}

fn write_record(record: &Path, functions: &BTreeSet<Bdf>) -> Result<(), BindError> {
    if functions.is_empty() {
        return files::remove(record).map_err(at(record));
    }
    let lines: String = functions.iter().map(|bdf| format!("{bdf}\n")).collect();
    files::replace_private(record, lines.as_bytes()).map_err(at(record))
}

fn at(record: &Path) -> impl FnOnce(io::Error) -> BindError {
    let path = record.to_owned();
    move |source| BindError::Record { path, source }
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

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    /// A function in a made-up sysfs, bound to vfio-pci.
    fn function(root: &Path, bdf: &str, driver_override: &str) {
        let dir = root.join("sys/bus/pci/devices").join(bdf);
        fs::create_dir_all(&dir).unwrap();
        for (file, text) in [
            ("vendor", "0x1b36"),
            ("device", "0x0010"),
            ("class", "0x010802"),
            ("driver_override", driver_override),
        ] {
            fs::write(dir.join(file), text).unwrap();
        }
        symlink("../../drivers/vfio-pci", dir.join("driver")).unwrap();
    }

    #[test]
    fn functions_that_are_configured_no_more_are_returned() {
        let root = tempfile::tempdir().unwrap();
        let record = root.path().join("run/bound");
        assert_eq!(recorded(&record).unwrap(), BTreeSet::new());
        let [ours, moved, gone] =
            ["0000:03:00.0", "0000:04:00.0", "0000:05:00.0"].map(|bdf| bdf.parse().unwrap());
        function(root.path(), "0000:03:00.0", "vfio-pci");
        // The administrator has bound it since.
        function(root.path(), "0000:04:00.0", "(null)");
        let bound = BTreeSet::from([ours, moved, gone]);
        write_record(&record, &bound).unwrap();
        assert_eq!(recorded(&record).unwrap(), bound);
        let host = HostPci::at(root.path());
        let left: Vec<Bdf> = still_bound(&host, &bound).collect();
        assert_eq!(left, [ours]);
        write_record(&record, &BTreeSet::new()).unwrap();
        assert!(!record.exists());
        fs::write(&record, "eth0\n").unwrap();
        let error = Chain(&recorded(&record).unwrap_err()).to_string();
        assert!(error.contains("run/bound"), "{error}");
        let released = release(&Config::default(), &record);
        assert!(matches!(released, Err(BindError::NotReturned(failed)) if failed.len() == 1));
        assert!(record.exists());
    }
}
