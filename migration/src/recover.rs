//! Manual recovery after a host is lost permanently.

use farside_daemon::VmName;
use farside_lender_protocol::{Fences, HeldFence, Secret};

use crate::{Error, Journal, Lenders, Result, Store, plan::random_id};

/// Removes the moved marker of a VM that moved away.
pub fn forget(store: &dyn Store, vm: &VmName) -> Result<()> {
    no_open_migration(store, vm)?;
    if store.moved_marker(vm)?.is_none() {
        return Err(Error::refused(format!(
            "VM {vm} has not moved away from this host"
        )));
    }
    store.write_moved_marker(vm, None)
}

/// Takes a VM's devices for this host from whichever host holds them: a handover that
/// is in no journal. Returns the fences.
///
/// A lender at a TCP port takes the devices from a host whose VM has moved with them only for the
/// secrets of that VM's fences, if this host has them, or if a rule of the lender allows this host
/// to claim them.
pub fn claim(host: &(impl Store + Lenders), vm: &VmName) -> Result<Fences> {
    no_open_migration(host, vm)?;
    let Some(configuration) = host.configuration(vm)? else {
        return Err(Error::refused(format!(
            "VM {vm} has no configuration on this host: put one there first (of a VM that moved away, the old one is moved.toml in its state directory)"
        )));
    };
    let id = random_id()?;
    let known = host.fences(vm)?;
    let mut fences = Fences::default();
    for device in host.find_all(vm, &configuration)? {
        let newest = device.fences.iter().find(|fence| fence.vm == *vm);
        let supersedes = newest.map(|fence| HeldFence {
            generation: fence.generation,
            secret: known.of(&device.id).and_then(|known| known.secret),
        });
        let secret = Secret::random()?;
        let generation = host.hand_over(&device.lender, &device.id, vm, &id, supersedes, secret)?;
        let secret = Some(secret);
        fences.0.insert(device.id, HeldFence { generation, secret });
    }
    host.write_fences(vm, &fences)?;
    host.write_moved_marker(vm, None)?;
    Ok(fences)
}

fn no_open_migration(store: &dyn Store, vm: &VmName) -> Result<()> {
    match store.journal(vm)?.filter(Journal::is_open) {
        Some(open) => Err(Error::refused(format!(
            "VM {vm} is moving (migration {}, {}): end that first with `farside migration resume {vm}`, or take it back with --back",
            open.id, open.step
        ))),
        None => Ok(()),
    }
}
