//! The other host: a QEMU that waits for an incoming guest.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use farside_daemon::VmName;
use farside_vm_config::Manager;
use farside_vm_control::{self as control, Monitor, RunState, StartOptions};
use serde_json::json;

use super::{address::uri, wait_until_terminal};
use crate::{Error, ErrorKind, Result};

/// Time limit for backend and QEMU to start, each.
const START: Duration = Duration::from_secs(120);

/// Time limit for the QMP greeting.
pub(crate) const GREETING: Duration = Duration::from_secs(20);

/// QEMU arguments: wait for an incoming guest, and leave it paused.
const ARGS: [&str; 3] = ["-incoming", "defer", "-S"];

/// Starts the VM's QEMU without the borrowed devices, listening for the guest. Returns
/// its port. Ends a QEMU that still listens for a failed attempt.
pub(crate) fn incoming(vm: &VmName, address: IpAddr) -> Result<u16> {
    match wait_until_terminal(|| control::describe(vm))?.state {
        RunState::Stopped => {}
        RunState::Running => {
            return Err(Error::refused(format!("VM {vm} runs there already")));
        }
        RunState::Still(_) => super::end_paused(vm)?,
    }
    let options = StartOptions {
        limit: START,
        devices: false,
        qemu_args: ARGS.map(str::to_owned).into(),
    };
    control::start(vm, &options)?;
    let mut monitor = Monitor::connect(vm, Manager::Qemu, GREETING)?;
    super::send::set_capabilities(&mut monitor)?;
    let incoming = monitor.run(
        "migrate-incoming",
        json!({ "uri": uri(SocketAddr::new(address, 0)) }),
    );
    incoming.map_err(|error| {
        Error::new(
            ErrorKind::Vm,
            format!("QEMU cannot listen at {address} there: {error}"),
        )
    })?;
    let answer = monitor.run("query-migrate", json!({}))?;
    let port = answer["socket-address"][0]["port"].as_str();
    match port.and_then(|port| port.parse().ok()) {
        Some(port) => Ok(port),
        None => Err(Error::new(
            ErrorKind::Vm,
            format!("QEMU of VM {vm} does not report the port at which it listens: {answer}"),
        )),
    }
}
