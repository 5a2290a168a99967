//! A lock: one farside process at a time moves a VM on a host.

use std::time::Duration;

use farside_daemon::{FileLock, LockError, VmName, files};
use farside_vm_config::places;

use crate::{Error, Result};

/// Time limit to get the lock: an agent whose connection broke completes its step, such
/// as starting a VM.
const LIMIT: Duration = Duration::from_secs(150);

/// Waits, with a limit, for the lock that is held while a VM is moved.
pub fn lock_vm(vm: &VmName) -> Result<FileLock> {
    let directory = places::state_dir().join("migrations");
    // World-readable: backends of other users read journals there.
    files::create_directory(&directory)?;
    let path = directory.join(format!("{vm}.lock"));
    FileLock::take(&path, LIMIT).map_err(|error| match error {
        LockError::Held(_) => Error::refused(format!(
            "another farside has been moving VM {vm} on this host for {LIMIT:?} ({} is locked)",
            path.display()
        )),
        LockError::System(error) => error.into(),
    })
}
