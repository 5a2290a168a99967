//! Selects the VM: its configuration, and the flags that override it.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args as ClapArgs;
use farside_daemon::{DeviceId, VmName};
use farside_vm_config::{DeviceConfig, Flash, VmConfig, parse_memory, places};

use crate::values::{AccelArg, HugePagesArg, MachineArg};

#[derive(Debug, ClapArgs)]
pub(crate) struct VmFlags {
    /// Name of the VM. Its configuration, vm/NAME.toml in the configuration
    /// directory, is used if it exists.
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Option<VmName>,
    /// VM configuration (TOML); flags override it.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Guest RAM, such as 512M or 4G [default: 2G].
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    memory: Option<u64>,
    /// Number of vCPUs [default: 1].
    #[arg(long, value_name = "N")]
    cpus: Option<u32>,
    /// Chipset [default: q35].
    #[arg(long, value_enum)]
    machine: Option<MachineArg>,
    /// Accelerator [default: auto].
    #[arg(long, value_enum)]
    accel: Option<AccelArg>,
    /// Back guest RAM by huge pages of this size.
    #[arg(long, value_enum, value_name = "SIZE")]
    hugepages: Option<HugePagesArg>,
    /// Boot OVMF: its code image, and the VM's own copy of the variable store.
    #[arg(long, num_args = 2, value_names = ["CODE", "VARS"])]
    ovmf: Option<Vec<PathBuf>>,
    /// Add this device, even if its backend is not running yet.
    #[arg(long = "device", value_name = "ID")]
    pub(crate) devices: Vec<DeviceId>,
    /// Boot from this device first.
    #[arg(long, value_name = "ID")]
    boot: Option<DeviceId>,
    /// Root ports to leave free for hot plug [default: 2].
    #[arg(long, value_name = "N")]
    spare_ports: Option<u16>,
    /// QEMU binary [default: qemu-system-x86_64].
    #[arg(long, value_name = "PATH")]
    qemu: Option<PathBuf>,
}

impl VmFlags {
    /// The VM configuration, from the given file or this host's file of that VM,
    /// with the flags applied.
    pub(crate) fn describe(&self) -> anyhow::Result<VmConfig> {
        let mut config = match (&self.config, &self.vm) {
            (Some(path), _) => VmConfig::load(path)?,
            (None, Some(vm)) if places::description(vm).exists() => VmConfig::of_vm(vm)?,
            _ => VmConfig::default(),
        };
        config.name = self.vm.clone().or(config.name);
        if !self.devices.is_empty() {
            let known = std::mem::take(&mut config.devices);
            let devices = self.devices.iter().map(|id| {
                let known = known.iter().find(|device| device.id == *id).cloned();
                known.unwrap_or_else(|| DeviceConfig::from(id.clone()))
            });
            config.devices = devices.collect();
        }
        config.boot = self.boot.clone().or(config.boot);
        config.memory = self.memory.or(config.memory);
        config.cpus = self.cpus.or(config.cpus);
        config.machine = self.machine.map(MachineArg::machine).or(config.machine);
        config.accel = self.accel.map(AccelArg::accel).or(config.accel);
        config.hugepages = self.hugepages.map(HugePagesArg::pages).or(config.hugepages);
        if let Some([code, vars]) = self.ovmf.as_deref() {
            config.ovmf = Some(Flash {
                code: code.clone(),
                vars: vars.clone(),
            });
        }
        config.spare_ports = self.spare_ports.or(config.spare_ports);
        config.qemu = self.qemu.clone().or(config.qemu);
        Ok(config)
    }
}

/// The VM name of a configuration.
pub(crate) fn name_of(config: &VmConfig) -> anyhow::Result<VmName> {
    let name = config.name.clone();
    name.context("no VM given: use --vm NAME")
}

/// Refuses to boot from a device that the VM does not have.
pub(crate) fn check_boot(name: &VmName, config: &VmConfig) -> anyhow::Result<()> {
    if let Some(boot) = &config.boot
        && !config.devices.iter().any(|device| device.id == *boot)
    {
        bail!(
            "cannot boot from {boot}: VM {name} has the devices {}",
            config.device_ids().join(", ")
        );
    }
    Ok(())
}
