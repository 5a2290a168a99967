//! The other host: QEMU with a machine into which a guest can come.

use std::{net::IpAddr, time::Duration};

use farside_vm_config::Manager;
use farside_vm_control::{self as control, Monitor, RunState, StartOptions};
use serde_json::json;

use super::{address::uri, settled};
use crate::{Error, ErrorKind, Result};

/// How long backend and QEMU may take to start, each.
const START: Duration = Duration::from_secs(120);

/// How long QEMU may take to greet.
pub(crate) const GREETING: Duration = Duration::from_secs(20);

/// What QEMU is started with: it waits for a guest, which then stands still.
const ARGS: [&str; 3] = ["-incoming", "defer", "-S"];

/// Starts the VM's QEMU with its devices' ports empty, and has it listen. Returns
/// where, as QEMU takes it. One that listened before, for an attempt that failed,
/// is ended.
pub(crate) fn listen(vm: &str, address: IpAddr) -> Result<String> {
    match settled(|| control::describe(vm))?.state {
        RunState::Stopped => {}
        RunState::Running => {
            return Err(Error::refused(format!("VM {vm} runs there already")));
        }
        RunState::Still(_) => super::end(vm)?,
    }
    let options = StartOptions {
        limit: START,
        devices: false,
        qemu_args: ARGS.map(str::to_owned).into(),
    };
    control::start(vm, &options)?;
    let mut monitor = Monitor::connect(vm, Manager::Qemu, GREETING)?;
    super::send::set_capabilities(&mut monitor)?;
    let incoming = monitor.run("migrate-incoming", json!({ "uri": uri(address, 0) }));
    incoming.map_err(|error| {
        Error::new(
            ErrorKind::Vm,
            format!("QEMU cannot listen at {address} there: {error}"),
        )
    })?;
    let told = monitor.run("query-migrate", json!({}))?;
    let port = told["socket-address"][0]["port"].as_str();
    match port.and_then(|port| port.parse().ok()) {
        Some(port) => Ok(uri(address, port)),
        None => Err(Error::new(
            ErrorKind::Vm,
            format!("QEMU of VM {vm} does not say where it listens: {told}"),
        )),
    }
}
