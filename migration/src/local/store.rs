//! The files of VMs, and libvirt's definitions.

use std::{io, path::PathBuf};

use farside_daemon::{VmName, files};
use farside_lender_protocol::Fences;
use farside_vm_config::places;

use super::{LocalHost, config_of, domain, is_libvirt};
use crate::{Configuration, Error, ErrorKind, Journal, MovedMarker, Result, Store};

/// Longest configuration that is read, bytes.
const MAX_CONFIGURATION: u64 = 1 << 20;

fn moved_marker_path(vm: &VmName) -> PathBuf {
    places::vm_state(vm).join("moved.json")
}

impl Store for LocalHost {
    fn journal(&self, vm: &VmName) -> Result<Option<Journal>> {
        Journal::load(&Self::journal_path(vm))
    }

    fn write_journal(&self, journal: &Journal) -> Result<()> {
        journal.save(&Self::journal_path(&journal.vm))
    }

    fn configuration(&self, vm: &VmName) -> Result<Option<Configuration>> {
        let path = places::description(vm);
        // The operator's, who may have linked it.
        let path = path.canonicalize().unwrap_or(path);
        let Some(bytes) = files::read_bounded(&path, MAX_CONFIGURATION)? else {
            return Ok(None);
        };
        let toml = String::from_utf8(bytes)
            .map_err(|_| Error::new(ErrorKind::Host, format!("{} is not UTF-8", path.display())))?;
        let mut configuration = Configuration {
            toml,
            ..Configuration::default()
        };
        if is_libvirt(&config_of(vm, &configuration)?) {
            configuration.domain = Some(domain::xml(vm)?);
            configuration.autostart = domain::starts_with_host(vm)?;
        }
        Ok(Some(configuration))
    }

    fn install(&self, vm: &VmName, configuration: &Configuration) -> Result<()> {
        if let Some(xml) = &configuration.domain {
            domain::define(vm, xml, configuration.autostart)?;
        }
        files::replace(&places::description(vm), configuration.toml.as_bytes())?;
        Ok(())
    }

    fn uninstall(&self, vm: &VmName) -> Result<()> {
        let state = places::vm_state(vm);
        // A configuration implies its domain: it is installed last, and removed first.
        if let Some(configuration) = self.configuration(vm)? {
            if let Some(xml) = &configuration.domain {
                files::replace(&state.join("moved.xml"), xml.as_bytes())?;
            }
            files::replace(&state.join("moved.toml"), configuration.toml.as_bytes())?;
            files::remove(&places::description(vm))?;
        }
        // If this was cut off in between, the domain has no configuration any more.
        let by_libvirt = self
            .journal(vm)?
            .is_some_and(|journal| journal.configuration.domain.is_some());
        if by_libvirt && domain::exists(vm)? {
            domain::undefine(vm)?;
        }
        Ok(())
    }

    fn fences(&self, vm: &VmName) -> Result<Fences> {
        Ok(Fences::load(&places::fences(vm))?)
    }

    fn write_fences(&self, vm: &VmName, fences: &Fences) -> Result<()> {
        let path = places::fences(vm);
        match fences.0.is_empty() {
            true => files::remove(&path)?,
            false => fences.save(&path)?,
        }
        Ok(())
    }

    fn moved_marker(&self, vm: &VmName) -> Result<Option<MovedMarker>> {
        let path = moved_marker_path(vm);
        let Some(bytes) = files::read_bounded(&path, MAX_CONFIGURATION)? else {
            return Ok(None);
        };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| Error::new(ErrorKind::Host, format!("{}: {error}", path.display())))
    }

    fn write_moved_marker(&self, vm: &VmName, marker: Option<&MovedMarker>) -> Result<()> {
        let path = moved_marker_path(vm);
        match marker {
            None => files::remove(&path)?,
            Some(marker) => {
                let text = serde_json::to_vec_pretty(marker).map_err(io::Error::other)?;
                files::replace(&path, &text)?;
            }
        }
        Ok(())
    }
}
