//! Hot-plug and unplug of one device of a running VM.
//!
//! Hot-plug: the backend serves the device, then QEMU plugs it in. Unplug: QEMU sends a request to
//! the guest, the guest releases the device, QEMU removes it, the backend returns it. An
//! interrupted command leaves its completed steps in place; repeating it continues from there, and
//! the opposite command undoes them.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use farside_backend_api::admin::{self, RefusalKind};
use farside_daemon::{DeviceId, VmName, paths};
use farside_error_chain::Chain;
use farside_qemu_configs::{Device, Vm, qemu_id};
use farside_vm_config::{LoadError, Manager, VmConfig};
use serde_json::json;

use crate::{
    Backend, Error, Event, Monitor,
    keep::keep,
    life::{GREETING, manager},
    lock::lock_vm,
    slots::{Slot, Slots, plugged, ram},
    virsh,
};

/// Polling interval for the removal of a device: QEMU has no event for a device that it never frees
/// (see [`crate::keep`]), and libvirt does not forward events.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Options for hot-plugging a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttachOptions {
    /// Number of the port. Default: that of the VM configuration, else the first that is free and
    /// not assigned to a configured device.
    pub port: Option<u16>,
}

/// A hot-plugged device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// Number of its port.
    pub port: Option<u16>,
    /// It was plugged in already; nothing was done.
    pub already: bool,
}

/// An unplugged device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detached {
    /// How long the guest took to release it. `None` if QEMU no longer had the device, and only the
    /// backend served it.
    pub guest_took: Option<Duration>,
}

/// Plugs a device into a running VM: its backend looks it up and serves it, and QEMU plugs it in.
/// On return the guest can discover it, and QEMU has reset it, which borrows it from the lender. If
/// QEMU refuses, the backend stops serving it. The VM configuration is not changed: the device
/// stays until it is detached or QEMU exits.
pub fn attach(vm: &VmName, device: &DeviceId, options: &AttachOptions) -> Result<Attached, Error> {
    let config = config_or_default(vm)?;
    let _lock = lock_vm(vm, Duration::ZERO)?;
    let mut monitor = Monitor::connect(vm, manager(&config), GREETING)?;
    let slots = Slots::of(&mut monitor)?;
    if plugged(&mut monitor)?.iter().any(|id| id == device) {
        let port = slots.port_of(&mut monitor, &qemu_id(device))?;
        return match (port, options.port) {
            (Some(at), Some(wanted)) if at != wanted => Err(Error::ElsewhereInVm {
                device: device.to_owned(),
                vm: vm.to_owned(),
                at,
                wanted,
            }),
            _ if is_dead(vm, device)? => Err(Error::Dead {
                device: device.to_owned(),
                vm: vm.to_owned(),
            }),
            _ => Ok(Attached {
                port,
                already: true,
            }),
        };
    }
    if let Some(other) = other_function(&config, device) {
        return Err(one_function(vm, device, format!("with {other}")));
    }
    let all = slots.all(&mut monitor)?;
    let port = choose(vm, device, &config, &all, options.port)?;
    let mut backend = Backend::connect(vm)?;
    let (socket, already) = backend.attach(device)?;
    let mut vm = Vm::new(vm.clone(), ram(&mut monitor)?);
    vm.machine = slots.machine();
    // As those at boot have it.
    vm.open_timeout = config.open_timeout.map(Duration::from_secs);
    let add = device_add(vm, device, port, socket)?;
    if let Err(error) = monitor.run("device_add", add) {
        let error = with_cause(error, &mut backend, device);
        if !already && let Err(error) = backend.detach(device, true) {
            log::error!(
                "cannot take back what was done: {error}",
                error = Chain(&error)
            );
        }
        return Err(error);
    }
    Ok(Attached {
        port: Some(port),
        already: false,
    })
}

/// Whether a device in QEMU has lost its backend; QEMU does not reconnect.
fn is_dead(vm: &VmName, device: &DeviceId) -> Result<bool, Error> {
    let Some(mut backend) = Backend::find(vm)? else {
        return Ok(true);
    };
    let served = backend.status()?.devices;
    let lives = |served: &admin::Served| served.device == *device && served.in_use;
    Ok(!served.iter().any(lives))
}

/// Hot-unplugs a device from a running VM: requests its release from the guest, for up to `limit`;
/// then the lender has it back.
///
/// [`Error::GuestHolds`] and [`Error::GuestRefuses`] leave the device plugged in and working. QEMU
/// cannot withdraw the request: a guest that complies later loses the device then, and the next
/// `detach` completes the rest.
pub fn detach(vm: &VmName, device: &DeviceId, limit: Duration) -> Result<Detached, Error> {
    let config = config_or_default(vm)?;
    let _lock = lock_vm(vm, Duration::ZERO)?;
    let mut monitor = Monitor::connect(vm, manager(&config), GREETING)?;
    let has = plugged(&mut monitor)?;
    let guest_took = match has.iter().any(|id| id == device) {
        true => {
            check_alone(&mut monitor, device, &has)?;
            Some(unplug(&mut monitor, device, limit)?)
        }
        false => None,
    };
    let served = match Backend::connect(vm) {
        Ok(mut backend) => match backend.detach(device, false) {
            Ok(()) => true,
            Err(Error::Backend { refusal, .. }) if refusal.kind == RefusalKind::UnknownDevice => {
                false
            }
            Err(error) => return Err(error),
        },
        // The leases ended with the backend.
        Err(Error::NoBackend { .. }) => false,
        Err(error) => return Err(error),
    };
    if guest_took.is_none() && !served {
        return Err(Error::NotPlugged {
            device: device.to_owned(),
            vm: vm.to_owned(),
            has: match has.as_slice() {
                [] => "no borrowed device".to_owned(),
                ids => ids.join(", "),
            },
        });
    }
    Ok(Detached { guest_took })
}

/// Refuses to unplug a device that shares its port with another: a guest would be asked to release both.
fn check_alone(monitor: &mut Monitor, device: &DeviceId, has: &[DeviceId]) -> Result<(), Error> {
    let slots = Slots::of(monitor)?;
    let mut port_of = |id: &DeviceId| match slots.port_of(monitor, &qemu_id(id)) {
        // The guest has released it just now.
        Err(Error::Refused { class, .. }) if class == "DeviceNotFound" => Ok(None),
        port => port,
    };
    let Some(port) = port_of(device)? else {
        return Ok(());
    };
    let mut others = Vec::new();
    for other in has.iter().filter(|other| *other != device) {
        if port_of(other)? == Some(port) {
            others.push(other.as_str());
        }
    }
    match others.as_slice() {
        [] => Ok(()),
        some => Err(one_function(
            monitor.vm(),
            device,
            format!("with {}", some.join(", ")),
        )),
    }
}

/// Another device that the configuration has at the port of this one.
fn other_function<'a>(config: &'a VmConfig, device: &DeviceId) -> Option<&'a DeviceId> {
    let port = described_port(config, device)?;
    let ids = config.devices.iter().map(|it| &it.id);
    let mut others = ids.filter(|other| *other != device);
    others.find(|other| described_port(config, other) == Some(port))
}

/// The port of a device in the configuration.
fn described_port(config: &VmConfig, device: &DeviceId) -> Option<u16> {
    let mut devices = config.devices.iter().enumerate();
    devices.find_map(|(n, it)| (it.id == *device).then_some(it.port.unwrap_or(n as u16)))
}

fn one_function(vm: &VmName, device: &DeviceId, others: String) -> Error {
    Error::OneFunction {
        device: device.to_owned(),
        vm: vm.to_owned(),
        others,
    }
}

/// Requests an unplug from the guest, and waits until QEMU has removed the device.
fn unplug(monitor: &mut Monitor, device: &DeviceId, limit: Duration) -> Result<Duration, Error> {
    let id = qemu_id(device);
    let begin = Instant::now();
    let deadline = begin + limit;
    let socket = paths::device_socket(monitor.vm(), device);
    if !keep(monitor, device, &socket, deadline)? {
        return Ok(begin.elapsed());
    }
    match monitor.run("device_del", json!({ "id": id })) {
        Ok(_) => {}
        // Removed after an abandoned detach.
        Err(Error::Refused { reason, .. }) if reason.contains("in the process of unplug") => {}
        // The guest released it just now, after an earlier request.
        Err(Error::Refused { class, .. }) if class == "DeviceNotFound" => {}
        Err(error) => return Err(error),
    }
    let ours = |event: &Event| {
        event.data["device"] == *id
            && matches!(
                event.name.as_str(),
                "DEVICE_DELETED" | "DEVICE_UNPLUG_GUEST_ERROR"
            )
    };
    loop {
        if !plugged(monitor)?.iter().any(|id| id == device) {
            return Ok(begin.elapsed());
        }
        if Instant::now() >= deadline {
            return Err(Error::GuestHolds {
                vm: monitor.vm().to_owned(),
                device: device.to_owned(),
                limit,
                why: why_held(monitor)?,
            });
        }
        let look_again = deadline.min(Instant::now() + LOOK_AGAIN);
        if !monitor.has_events() {
            std::thread::sleep(look_again.saturating_duration_since(Instant::now()));
        } else if let Some(event) = monitor.wait_event(look_again, ours)?
            && event.name == "DEVICE_UNPLUG_GUEST_ERROR"
        {
            return Err(Error::GuestRefuses {
                vm: monitor.vm().to_owned(),
                device: device.to_owned(),
            });
        }
    }
}

fn why_held(monitor: &mut Monitor) -> Result<String, Error> {
    let status = monitor.run("query-status", json!({}))?;
    Ok(match status["status"].as_str() {
        Some("running") | None => {
            "it has not answered (no hot-plug driver runs there, or something uses the device)"
                .to_owned()
        }
        Some(state) => format!("it does not run (QEMU's state: {state})"),
    })
}

/// The port of a device.
fn choose(
    vm: &VmName,
    device: &DeviceId,
    config: &VmConfig,
    slots: &[Slot],
    asked: Option<u16>,
) -> Result<u16, Error> {
    let described = |id: &DeviceId| described_port(config, id);
    if let Some(port) = asked.or_else(|| described(device)) {
        let why = match slots.iter().find(|slot| slot.port == port) {
            Some(Slot { taken: false, .. }) => return Ok(port),
            Some(_) => "is taken: `farside detach` what is there, or choose another".to_owned(),
            None => format!("is not there; it has {}", numbers(slots.iter())),
        };
        let vm = vm.to_owned();
        return Err(Error::Port { port, vm, why });
    }
    let reserved: Vec<u16> = config.device_ids().iter().filter_map(described).collect();
    slots
        .iter()
        .find(|slot| !slot.taken && !reserved.contains(&slot.port))
        .map(|slot| slot.port)
        .ok_or_else(|| Error::NoPort {
            vm: vm.to_owned(),
            device: device.to_owned(),
            used: numbers(slots.iter().filter(|slot| slot.taken)),
            advice: match slots.iter().any(|slot| !slot.taken) {
                true => {
                    "the free ports are reserved for configured devices; select one with --port"
                        .to_owned()
                }
                false => "detach another device, or start the VM with more spare-ports".to_owned(),
            },
        })
}

fn numbers<'a>(slots: impl Iterator<Item = &'a Slot>) -> String {
    let numbers: Vec<_> = slots.map(|slot| slot.port.to_string()).collect();
    match numbers.is_empty() {
        true => "none".to_owned(),
        false => numbers.join(", "),
    }
}

/// The arguments of QMP's `device_add`.
fn device_add(
    mut vm: Vm,
    device: &DeviceId,
    port: u16,
    socket: PathBuf,
) -> Result<serde_json::Value, Error> {
    vm.devices.push(Device {
        id: device.to_owned(),
        port: Some(port),
        socket,
        function: 0,
        bootindex: None,
    });
    let args = vm.device_add(0);
    args.map_err(|source| Error::Vm {
        vm: vm.name,
        source,
    })
}

/// QEMU only reports that its peer closed the connection; the backend has the cause.
fn with_cause(error: Error, backend: &mut Backend, device: &DeviceId) -> Error {
    let last = backend.status().ok().and_then(|status| {
        let served = status.devices.into_iter();
        served
            .filter(|served| served.device == *device)
            .find_map(|served| served.last_error)
    });
    match (error, last) {
        (
            Error::Refused {
                vm,
                command,
                class,
                reason,
            },
            Some(last),
        ) => Error::Refused {
            vm,
            command,
            class,
            reason: format!("{last} (QEMU: {reason})"),
        },
        (error, _) => error,
    }
}

/// A manually started VM has no configuration, and needs none here.
fn config_or_default(vm: &VmName) -> Result<VmConfig, Error> {
    match VmConfig::of_vm(vm) {
        Err(LoadError::Unknown { path, .. }) => {
            log::debug!("VM {vm} has no configuration at {}", path.display());
            match paths::vm_dir(vm).exists() {
                true => Ok(VmConfig {
                    manager: Some(found_manager(vm)),
                    ..VmConfig::default()
                }),
                false => Err(Error::NotRunning {
                    vm: vm.to_owned(),
                    hint: format!(
                        " here, and has no configuration ({} is missing)",
                        path.display()
                    ),
                }),
            }
        }
        config => Ok(config?),
    }
}

/// The manager of a VM without a configuration. Queries libvirt if QEMU has no monitor at farside's
/// path.
fn found_manager(vm: &VmName) -> Manager {
    match !paths::monitor_socket(vm).exists() && virsh::is_running(vm).unwrap_or(false) {
        true => Manager::Libvirt,
        false => Manager::Qemu,
    }
}
