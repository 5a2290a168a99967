//! Manual recovery after a host is lost permanently.

use farside_daemon::VmName;
use farside_lender_protocol::Fences;

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
pub fn claim(host: &(impl Store + Lenders), vm: &VmName) -> Result<Fences> {
    no_open_migration(host, vm)?;
    let Some(configuration) = host.configuration(vm)? else {
        return Err(Error::refused(format!(
            "VM {vm} has no configuration on this host: put one there first (of a VM that moved away, the old one is moved.toml in its state directory)"
        )));
    };
    let id = random_id()?;
    let mut fences = Fences::default();
    for device in host.find_all(vm, &configuration)? {
        let newest = device.fences.iter().find(|fence| fence.vm == *vm);
        let supersedes = newest.map(|fence| fence.generation);
        let fence = host.hand_over(&device.lender, &device.id, vm, &id, supersedes)?;
        fences.0.insert(device.id, fence);
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
