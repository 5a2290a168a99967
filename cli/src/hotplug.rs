//! `farside attach` and `farside detach`.

use std::time::Duration;

use clap::Args as ClapArgs;
use farside_vm_control::AttachOptions;

use crate::waiting::Waiting;

/// Plugs a device into a running VM. The backend looks it up at its lenders and
/// serves it, then QEMU plugs it in; the guest finds it as it would any
/// hot-plugged device.
///
/// It is there until it is detached or QEMU ends, as with `virsh attach-device
/// --live`: neither the VM's description nor a libvirt domain's XML changes. To have
/// it at the next start, too, add it to `devices` in the description, or to the
/// domain with `farside libvirt --edit`.
#[derive(Debug, ClapArgs)]
pub(crate) struct Attach {
    /// Name of the VM.
    #[arg(value_name = "VM")]
    vm: String,
    /// Id of the device.
    #[arg(value_name = "DEVICE")]
    device: String,
    /// Number of the root port (on a pc: of the place on the bus) [default: that
    /// of the VM's description, else the first that is free].
    #[arg(long, value_name = "N")]
    port: Option<u16>,
}

pub(crate) fn attach(args: &Attach) -> anyhow::Result<()> {
    let Attach { vm, device, port } = args;
    let waiting = Waiting::new(format!("plugging {device} into VM {vm}"));
    let attached = farside_vm_control::attach(vm, device, &AttachOptions { port: *port })?;
    drop(waiting);
    let at = attached
        .port
        .map_or(String::new(), |port| format!(", at port {port}"));
    match attached.already {
        false => println!("{device} is plugged into VM {vm}{at}"),
        true => println!("{device} was plugged into VM {vm} before{at}"),
    }
    Ok(())
}

/// Plugs a device out of a running VM. The guest is asked to let go of it;
/// when it has, the device goes back to its lender. A guest that does not within
/// the limit keeps the device, and it goes on working.
///
/// Unmount what is on it first: Linux lets go of a drive that is in use, too. A
/// device of the VM's description is back at the next start; take it out there, too,
/// if it is to stay away.
#[derive(Debug, ClapArgs)]
pub(crate) struct Detach {
    /// Name of the VM.
    #[arg(value_name = "VM")]
    vm: String,
    /// Id of the device.
    #[arg(value_name = "DEVICE")]
    device: String,
    /// How long the guest may take to let go, seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    limit: u64,
}

pub(crate) fn detach(args: &Detach) -> anyhow::Result<()> {
    let Detach { vm, device, limit } = args;
    let waiting = Waiting::new(format!(
        "waiting for the guest of VM {vm} to let go of {device} (at most {limit} s)"
    ));
    let detached = farside_vm_control::detach(vm, device, Duration::from_secs(*limit))?;
    drop(waiting);
    match detached.guest_took {
        Some(took) => println!(
            "{device} is returned; the guest of VM {vm} took {:.1} s to let go of it",
            took.as_secs_f64()
        ),
        None => println!("{device} is returned; VM {vm} did not have it plugged in any more"),
    }
    Ok(())
}
