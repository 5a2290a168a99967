//! Errors of operations on VMs.

use std::{io, path::PathBuf, time::Duration};

use farside_backend_api::admin::Refusal;
use farside_daemon::{DeviceId, Holder, VmName};
use farside_fabric::host_memory::TooLarge;
use farside_qemu_configs::{ProbeError, VmError};
use farside_vm_config::LoadError;

/// A failed operation on a VM. Unless the message states otherwise, the VM is unchanged.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum Error {
    /// The VM has no configuration, or one that does not parse.
    #[error(transparent)]
    Description(#[from] LoadError),
    /// The VM configuration is invalid for a command line.
    #[error("cannot make a QEMU command line for VM {vm}")]
    Vm { vm: VmName, source: VmError },
    /// Its RAM exceeds this host's free memory.
    #[error("VM {vm} cannot start")]
    TooLarge { vm: VmName, source: TooLarge },
    /// The QEMU binary does not support borrowed devices, or is not QEMU.
    #[error("VM {vm} cannot start")]
    Qemu { vm: VmName, source: ProbeError },
    /// QEMU as root would listen in a directory of the backend's user.
    #[error(
        "VM {vm} cannot start as root: its backend is a systemd unit, whose user {user} owns the VM's directory. Install farside-qemu@.service and farside-qemu@.socket (farside's examples have them), by which QEMU has a user of its own, or run it as {user}, by `systemctl start farside@{vm}` and `runuser -u {user} -- env FARSIDE_RUNTIME_DIR=/run/farside FARSIDE_CONFIG_DIR=/etc/farside FARSIDE_STATE_DIR=/var/lib/farside farside start {vm}`"
    )]
    UnitUser { vm: VmName, user: String },
    /// Another command is in progress on the VM.
    #[error(
        "another farside command{holder} is in progress on VM {vm}{}: wait until it has ended",
        waited(*limit)
    )]
    Locked {
        vm: VmName,
        holder: Holder,
        limit: Duration,
    },
    /// The VM runs already.
    #[error("VM {vm} runs already (QEMU is process {pid})")]
    Running { vm: VmName, pid: u32 },
    /// QEMU is not running.
    #[error("VM {vm} does not run{hint}")]
    NotRunning { vm: VmName, hint: String },
    /// QEMU runs, but its monitor does not answer.
    #[error(
        "QEMU of VM {vm} (process {pid}) does not answer at {path} within {limit:?}: it serves one client at a time, so close any other, or QEMU hangs",
        path = path.display()
    )]
    MonitorSilent {
        vm: VmName,
        pid: u32,
        path: PathBuf,
        limit: Duration,
    },
    /// A socket unit listens, and QEMU has not taken it over.
    #[error(
        "QEMU of VM {vm} has not taken the socket {path} over within {limit:?}, where systemd listens for it: see `systemctl status farside-qemu@{vm}`",
        path = path.display()
    )]
    MonitorWaits {
        vm: VmName,
        path: PathBuf,
        limit: Duration,
    },
    /// The monitor's backlog is full.
    #[error(
        "the monitor of VM {vm} at {path} accepts no more clients: close the others or, if QEMU hangs, run `farside stop --force {vm}`",
        path = path.display()
    )]
    MonitorFull { vm: VmName, path: PathBuf },
    /// The monitor closed, or sent an invalid answer.
    #[error("lost the monitor of VM {vm}: {why}")]
    MonitorLost { vm: VmName, why: String },
    /// QEMU refused a command.
    #[error("QEMU of VM {vm} refuses {command}: {reason}")]
    Refused {
        vm: VmName,
        command: String,
        /// QMP's class of the error, such as `DeviceNotFound`.
        class: String,
        reason: String,
    },
    /// No backend runs.
    #[error(
        "no backend runs for VM {vm}: `farside serve --vm {vm} --config FILE` runs one, and `systemctl start farside@{vm}` where it is a unit"
    )]
    NoBackend { vm: VmName },
    /// The connection to a backend broke, or its answer is malformed.
    #[error("lost the backend of VM {vm} at {path}: {why}", path = path.display())]
    BackendLost {
        vm: VmName,
        path: PathBuf,
        why: String,
    },
    /// A backend runs, but does not answer.
    #[error(
        "the backend of VM {vm} (process {pid}) does not answer at {path} within {limit:?}: it hangs, or is stopped (`kill -CONT {pid}` continues a stopped one); `farside stop {vm} --force` kills it",
        path = path.display()
    )]
    BackendSilent {
        vm: VmName,
        pid: u32,
        path: PathBuf,
        limit: Duration,
    },
    /// The backend refused a request.
    #[error("the backend of VM {vm}: {refusal}")]
    Backend { vm: VmName, refusal: Refusal },
    /// A started process exited too early.
    #[error("{what} of VM {vm} does not start: {why}")]
    Failed {
        what: &'static str,
        vm: VmName,
        why: String,
    },
    /// The backend is not stopped, because a VMM still uses its devices.
    #[error(
        "a VMM that farside cannot stop is connected to the backend of VM {vm} and uses {devices}: shut it down first, or take the devices from it with --force"
    )]
    InUse { vm: VmName, devices: String },
    /// An operation timed out.
    #[error("{what} within {limit:?}; {advice}")]
    Late {
        what: String,
        limit: Duration,
        advice: String,
    },
    /// A guest is told of a slot, not of a function.
    #[error(
        "device {device} is one function of a device of VM {vm}, {others}, and a guest releases all of them at once: change its configuration, then stop and start it"
    )]
    OneFunction {
        device: DeviceId,
        vm: VmName,
        /// "with" its other functions, as far as they are known.
        others: String,
    },
    /// The device is plugged in elsewhere in the VM.
    #[error(
        "device {device} is plugged into VM {vm} already, at port {at}: detach it first to move it to port {wanted}"
    )]
    ElsewhereInVm {
        device: DeviceId,
        vm: VmName,
        at: u16,
        wanted: u16,
    },
    /// QEMU has the device, but no backend serves it.
    #[error(
        "device {device} is plugged into VM {vm}, but its backend has ended since, and QEMU does not reconnect: `farside detach` it, then attach it again"
    )]
    Dead { device: DeviceId, vm: VmName },
    /// The VM does not have the device.
    #[error("device {device} is not plugged into VM {vm}; it has {has}")]
    NotPlugged {
        device: DeviceId,
        vm: VmName,
        has: String,
    },
    /// All ports are in use.
    #[error("VM {vm} has no free port for device {device} (in use: {used}): {advice}")]
    NoPort {
        vm: VmName,
        device: DeviceId,
        used: String,
        advice: String,
    },
    /// The requested port is not available.
    #[error("port {port} of VM {vm} {why}")]
    Port { port: u16, vm: VmName, why: String },
    /// The guest rejected an unplug.
    #[error(
        "the guest of VM {vm} refuses to release {device}: the device is still in use; it stays plugged in"
    )]
    GuestRefuses { vm: VmName, device: DeviceId },
    /// The guest did not answer an unplug.
    #[error(
        "the guest of VM {vm} has not released {device} within {limit:?}: {why}; the device stays plugged in, and is removed if the guest releases it later"
    )]
    GuestHolds {
        vm: VmName,
        device: DeviceId,
        limit: Duration,
        why: String,
    },
    /// virsh failed.
    #[error("virsh {command} failed: {said}")]
    Virsh { command: String, said: String },
    /// systemctl failed.
    #[error("systemctl {command} failed: {said}")]
    Systemd { command: String, said: String },
    /// Not supported for this kind of VM.
    #[error("VM {vm}: {what}")]
    Unsupported { vm: VmName, what: String },
    /// A system call failed.
    #[error("{what}")]
    System { what: String, source: io::Error },
}

impl Error {
    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        |source| Self::System { what, source }
    }
}

fn waited(limit: Duration) -> String {
    match limit {
        Duration::ZERO => String::new(),
        limit => format!(", and has not ended within {limit:?}"),
    }
}
