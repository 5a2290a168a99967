//! `farside attach` and `farside detach`; and the unplug of a device that its lender takes back.

use std::time::Duration;

use clap::Args as ClapArgs;
use farside_daemon::{DeviceId, VmName};
use farside_error_chain::Chain;
use farside_vm_control::AttachOptions;

use crate::waiting::Waiting;

/// Hot-plug a device into a running VM
///
/// The backend looks it up at its lenders and serves it, then QEMU adds it; the guest
/// handles it like any hot-plugged device.
///
/// It stays until it is detached or QEMU exits, as with `virsh attach-device
/// --live`: neither the VM configuration nor a libvirt domain's XML is changed. To
/// make it permanent, add it to `devices` in the VM configuration, or to the domain
/// with `farside libvirt --edit`.
#[derive(Debug, ClapArgs)]
pub(crate) struct Attach {
    /// Name of the VM.
    #[arg(value_name = "VM")]
    vm: VmName,
    /// Id of the device.
    #[arg(value_name = "DEVICE")]
    device: DeviceId,
    /// Number of the root port (on a pc: of the slot on the bus) [default: that of
    /// the VM configuration, else the first free one].
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

/// Hot-unplug a device from a running VM
///
/// The guest is asked to release it; then the device is returned to its lender. If the
/// guest does not release it within the limit, the device stays. It continues to work
/// unless the guest releases it later: repeat the command then to return it.
///
/// Unmount its file systems first: Linux releases a disk that is in use, too. A
/// device of the VM configuration is back at the next start; remove it there, too,
/// to make the change permanent.
#[derive(Debug, ClapArgs)]
pub(crate) struct Detach {
    /// Name of the VM.
    #[arg(value_name = "VM")]
    vm: VmName,
    /// Id of the device.
    #[arg(value_name = "DEVICE")]
    device: DeviceId,
    /// Time limit for the guest to release the device, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    limit: u64,
}

pub(crate) fn detach(args: &Detach) -> anyhow::Result<()> {
    let Detach { vm, device, limit } = args;
    let waiting = Waiting::new(format!(
        "waiting for the guest of VM {vm} to release {device} (at most {limit} s)"
    ));
    let detached = farside_vm_control::detach(vm, device, Duration::from_secs(*limit))?;
    drop(waiting);
    match detached.guest_took {
        Some(took) => println!(
            "{device} is returned; the guest of VM {vm} took {:.1} s to release it",
            took.as_secs_f64()
        ),
        None => println!("{device} is returned; VM {vm} did not have it plugged in any more"),
    }
    Ok(())
}

/// Hot-unplugs a device that its lender takes back, as [`detach`] does. If the guest does not release
/// it within `limit`, the lender ends the lease.
pub(crate) fn release(vm: &VmName, device: &DeviceId, limit: Duration) {
    match farside_vm_control::detach(vm, device, limit) {
        Ok(_) => log::info!("device {device} (VM {vm}): released for its lender"),
        Err(error) => log::warn!(
            "device {device} (VM {vm}): the guest has not released it for its lender: {error}",
            error = Chain(&error)
        ),
    }
}
