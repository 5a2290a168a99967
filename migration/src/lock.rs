//! A lock: one farside process at a time moves a VM on a host.

use std::{fs, time::Duration};

use farside_daemon::{FileLock, LockError, check_name_of};
use farside_vm_config::places;

use crate::{Error, Result};

/// Time limit to get the lock: an agent whose connection broke completes its step, such
/// as starting a VM.
const LIMIT: Duration = Duration::from_secs(150);

/// Refuses a name that could lead out of the directories of farside's files.
pub(crate) fn check_vm_name(vm: &str) -> Result<()> {
    check_name_of("VM name", vm).map_err(|error| Error::refused(error.to_string()))
}

/// Waits, with a limit, for the lock that is held while a VM is moved.
pub fn lock_vm(vm: &str) -> Result<FileLock> {
    check_vm_name(vm)?;
    let directory = places::state_dir().join("migrations");
    // World-readable: backends of other users read journals there.
    fs::create_dir_all(&directory)?;
    let path = directory.join(format!("{vm}.lock"));
    FileLock::take(&path, LIMIT).map_err(|error| match error {
        LockError::Held(_) => Error::refused(format!(
            "another farside has been moving VM {vm} on this host for {LIMIT:?} ({} is locked)",
            path.display()
        )),
        LockError::System(error) => error.into(),
    })
}
