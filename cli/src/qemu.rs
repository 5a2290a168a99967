//! `farside qemu`.

use std::{os::unix::process::CommandExt, path::Path, time::Duration};

use anyhow::{Context, bail};
use farside_backend_api::BackendReport;
use farside_daemon::{DeviceId, SocketGroup, VmName, paths};
use farside_error_chain::Chain;
use farside_fabric::Size;
use farside_lender_protocol::{Address, CallError, Client, Transport};
use farside_qemu_configs::{CommandLine, QemuBinary, Vm};
use farside_vm_config::DeviceConfig;

use crate::{
    args::{Qemu, QemuForm},
    ram::ram_ranges,
    status,
    vm_flags::{check_boot, name_of},
};

/// Bytes that a host can pin in a millisecond, if it is slow.
const PINNED_PER_MS: u64 = 1_000_000;

/// The default QEMU binary.
const DEFAULT_QEMU: &str = "qemu-system-x86_64";

pub(crate) fn run(args: Qemu) -> anyhow::Result<()> {
    let mut config = args.vm.describe()?;
    let name = name_of(&config)?;
    if config.devices.is_empty() {
        let served = served(&name)?.devices.into_iter();
        config.devices = served
            .map(|device| DeviceConfig::from(device.device))
            .collect();
    }
    check_boot(&name, &config)?;
    if let Some(group) = &config.socket_group {
        SocketGroup::named(group)?;
    }
    config.qemu_args.extend(args.extra);
    let qemu = config.qemu.take().unwrap_or_else(|| DEFAULT_QEMU.into());
    let vm = config.to_vm(&name);

    let mut command_line = vm.command_line(&qemu)?;
    if let Ok(backend) = served(&name) {
        for device in &backend.devices {
            check(&vm, &device.device, &device.lender)?;
        }
        let open_timeout = open_timeout(&backend);
        if open_timeout < Duration::from_millis(vm.ram / PINNED_PER_MS) {
            log::warn!(
                "pinning {} may take longer than the {:?} that the backend of VM {name} allows: start it with --memory {}M",
                Size(vm.ram),
                open_timeout,
                vm.ram >> 20
            );
        }
    }
    if !args.run {
        return print(&vm, &command_line, args.form);
    }
    let probed = QemuBinary::probe(&qemu)?;
    log::info!("starting QEMU {} for VM {name}", probed.version());
    for device in &vm.devices {
        if !device.socket.exists() {
            bail!(
                "nobody serves device {} to VM {name} ({} is missing): start `farside serve --vm {name} --device {}` first",
                device.id,
                device.socket.display(),
                device.id
            );
        }
    }
    // For the monitor, if no backend has created it.
    let directory = paths::vm_dir(&name);
    paths::create_directory(&directory)
        .with_context(|| format!("cannot use {}", directory.display()))?;
    farside_vm_control::confine(&mut command_line, &probed);
    farside_vm_control::keep_monitor_private();
    let error = command_line.to_command().exec();
    Err(error).with_context(|| format!("cannot start {}", qemu.display()))
}

fn print(vm: &Vm, command_line: &CommandLine, form: QemuForm) -> anyhow::Result<()> {
    match form {
        QemuForm::Shell => println!("{command_line}"),
        QemuForm::Json => {
            let form = vm.json_form(command_line)?;
            println!("{}", serde_json::to_string_pretty(&form)?);
        }
        QemuForm::Readconfig => {
            let program = &command_line.program;
            let config = vm.read_config(program, Path::new(&format!("{}.cfg", vm.name)))?;
            println!("# Save this as {}.cfg and start:", vm.name);
            for line in config.command_line.to_string().lines() {
                println!("#   {line}");
            }
            print!("\n{}", config.text);
        }
    }
    Ok(())
}

/// The devices that a VM's backend serves.
fn served(vm: &VmName) -> anyhow::Result<BackendReport> {
    status::backend(&paths::status_socket(vm))?.with_context(|| {
        format!(
            "no backend runs for VM {vm}: start `farside serve --vm {vm} --device ID`, or name the devices with --device"
        )
    })
}

/// The backend's limit for a bus-master enable.
fn open_timeout(backend: &BackendReport) -> Duration {
    let timeouts = backend.devices.iter().map(|device| device.open_timeout_ms);
    Duration::from_millis(timeouts.min().unwrap_or(0))
}

/// Says before the VM boots that a device cannot reach its RAM. The lender has
/// the last word when the windows open.
fn check(vm: &Vm, device: &DeviceId, lender: &Address) -> anyhow::Result<()> {
    let ram = ram_ranges(vm.machine, vm.ram);
    let checked = Client::connect(lender, None).and_then(|mut client| {
        let transport = Transport::between(lender, client.describe(device)?.bars);
        client.check(device, transport, ram)
    });
    match checked {
        Ok(()) => Ok(()),
        Err(error @ CallError::Refused(_)) => {
            Err(error).with_context(|| format!("VM {} with {} of RAM", vm.name, Size(vm.ram)))
        }
        Err(error) => {
            log::warn!(
                "cannot check whether VM {} fits: {error}",
                vm.name,
                error = Chain(&error)
            );
            Ok(())
        }
    }
}
