//! The host of this process: files, binaries, lenders.

mod domain;
mod lenders;
pub(crate) mod requirements;
mod runner;
mod store;

use std::{fs, path::PathBuf};

use farside_daemon::VmName;
use farside_error_chain::Chain;
use farside_vm_config::{DeviceConfig, Manager, VmConfig, places};

use crate::{
    Configuration, Error, HostFacts, Journal, Result,
    check::{self, Facts},
};

/// This host.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalHost;

impl LocalHost {
    /// The path of the journal of a VM's migration.
    pub fn journal_path(vm: &VmName) -> PathBuf {
        places::state_dir()
            .join("migrations")
            .join(format!("{vm}.json"))
    }

    /// The journals of all VMs, with an error for each that cannot be read.
    pub fn journals() -> Vec<Result<Journal>> {
        let Ok(entries) = fs::read_dir(places::state_dir().join("migrations")) else {
            return Vec::new();
        };
        let mut paths: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|ext| ext == "json"))
            .collect();
        paths.sort();
        paths
            .iter()
            .filter_map(|path| Journal::load(path).transpose())
            .collect()
    }
}

/// Parses the text of a configuration, for a VM on this host.
pub(crate) fn config_of(vm: &VmName, configuration: &Configuration) -> Result<VmConfig> {
    let config = VmConfig::parse(&configuration.toml, &places::description(vm))
        .map_err(|error| Error::refused(Chain(&error).to_string()))?;
    match &config.name {
        Some(name) if name != vm => Err(Error::refused(format!(
            "the configuration of VM {vm} is that of VM {name}"
        ))),
        _ => Ok(config),
    }
}

fn is_libvirt(config: &VmConfig) -> bool {
    config.manager == Some(Manager::Libvirt)
}

impl HostFacts for LocalHost {
    fn name(&self) -> String {
        let name = rustix::system::uname();
        name.nodename().to_string_lossy().into_owned()
    }

    fn check_movable(&self, vm: &VmName, configuration: &Configuration, live: bool) -> Result<()> {
        if configuration.domain.is_some() {
            return domain::check_movable(vm);
        }
        let devices = config_of(vm, configuration)?.devices;
        match devices.iter().find(|device| device.function > 0) {
            Some(DeviceConfig { id, .. }) if live => Err(Error::refused(format!(
                "device {id} of VM {vm} is one function of a device, which a running guest does not release: move it without --live"
            ))),
            _ => Ok(()),
        }
    }

    fn check_name_free(&self, vm: &VmName, configuration: &Configuration) -> Result<()> {
        match &configuration.domain {
            Some(xml) => domain::is_free(vm, xml),
            None => Ok(()),
        }
    }

    fn missing(&self, vm: &VmName, configuration: &Configuration) -> Result<Vec<Error>> {
        requirements::missing(vm, configuration)
    }

    fn facts(&self, vm: &VmName, configuration: &Configuration, runs: bool) -> Result<Facts> {
        check::look(vm, configuration, runs)
    }
}
