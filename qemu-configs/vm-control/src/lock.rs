//! Serializes commands on a VM: two that plug devices into the same port, or a start and a stop,
//! would interfere.

use std::time::Duration;

use farside_daemon::{FileLock, LockError, VmName, files};
use farside_vm_config::places;

use crate::Error;

/// Takes the lock of a VM for the duration of a command. Waits up to `limit` while another one holds it.
pub(crate) fn lock_vm(vm: &VmName, limit: Duration) -> Result<FileLock, Error> {
    let directory = places::vm_state(vm);
    let path = directory.join("command.lock");
    let at = || Error::system(format!("cannot lock VM {vm} by {}", path.display()));
    files::create_directory(&directory).map_err(at())?;
    FileLock::take(&path, limit).map_err(|error| match error {
        LockError::Held(holder) => Error::Locked {
            vm: vm.to_owned(),
            holder,
            limit,
        },
        LockError::System(error) => at()(error),
    })
}
