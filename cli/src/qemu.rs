//! `farside qemu`.

use std::{
    os::{fd::AsRawFd, unix::process::CommandExt},
    path::Path,
    time::Duration,
};

use anyhow::{Context, bail};
use farside_backend_api::BackendReport;
use farside_daemon::{
    Activated, DeviceId, OwnedListener, SocketGroup, SocketKind, VmName, group_name, paths,
};
use farside_error_chain::Chain;
use farside_fabric::Size;
use farside_lender_protocol::{Address, CallError, Client, Transport};
use farside_qemu_configs::{CommandLine, Device, MonitorSocket, QemuBinary, Vm};
use farside_vm_config::DeviceConfig;
use rustix::{
    fs::{Access, access},
    io::{Errno, FdFlags, fcntl_setfd},
};

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
    let activated = match args.run {
        true => Activated::from_env()?,
        false => Activated::default(),
    };
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
    let mut vm = config.to_vm(&name);
    let monitor = monitor(&name, activated)?;
    if let Some(socket) = &monitor {
        vm.monitor = Some(MonitorSocket::Fd(socket.as_raw_fd()));
    }

    let backend = served(&name).ok();
    if let Some(backend) = &backend {
        vm.open_timeout = vm.open_timeout.max(Some(open_timeout(backend)));
    }
    let mut command_line = vm.command_line(&qemu)?;
    if let Some(backend) = &backend {
        // With a monitor from the service manager, QEMU's user may not connect to lenders: the
        // example of a socket unit runs this check, as the lender's user.
        if monitor.is_none() {
            for device in &backend.devices {
                check(&vm, &device.device, &device.lender)?;
            }
        }
        let open_timeout = open_timeout(backend);
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
        check_socket(&name, device)?;
    }
    farside_vm_control::confine(&mut command_line, &probed);
    match &monitor {
        Some(socket) => fcntl_setfd(socket, FdFlags::empty())
            .with_context(|| format!("cannot pass {} to QEMU", socket.path().display()))?,
        None => {
            // If no backend has created it.
            let directory = paths::vm_dir(&name);
            paths::create_directory(&directory)
                .with_context(|| format!("cannot use {}", directory.display()))?;
            farside_vm_control::keep_monitor_private();
        }
    }
    let error = command_line.to_command().exec();
    Err(error).with_context(|| format!("cannot start {}", qemu.display()))
}

/// The socket for the monitor, if the service manager listens there.
fn monitor(vm: &VmName, mut activated: Activated) -> anyhow::Result<Option<OwnedListener>> {
    let path = paths::monitor_socket(vm);
    let socket = activated.take_path(&path, SocketKind::Stream)?;
    activated.finish(&format!("the monitor of VM {vm} ({})", path.display()))?;
    Ok(socket)
}

/// Fails unless QEMU, as this user, can connect to the device's socket.
fn check_socket(vm: &VmName, device: &Device) -> anyhow::Result<()> {
    let (id, path) = (&device.id, device.socket.display());
    match access(&device.socket, Access::WRITE_OK) {
        Ok(()) => Ok(()),
        Err(Errno::NOENT) => bail!(
            "nobody serves device {id} to VM {vm} ({path} is missing): start `farside serve --vm {vm} --device {id}` first"
        ),
        Err(Errno::ACCESS) => {
            let group = group_name(rustix::process::getegid().as_raw());
            bail!(
                "device {id} of VM {vm}: QEMU's user may not connect to {path}: set `socket-group = \"{group}\"` in the VM configuration, then restart the backend (where systemd runs it: `systemctl daemon-reload`, then `systemctl restart farside@{vm}.socket`)"
            )
        }
        Err(errno) => Err(errno).with_context(|| format!("device {id} of VM {vm}: {path}")),
    }
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
