//! The lenders of a VM's configuration.

use std::path::{Path, PathBuf};

use farside_daemon::{DeviceId, VmName, paths};
use farside_lender_protocol::{
    Address, CallError, Client, FindError, Generation, HeldFence, Instance, Secret, Transport,
    find_device,
};
use farside_vm_config::{VmConfig, places, ram_ranges};

use super::{LocalHost, config_of, is_libvirt, requirements};
use crate::{Configuration, Error, ErrorKind, FoundDevice, Identity, Lenders, Result};

impl Lenders for LocalHost {
    fn find_each(
        &self,
        vm: &VmName,
        configuration: &Configuration,
    ) -> Result<Vec<Result<FoundDevice>>> {
        let config = config_of(vm, configuration)?;
        let (lenders, pki) = (config.all_lenders(), config.pki());
        let has_ntb = requirements::endpoint(&config)?.is_some();
        let devices = config.devices.iter().enumerate();
        Ok(devices
            .map(|(position, device)| {
                let port = device.port.unwrap_or(position as u16);
                let (found, transport) = find(vm, &device.id, port, &lenders, &pki)?;
                match transport {
                    Transport::Ntb if !has_ntb => Err(no_ntb(&found)),
                    _ => Ok(found),
                }
            })
            .collect())
    }

    fn check_windows(
        &self,
        vm: &VmName,
        configuration: &Configuration,
        device: &FoundDevice,
    ) -> Result<()> {
        let config = config_of(vm, configuration)?;
        // libvirt defines the RAM of a domain; the configuration need not.
        if is_libvirt(&config) && config.memory.is_none() {
            return Ok(());
        }
        let ram = ram_ranges(config.machine.unwrap_or_default(), config.memory());
        let mut client = Client::connect_by(&device.lender, None, &config.pki(), None)?;
        let bars = client.describe(&device.id)?.bars;
        let transport = Transport::between(&device.lender, bars);
        Ok(client.check(&device.id, transport, ram)?)
    }

    fn hand_over(
        &self,
        lender: &Address,
        device: &DeviceId,
        vm: &VmName,
        migration: &str,
        supersedes: Option<HeldFence>,
        secret: Secret,
    ) -> Result<Generation> {
        let mut client = Client::connect_by(lender, None, &pki_of(vm), None)?;
        Ok(client.hand_over(device, vm, migration, supersedes, secret)?)
    }
}

/// The directory of the certificates for a VM's lenders, by its configuration on this host.
fn pki_of(vm: &VmName) -> PathBuf {
    let config = VmConfig::load(&places::description(vm));
    config.map_or_else(|_| paths::pki_dir(), |config| config.pki())
}

/// The lender that has a device, and its description of it.
fn find(
    vm: &VmName,
    id: &DeviceId,
    port: u16,
    lenders: &[Address],
    pki: &Path,
) -> Result<(FoundDevice, Transport)> {
    match find_device(id, lenders, |lender| look(vm, id, port, lender, pki)) {
        Ok((_, found)) => Ok(found),
        Err(FindError::Lender(error)) => Err(Error::from(error).at(&format!("device {id}"))),
        Err(error) => Err(Error::new(ErrorKind::Lender, error.to_string())),
    }
}

fn look(
    vm: &VmName,
    id: &DeviceId,
    port: u16,
    lender: &Address,
    pki: &Path,
) -> std::result::Result<(Instance, (FoundDevice, Transport)), CallError> {
    // A network peer sees the fences of this VM alone.
    let mut client = Client::connect_by(lender, Some(vm), pki, None)?;
    let described = client.describe(id)?;
    let entry = client.status(id)?.entry;
    let transport = Transport::between(lender, described.bars);
    let found = FoundDevice {
        id: id.to_owned(),
        port,
        lender: lender.clone(),
        lender_name: client.lender().to_owned(),
        identity: Identity::of(&described),
        holder: entry
            .borrowed_by
            .map(|holder| (holder.vm, holder.generation)),
        fences: entry.fences,
    };
    Ok((client.instance()?, (found, transport)))
}

fn no_ntb(device: &FoundDevice) -> Error {
    Error::refused(format!(
        "device {} is a physical function at {}, on another host, whose DMA reaches this one only through an NTB: add `ntb = true` to the VM's configuration, and the endpoint's address to {} here",
        device.id,
        device.lender,
        places::host().display()
    ))
}
