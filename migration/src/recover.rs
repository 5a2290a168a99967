//! What people can do by hand when a host is lost for good.

use farside_lender_protocol::Fences;

use crate::{Error, Host, Journal, Result, plan::random_id};

/// Removes what reminds this host of a VM that moved away.
pub fn forget(host: &dyn Host, vm: &str) -> Result<()> {
    no_open_migration(host, vm)?;
    if host.tombstone(vm)?.is_none() {
        return Err(Error::refused(format!(
            "VM {vm} has not moved away from this host"
        )));
    }
    host.write_tombstone(vm, None)
}

/// Takes a VM's devices for this host, from whichever host has them: a handover
/// that no journal knows of. Returns the fences.
pub fn claim(host: &dyn Host, vm: &str) -> Result<Fences> {
    no_open_migration(host, vm)?;
    let Some(description) = host.description(vm)? else {
        return Err(Error::refused(format!(
            "VM {vm} has no description on this host: put one there first (of a VM that moved away, the old one is moved.toml in its state folder)"
        )));
    };
    let id = random_id()?;
    let mut fences = Fences::default();
    for device in host.devices(vm, &description)? {
        let newest = device.fences.iter().find(|fence| fence.vm == vm);
        let supersedes = newest.map(|fence| fence.epoch);
        let fence = host.hand_over(&device.lender, &device.id, vm, &id, supersedes)?;
        fences.0.insert(device.id, fence);
    }
    host.write_fences(vm, &fences)?;
    host.write_tombstone(vm, None)?;
    Ok(fences)
}

fn no_open_migration(host: &dyn Host, vm: &str) -> Result<()> {
    match host.journal(vm)?.filter(Journal::is_open) {
        Some(open) => Err(Error::refused(format!(
            "VM {vm} is moving (migration {}, {}): end that first with `farside migrate --resume {vm}`, or --resume {vm} --back",
            open.id, open.step
        ))),
        None => Ok(()),
    }
}
