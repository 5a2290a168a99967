//! A guest and its devices: unplugged before the transfer, plugged in again after it.

use std::time::Duration;

use farside_daemon::VmName;
use farside_vm_config::Manager;
use farside_vm_control::{
    self as control, AttachOptions, Backend, Monitor, RunState, StartOptions, StopOptions,
};
use serde_json::json;

use super::{incoming::GREETING, send::runs, wait_until_terminal};
use crate::{Error, ErrorKind, Result, Role};

/// How long a backend may take to start.
const START: Duration = Duration::from_secs(120);

/// Hot-unplugs all devices of the guest, each within `limit`. After a failure
/// [`resume_guest`] plugs the unplugged ones in again.
pub(crate) fn release_devices(vm: &VmName, limit: Duration) -> Result<()> {
    for device in control::describe(vm)?.devices {
        if device.plugged {
            let detached = control::detach(vm, &device.id, limit)?;
            let took = detached.guest_took.unwrap_or_default();
            log::info!("VM {vm}: the guest released {} in {took:.1?}", device.id);
        }
    }
    Ok(())
}

/// Resumes the guest at this host, and plugs the devices of its configuration in at
/// their ports.
pub(crate) fn resume_guest(vm: &VmName, role: Role) -> Result<()> {
    let state = wait_until_terminal(|| control::describe(vm))?.state;
    match (&state, role) {
        (RunState::Running, _) => {}
        // The guest died with its QEMU: boot it.
        (RunState::Stopped, Role::Source) => {
            log::error!("VM {vm}: QEMU has exited here; booting the VM again");
            control::start(vm, &StartOptions::default())?;
        }
        (RunState::Stopped, Role::Destination) => {
            return Err(cannot_resume(vm, "QEMU has exited"));
        }
        (RunState::Still(why), Role::Destination) if why == "inmigrate" => {
            return Err(cannot_resume(vm, "the guest was not received completely"));
        }
        (RunState::Still(_), _) => {
            let mut monitor = Monitor::connect(vm, Manager::Qemu, GREETING)?;
            monitor.run("cont", json!({}))?;
            if !runs(&mut monitor)? {
                return Err(cannot_resume(vm, "the guest stays paused after `cont`"));
            }
        }
    }
    Backend::ensure(vm, START)?;
    for device in control::describe(vm)?.devices {
        if device.described && !device.plugged {
            let options = AttachOptions { port: device.port };
            control::attach(vm, &device.id, &options)?;
        }
    }
    Ok(())
}

fn cannot_resume(vm: &VmName, why: &str) -> Error {
    Error::new(ErrorKind::Vm, format!("cannot resume VM {vm}: {why}"))
}

/// Ends a QEMU whose guest is paused, and the VM's backend. Fails if the guest runs.
pub(crate) fn end_paused(vm: &VmName) -> Result<()> {
    if wait_until_terminal(|| control::describe(vm))?.state == RunState::Running {
        return Err(Error::refused(format!(
            "VM {vm} has arrived there and runs: complete the migration with `farside migration resume {vm}`, and move it back from there"
        )));
    }
    let options = StopOptions {
        limit: Duration::ZERO,
        force: true,
    };
    wait_until_terminal(|| control::stop(vm, &options))
}
