//! `farside start` and `farside stop`.

use std::time::Duration;

use clap::Args as ClapArgs;
use farside_vm_control::{RunState, StartOptions, StopOptions, VmState};

use crate::waiting::Waiting;

/// Starts a VM in the background from its description: its backend, then QEMU,
/// or libvirt's domain of that name. Their logs are in the VM's state directory.
/// When one does not start, nothing stays behind.
#[derive(Debug, ClapArgs)]
pub(crate) struct Start {
    /// Name of the VM; its description is vm/NAME.toml in the configuration
    /// directory.
    #[arg(value_name = "VM")]
    vm: String,
    /// How long backend and QEMU may take to start, each, seconds.
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

/// Ends a VM: its guest powers off, then its backend gives the devices back.
/// When this returns, they are back at their lenders.
#[derive(Debug, ClapArgs)]
pub(crate) struct Stop {
    /// Name of the VM.
    #[arg(value_name = "VM")]
    vm: String,
    /// How long the guest may take to power off, seconds; 0 does not ask it.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    limit: u64,
    /// End QEMU when the guest has not powered off by then, as if its power was
    /// cut: what it has not written is lost. Kills QEMU and backend if they hang,
    /// and takes devices from a VMM that farside did not start.
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
