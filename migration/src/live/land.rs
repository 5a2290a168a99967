//! A guest and its devices: let go of before it moves, and found again after it.

use std::time::Duration;

use farside_vm_config::Manager;
use farside_vm_control::{
    self as control, AttachOptions, Backend, Monitor, RunState, StartOptions, StopOptions,
};
use serde_json::json;

use super::{listen::GREETING, send::runs, settled};
use crate::{Error, ErrorKind, Result, Role};

/// How long a backend may take to start.
const START: Duration = Duration::from_secs(120);

/// Has the guest let go of all its devices, each within `limit`. When one stays,
/// those that went come back with [`land`].
pub(crate) fn let_go(vm: &str, limit: Duration) -> Result<()> {
    for device in control::describe(vm)?.devices {
        if device.plugged {
            let detached = control::detach(vm, &device.id, limit)?;
            let took = detached.guest_took.unwrap_or_default();
            log::info!("VM {vm}: the guest let go of {} in {took:.1?}", device.id);
        }
    }
    Ok(())
}

/// Has the guest go on at this host, and gives it the devices of its description,
/// at their ports.
pub(crate) fn land(vm: &str, role: Role) -> Result<()> {
    let state = settled(|| control::describe(vm))?.state;
    match (&state, role) {
        (RunState::Running, _) => {}
        // QEMU has died, and with it the guest: what is left is to boot it.
        (RunState::Stopped, Role::Source) => {
            log::error!("VM {vm}: QEMU has ended here; the VM is started anew");
            control::start(vm, &StartOptions::default())?;
        }
        (RunState::Stopped, Role::Destination) => {
            return Err(gone(vm, "QEMU has ended"));
        }
        (RunState::Still(why), Role::Destination) if why == "inmigrate" => {
            return Err(gone(vm, "the guest has not come whole"));
        }
        (RunState::Still(_), _) => {
            let mut monitor = Monitor::connect(vm, Manager::Qemu, GREETING)?;
            monitor.run("cont", json!({}))?;
            if !runs(&mut monitor)? {
                return Err(gone(vm, "the guest does not go on"));
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

fn gone(vm: &str, why: &str) -> Error {
    Error::new(ErrorKind::Vm, format!("VM {vm} cannot go on: {why}"))
}

/// Ends a QEMU whose guest stands still, and the VM's backend. A guest that runs
/// is left alone.
pub(crate) fn end(vm: &str) -> Result<()> {
    if settled(|| control::describe(vm))?.state == RunState::Running {
        return Err(Error::refused(format!(
            "VM {vm} has arrived there and runs: let it go on with --resume, and move it back from there"
        )));
    }
    let options = StopOptions {
        limit: Duration::ZERO,
        force: true,
    };
    settled(|| control::stop(vm, &options))
}
