//! `farside qemu`.

use std::{os::unix::process::CommandExt, time::Duration};

use anyhow::{Context, bail};
use farside_control::{Address, Client, paths};
use farside_fabric::{Size, fits};
use farside_qemu_configs::{
    Accel, Device, Firmware, HugePages, Machine, QemuBinary, Vm, ram_split,
};

use crate::{
    args::{AccelArg, HugePagesArg, MachineArg, Qemu},
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
        served(&name)?.devices
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
    vm.machine = match args.machine.or(file.machine) {
        Some(MachineArg::Pc) => Machine::I440fx,
        Some(MachineArg::Q35) | None => Machine::Q35,
    };
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
        for lender in &backend.lenders {
            check_fits(&vm, lender)?;
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

/// What a VM's backend serves, and where the lenders are.
struct Served {
    devices: Vec<String>,
    lenders: Vec<Address>,
    open_timeout: Duration,
}

fn served(vm: &str) -> anyhow::Result<Served> {
    let report = status::backend(&paths::status_socket(vm)).with_context(|| {
        format!(
            "no backend runs for VM {vm}: start `farside serve --vm {vm} --device ID`, or name the devices with --device"
        )
    })?;
    let devices = report["devices"].as_array().context("malformed status")?;
    let field = |name: &'static str| {
        let values = devices
            .iter()
            .filter_map(move |device| device[name].as_str());
        values.map(str::to_owned)
    };
    let lenders = field("lender").map(|text| text.parse());
    let mut lenders: Vec<Address> = lenders.collect::<Result<_, _>>()?;
    lenders.dedup();
    let open_timeout = devices
        .iter()
        .filter_map(|device| device["open_timeout_ms"].as_u64());
    let open_timeout = Duration::from_millis(open_timeout.min().unwrap_or(0));
    Ok(Served {
        devices: field("device").collect(),
        lenders,
        open_timeout,
    })
}

/// Says before the VM boots that its RAM cannot be reached through the
/// lender's windows. The lender has the last word when the windows open.
fn check_fits(vm: &Vm, lender: &Address) -> anyhow::Result<()> {
    let limits = Client::connect(lender, None).and_then(|mut client| client.limits());
    let limits = match limits {
        Ok(limits) => limits,
        Err(error) => {
            log::warn!("cannot check whether VM {} fits: {error}", vm.name);
            return Ok(());
        }
    };
    let (low, high) = ram_split(vm.machine, vm.ram);
    let spans: Vec<u64> = [low, high].into_iter().filter(|span| *span != 0).collect();
    fits(&spans, &limits)
        .map(|_| ())
        .with_context(|| format!("VM {} with {} of RAM", vm.name, Size(vm.ram)))
}
