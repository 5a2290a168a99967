//! `farside start` and `farside stop`.

use std::time::Duration;

use clap::Args as ClapArgs;
use farside_daemon::VmName;
use farside_vm_control::{RunState, StartOptions, StopOptions, VmState};

use crate::waiting::Waiting;

/// Start a VM in the background: its backend and QEMU
///
/// Starts a VM in the background from its configuration: its backend, then QEMU, or
/// libvirt's domain of that name. Their logs are in the VM's state directory. If
/// one does not start, the other is stopped. Where the backend is a systemd unit, so is
/// QEMU, which root starts: farside-qemu@VM.service.
#[derive(Debug, ClapArgs)]
pub(crate) struct Start {
    /// Name of the VM; its configuration is vm/NAME.toml in the configuration
    /// directory.
    #[arg(value_name = "VM")]
    vm: VmName,
    /// Time limit for the start of the backend, and of QEMU, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    limit: u64,
}

pub(crate) fn start(args: &Start) -> anyhow::Result<()> {
    let vm = &args.vm;
    let options = StartOptions {
        limit: Duration::from_secs(args.limit),
        ..StartOptions::default()
    };
    farside_migration::may_run(&farside_migration::LocalHost, vm)?;
    let waiting = Waiting::new(format!("starting VM {vm}"));
    let state = farside_vm_control::start(vm, &options)?;
    drop(waiting);
    println!("{}", said(&state));
    Ok(())
}

fn said(state: &VmState) -> String {
    let vm = &state.vm;
    let what = match &state.state {
        RunState::Running => "runs".to_owned(),
        RunState::Stopped => "has ended already".to_owned(),
        RunState::Still(why) => format!("is started ({why})"),
    };
    match state.qemu_pid {
        Some(pid) => format!("VM {vm} {what} (QEMU is process {pid})"),
        None => format!("VM {vm} {what}"),
    }
}

/// Shut down a VM started by `farside start` or libvirt, and its backend
///
/// Stops a VM: its guest powers off (ACPI shutdown), then its backend returns the
/// devices. All devices are returned when the command exits.
#[derive(Debug, ClapArgs)]
pub(crate) struct Stop {
    /// Name of the VM.
    #[arg(value_name = "VM")]
    vm: VmName,
    /// Time limit for the guest to power off, in seconds; 0 skips the ACPI
    /// shutdown.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    limit: u64,
    /// Terminate QEMU if the guest has not powered off by then, like a power loss:
    /// unwritten data is lost. Kills QEMU and backend if they hang, and removes
    /// devices from a VMM that farside did not start.
    #[arg(long)]
    force: bool,
}

pub(crate) fn stop(args: &Stop) -> anyhow::Result<()> {
    let vm = &args.vm;
    let options = StopOptions {
        limit: Duration::from_secs(args.limit),
        force: args.force,
    };
    let waiting = Waiting::new(format!(
        "waiting for VM {vm} to power off (at most {} s)",
        args.limit
    ));
    farside_vm_control::stop(vm, &options)?;
    drop(waiting);
    println!("VM {vm} is stopped; its devices are returned");
    Ok(())
}
