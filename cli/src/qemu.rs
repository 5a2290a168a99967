//! `farside qemu`.

use std::{os::unix::process::CommandExt, time::Duration};

use anyhow::{Context, bail};
use farside_control::{Address, CallError, Client, paths};
use farside_fabric::Size;
use farside_qemu_configs::{Accel, Device, Firmware, HugePages, Machine, QemuBinary, Vm};

use crate::{
    args::{AccelArg, HugePagesArg, MachineArg, Qemu},
    ram::ram_ranges,
    status,
    vm_file::VmFile,
};

/// Bytes that a host can pin in a millisecond, if it is slow.
const PINNED_PER_MS: u64 = 1_000_000;

/// Guest RAM when nothing is said.
const DEFAULT_RAM: u64 = 2 << 30;

pub(crate) fn run(args: Qemu) -> anyhow::Result<()> {
    let file = VmFile::load(args.config.as_deref())?;
    let name = args
        .vm
        .or(file.name)
        .context("which VM? Name it with --vm NAME")?;
    let ids = if !args.devices.is_empty() {
        args.devices
    } else if !file.devices.is_empty() {
        file.devices
    } else {
        let served = served(&name)?;
        served.devices.into_iter().map(|(id, _)| id).collect()
    };
    if let Some(boot) = &args.boot
        && !ids.contains(boot)
    {
        bail!(
            "cannot boot from {boot}: VM {name} has the devices {}",
            ids.join(", ")
        );
    }
    let mut vm = Vm::new(&name, args.memory.or(file.memory).unwrap_or(DEFAULT_RAM));
    vm.vcpus = args.cpus.or(file.cpus).unwrap_or(1);
    vm.machine = args
        .machine
        .or(file.machine)
        .map_or(Machine::Q35, MachineArg::machine);
    vm.accel = match args.accel.or(file.accel) {
        Some(AccelArg::Kvm) => Accel::Kvm,
        Some(AccelArg::Tcg) => Accel::Tcg,
        Some(AccelArg::Auto) | None => Accel::Auto,
    };
    vm.huge_pages = match args.hugepages.or(file.hugepages) {
        Some(HugePagesArg::Of2MiB) => HugePages::Of2MiB,
        Some(HugePagesArg::Of1GiB) => HugePages::Of1GiB,
        None => HugePages::None,
    };
    if let Some([code, vars]) = args.ovmf.as_deref() {
        vm.firmware = Firmware::Ovmf {
            code: code.clone(),
            vars: vars.clone(),
        };
    }
    vm.spare_ports = args.spare_ports;
    vm.devices = ids
        .into_iter()
        .map(|id| Device {
            socket: paths::device_socket(&name, &id),
            bootindex: (args.boot.as_ref() == Some(&id)).then_some(0),
            id,
        })
        .collect();
    vm.extra_args = args.extra;

    let command_line = vm.command_line(&args.qemu)?;
    if let Ok(backend) = served(&name) {
        for (device, lender) in &backend.devices {
            check(&vm, device, lender)?;
        }
        if backend.open_timeout < Duration::from_millis(vm.ram / PINNED_PER_MS) {
            log::warn!(
                "pinning {} may take longer than the {:?} that the backend of VM {name} allows: start it with --memory {}M",
                Size(vm.ram),
                backend.open_timeout,
                vm.ram >> 20
            );
        }
    }
    if !args.run {
        println!("{command_line}");
        return Ok(());
    }
    let qemu = QemuBinary::probe(&args.qemu)?;
    log::info!("starting QEMU {} for VM {name}", qemu.version());
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
    let error = command_line.to_command().exec();
    Err(error).with_context(|| format!("cannot start {}", args.qemu.display()))
}

/// What a VM's backend serves.
struct Served {
    /// Device ids, and where their lenders are.
    devices: Vec<(String, Address)>,
    open_timeout: Duration,
}

fn served(vm: &str) -> anyhow::Result<Served> {
    let report = status::backend(&paths::status_socket(vm)).with_context(|| {
        format!(
            "no backend runs for VM {vm}: start `farside serve --vm {vm} --device ID`, or name the devices with --device"
        )
    })?;
    let devices = report["devices"].as_array().context("malformed status")?;
    let open_timeout = devices
        .iter()
        .filter_map(|device| device["open_timeout_ms"].as_u64());
    let open_timeout = Duration::from_millis(open_timeout.min().unwrap_or(0));
    let devices = devices.iter().map(|device| {
        let (id, lender) = (device["device"].as_str(), device["lender"].as_str());
        let (id, lender) = id.zip(lender).context("malformed status")?;
        Ok((id.to_owned(), lender.parse()?))
    });
    Ok(Served {
        devices: devices.collect::<anyhow::Result<_>>()?,
        open_timeout,
    })
}

/// Says before the VM boots that a device cannot reach its RAM. The lender has
/// the last word when the windows open.
fn check(vm: &Vm, device: &str, lender: &Address) -> anyhow::Result<()> {
    let ram = ram_ranges(vm.machine, vm.ram);
    let checked = Client::connect(lender, None)
        .and_then(|mut client| client.check(device, lender.route(), ram));
    match checked {
        Ok(()) => Ok(()),
        Err(error @ CallError::Refused(_)) => {
            Err(error).with_context(|| format!("VM {} with {} of RAM", vm.name, Size(vm.ram)))
        }
        Err(error) => {
            log::warn!("cannot check whether VM {} fits: {error}", vm.name);
            Ok(())
        }
    }
}
