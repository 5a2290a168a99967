//! A lock: one farside process at a time moves a VM on a host.

use std::{
    fs::{self, File, TryLockError},
    time::{Duration, Instant},
};

use farside_daemon::check_name_of;
use farside_vm_config::places;

use crate::{Error, Result};

/// Time limit to get the lock: an agent whose connection broke completes its step, such
/// as starting a VM.
const LIMIT: Duration = Duration::from_secs(150);

/// Pause between attempts.
const TRY_AGAIN: Duration = Duration::from_millis(50);

/// Held while a VM is moved; the kernel ends it with the process.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Refuses a name that could lead out of the directories of farside's files.
pub(crate) fn check_vm_name(vm: &str) -> Result<()> {
    check_name_of("VM name", vm).map_err(|error| Error::refused(error.to_string()))
}

impl Lock {
    /// Waits for the lock, with a limit.
    pub fn take(vm: &str) -> Result<Self> {
        check_vm_name(vm)?;
        let directory = places::state_dir().join("migrations");
        // World-readable: backends of other users read journals there.
        fs::create_dir_all(&directory)?;
        let path = directory.join(format!("{vm}.lock"));
        let file = File::create(&path)?;
        let deadline = Instant::now() + LIMIT;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(TRY_AGAIN);
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::refused(format!(
                        "another farside has been moving VM {vm} on this host for {LIMIT:?} ({} is locked)",
                        path.display()
                    )));
                }
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
    }
}
