//! Starts, stops and describes a VM as a whole.

use std::{path::PathBuf, time::Duration};

use farside_daemon::{DeviceId, VmName};
use farside_error_chain::Chain;
use farside_fabric::host_memory::{HostMemory, Pages};
use farside_qemu_configs::{HugePages, QemuBinary, qemu_id};
use farside_vm_config::{Manager, VmConfig};
use serde::Serialize;

use crate::{
    Backend, Error, Monitor,
    lock::lock_vm,
    places, qemu,
    slots::{Slots, plugged},
    systemd, virsh,
};

/// Timeout for the monitor's greeting: other farside commands that only query hold it no longer
/// than this.
pub(crate) const GREETING: Duration = Duration::from_secs(20);

/// Options for starting a VM.
#[derive(Clone, Debug)]
pub struct StartOptions {
    /// Time limit for the backend and for QEMU, each.
    pub limit: Duration,
    /// Plug in the configured devices. Otherwise their ports are empty, and the backend serves
    /// them: for an incoming live migration.
    pub devices: bool,
    /// Extra arguments for QEMU, appended; not through libvirt.
    pub qemu_args: Vec<String>,
}

impl Default for StartOptions {
    /// Two minutes, all devices.
    fn default() -> Self {
        Self {
            limit: Duration::from_secs(120),
            devices: true,
            qemu_args: Vec::new(),
        }
    }
}

/// Options for stopping a VM.
#[derive(Clone, Copy, Debug)]
pub struct StopOptions {
    /// Time limit for the guest to power off; zero skips the ACPI shutdown request.
    pub limit: Duration,
    /// Then kill QEMU, as on a power failure, and the backend even if it hangs or serves a VMM that
    /// farside cannot stop.
    pub force: bool,
}

impl Default for StopOptions {
    /// A minute, without force.
    fn default() -> Self {
        Self {
            limit: Duration::from_secs(60),
            force: false,
        }
    }
}

/// The state of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunState {
    /// QEMU is not running.
    Stopped,
    /// The guest runs.
    Running,
    /// QEMU runs, but its guest is stopped; QEMU's run state, such as `paused` or `inmigrate`.
    Still(String),
}

/// A VM of this host.
#[derive(Clone, Debug, Serialize)]
pub struct VmState {
    /// Its name.
    pub vm: VmName,
    /// Its state.
    pub state: RunState,
    /// QEMU's process, if farside runs it.
    pub qemu_pid: Option<u32>,
    /// The backend's process, if one runs.
    pub backend_pid: Option<u32>,
    /// Its devices: the configured ones, and those attached since.
    pub devices: Vec<DeviceState>,
}

/// A device of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceState {
    /// Its id.
    pub id: DeviceId,
    /// The number of its port: the actual one if plugged in, else the configured one. `None` if it
    /// is behind a port that is not farside's.
    pub port: Option<u16>,
    /// QEMU has it.
    pub plugged: bool,
    /// The backend serves it.
    pub served: bool,
    /// It is in the VM configuration.
    pub described: bool,
}

/// Starts a VM from its configuration: its backend, unless that runs, and QEMU, by its unit where the
/// backend is one of another user. On failure, stops the processes that it started.
pub fn start(vm: &VmName, options: &StartOptions) -> Result<VmState, Error> {
    let config = VmConfig::of_vm(vm)?;
    let manager = manager(&config);
    // Before anything is created that this user could not use.
    let unit_user = match manager == Manager::Qemu && systemd::has_unit() {
        true => systemd::user(vm)?,
        false => None,
    };
    let by_unit = unit_user.is_some();
    if let Some(user) = unit_user {
        // The unit gives QEMU no other arguments.
        let plain = options.devices && options.qemu_args.is_empty();
        if !plain || !systemd::has_qemu_unit() {
            return Err(Error::UnitUser {
                vm: vm.to_owned(),
                user,
            });
        }
    }
    let _lock = lock_vm(vm, Duration::ZERO)?;
    match manager {
        Manager::Libvirt => {
            // The domain defines the RAM if the file does not.
            if config.memory.is_some() && !virsh::is_running(vm)? {
                check_memory(vm, &config, &HostMemory::read().of_host())?;
            }
            start_domain(vm, options)?;
        }
        Manager::Qemu if by_unit => start_unit(vm, &config, options.limit)?,
        Manager::Qemu => start_qemu(vm, &config, options)?,
    }
    look(vm, &config)
}

fn start_domain(vm: &VmName, options: &StartOptions) -> Result<(), Error> {
    if !options.devices || !options.qemu_args.is_empty() {
        return Err(Error::Unsupported {
            vm: vm.to_owned(),
            what: "libvirt starts it from its domain XML: no other arguments can be given"
                .to_owned(),
        });
    }
    virsh::start(vm)
}

/// Fails if QEMU runs.
fn check_stopped(vm: &VmName) -> Result<(), Error> {
    match Monitor::connect(vm, Manager::Qemu, GREETING) {
        Err(Error::NotRunning { .. }) => Ok(()),
        Ok(monitor) => Err(Error::Running {
            vm: vm.to_owned(),
            pid: monitor.pid().unwrap_or(0),
        }),
        Err(error) => Err(error),
    }
}

/// Starts QEMU's unit, which starts the backend's.
fn start_unit(vm: &VmName, config: &VmConfig, limit: Duration) -> Result<(), Error> {
    check_stopped(vm)?;
    check_memory(vm, config, &HostMemory::read().of_host())?;
    let ours = match Backend::find(vm)? {
        Some(mut backend) => {
            attach_all(config, &mut backend)?;
            false
        }
        None => {
            // The configuration may be new on this host, such as after a migration.
            systemd::reload()?;
            true
        }
    };
    let started = systemd::start_qemu(vm).and_then(|()| {
        let monitor = Monitor::connect(vm, Manager::Qemu, limit);
        monitor.map(drop).map_err(|error| Error::Failed {
            what: "QEMU",
            vm: vm.to_owned(),
            why: format!(
                "{} (its log: journalctl -u {})",
                Chain(&error),
                systemd::qemu_unit(vm)
            ),
        })
    });
    if started.is_err() {
        let stopped = systemd::stop_qemu(vm).and_then(|()| match ours {
            true => Backend::end(vm, false),
            false => Ok(()),
        });
        if let Err(error) = stopped {
            log::error!("{error}", error = Chain(&error));
        }
    }
    started
}

fn start_qemu(vm: &VmName, config: &VmConfig, options: &StartOptions) -> Result<(), Error> {
    check_stopped(vm)?;
    let memory = HostMemory::read();
    // A backend under systemd has the limits of its unit, and checks them itself at bus-master
    // enable.
    let memory = match systemd::has_unit() {
        true => memory.of_host(),
        false => memory,
    };
    check_memory(vm, config, &memory)?;
    // QEMU's own error for an unknown device type is not helpful.
    let program = QemuBinary::probe(program(config)).map_err(|source| Error::Qemu {
        vm: vm.to_owned(),
        source,
    })?;
    let (backend, ours) = match Backend::find(vm)? {
        Some(backend) => (backend, false),
        None => (Backend::start(vm, options.limit)?, true),
    };
    let started = run_qemu(vm, config, &program, options, backend);
    if started.is_err()
        && ours
        && let Err(error) = Backend::end(vm, false)
    {
        log::error!("{error}", error = Chain(&error));
    }
    started
}

fn run_qemu(
    vm: &VmName,
    config: &VmConfig,
    program: &QemuBinary,
    options: &StartOptions,
    mut backend: Backend,
) -> Result<(), Error> {
    attach_all(config, &mut backend)?;
    let mut described = config.to_vm(vm);
    if !options.devices {
        described = without_devices(described);
    }
    qemu::start(&described, program, &options.qemu_args, options.limit).map(drop)
}

/// `farside detach` may have removed some devices from a running backend.
fn attach_all(config: &VmConfig, backend: &mut Backend) -> Result<(), Error> {
    let devices = config.device_ids();
    devices
        .iter()
        .try_for_each(|device| backend.attach(device).map(drop))
}

fn program(config: &VmConfig) -> PathBuf {
    config.qemu.clone().unwrap_or_else(|| places::QEMU.into())
}

/// Refuses a VM whose RAM exceeds the host's memory: the kernel would let it start, and its OOM
/// killer would end a process once the guest uses its RAM.
fn check_memory(vm: &VmName, config: &VmConfig, host: &HostMemory) -> Result<(), Error> {
    let pages = match config.hugepages.unwrap_or_default() {
        HugePages::None => Pages::Base,
        huge => Pages::Huge {
            size: huge.granule(),
        },
    };
    host.room_for(config.memory(), pages)
        .map_err(|source| Error::TooLarge {
            vm: vm.to_owned(),
            source,
        })
}

/// The same machine with empty ports.
fn without_devices(mut vm: farside_qemu_configs::Vm) -> farside_qemu_configs::Vm {
    let last = vm
        .devices
        .iter()
        .enumerate()
        .map(|(position, device)| device.port.map_or(position, usize::from) + 1)
        .max()
        .unwrap_or(0);
    let ports = last.max(vm.devices.len()) as u16;
    vm.spare_ports = vm.spare_ports.saturating_add(ports);
    vm.devices.clear();
    vm
}

/// How long a stop waits for another command, such as the release of a device by the backend's helper.
const STOP_WAITS: Duration = Duration::from_secs(10);

/// Stops a VM: its guest powers off, then its backend returns the devices. On return they are back
/// at their lenders. Not an error if the VM does not run; its backend is stopped nevertheless.
pub fn stop(vm: &VmName, options: &StopOptions) -> Result<(), Error> {
    let config = VmConfig::of_vm(vm)?;
    let _lock = lock_vm(vm, STOP_WAITS)?;
    match manager(&config) {
        Manager::Libvirt => stop_domain(vm, options)?,
        Manager::Qemu => match Monitor::connect(vm, Manager::Qemu, GREETING) {
            Ok(monitor) => qemu::stop(monitor, options.limit, options.force)?,
            Err(Error::NotRunning { .. }) => {}
            Err(Error::MonitorSilent { .. } | Error::MonitorFull { .. }) if options.force => {
                qemu::kill_silent(vm)?;
            }
            Err(error) => return Err(error),
        },
    }
    // For a domain without libvirt's hook, which has stopped the backend otherwise.
    Backend::end(vm, options.force)
}

fn stop_domain(vm: &VmName, options: &StopOptions) -> Result<(), Error> {
    if !virsh::is_running(vm)? {
        return Ok(());
    }
    let deadline = std::time::Instant::now() + options.limit;
    if !options.limit.is_zero() && virsh::power_down(vm, deadline)? {
        return Ok(());
    }
    if options.force {
        return virsh::destroy(vm);
    }
    Err(Error::Late {
        what: format!("the guest of VM {vm} has not powered off"),
        limit: options.limit,
        advice: "it runs on; try again, check the guest, or terminate it with --force".to_owned(),
    })
}

/// Whether the VM has a QEMU on this host.
pub fn is_running(vm: &VmName) -> Result<bool, Error> {
    let config = VmConfig::of_vm(vm)?;
    match Monitor::connect(vm, manager(&config), GREETING) {
        Ok(_) => Ok(true),
        Err(Error::NotRunning { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The VM's state, and its devices with their ports.
pub fn describe(vm: &VmName) -> Result<VmState, Error> {
    look(vm, &VmConfig::of_vm(vm)?)
}

fn look(vm: &VmName, config: &VmConfig) -> Result<VmState, Error> {
    let mut devices: Vec<DeviceState> = config
        .devices
        .iter()
        .enumerate()
        .map(|(position, device)| DeviceState {
            id: device.id.clone(),
            port: Some(device.port.unwrap_or(position as u16)),
            plugged: false,
            served: false,
            described: true,
        })
        .collect();
    let mut entry = |id: &DeviceId| -> usize {
        devices
            .iter()
            .position(|device| device.id == *id)
            .unwrap_or_else(|| {
                devices.push(DeviceState {
                    id: id.to_owned(),
                    port: None,
                    plugged: false,
                    served: false,
                    described: false,
                });
                devices.len() - 1
            })
    };
    let mut found = Vec::new();
    let mut backend_pid = None;
    if let Some(mut backend) = Backend::find(vm)? {
        backend_pid = Some(backend.pid());
        for served in backend.status()?.devices {
            found.push((entry(&served.device), None));
        }
    }
    let mut qemu_pid = None;
    let state = match Monitor::connect(vm, manager(config), GREETING) {
        Err(Error::NotRunning { .. }) => RunState::Stopped,
        Err(error) => return Err(error),
        Ok(mut monitor) => {
            qemu_pid = monitor.pid();
            let slots = Slots::of(&mut monitor)?;
            for id in plugged(&mut monitor)? {
                let port = slots.port_of(&mut monitor, &qemu_id(&id))?;
                found.push((entry(&id), Some(port)));
            }
            run_state(&mut monitor)?
        }
    };
    for (at, plugged) in found {
        match plugged {
            None => devices[at].served = true,
            Some(port) => {
                devices[at].plugged = true;
                devices[at].port = port;
            }
        }
    }
    Ok(VmState {
        vm: vm.to_owned(),
        state,
        qemu_pid,
        backend_pid,
        devices,
    })
}

fn run_state(monitor: &mut Monitor) -> Result<RunState, Error> {
    let status = monitor.run("query-status", serde_json::json!({}))?;
    match status["status"].as_str() {
        Some("running") => Ok(RunState::Running),
        Some(other) => Ok(RunState::Still(other.to_owned())),
        None => Ok(RunState::Still("unknown".to_owned())),
    }
}

pub(crate) fn manager(config: &VmConfig) -> Manager {
    config.manager.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_is_larger_than_the_host_does_not_start() {
        let host = HostMemory::read_with(|path| {
            let text = "MemTotal: 25165824 kB\nMemAvailable: 20971520 kB\nSwapFree: 0 kB\n";
            (path == "proc/meminfo").then(|| text.to_owned())
        });
        let vm = "web1".parse().unwrap();
        let mut config = VmConfig {
            memory: Some(30 << 30),
            ..VmConfig::default()
        };
        let error = check_memory(&vm, &config, &host).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(
            cause.starts_with("30720 MiB of guest RAM do not fit"),
            "{cause}"
        );
        config.memory = Some(16 << 30);
        check_memory(&vm, &config, &host).unwrap();
    }
}
