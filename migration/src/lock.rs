//! One farside at a time moves a VM on a host.

use std::{
    fs::{self, File, TryLockError},
    time::{Duration, Instant},
};

use farside_daemon::check_name_of;
use farside_vm_config::places;

use crate::{Error, Result};

/// How long one that was cut off may take to notice: it does what it is at to the
/// end, such as starting a VM.
const PATIENCE: Duration = Duration::from_secs(150);

/// How often to look; a lock has no event.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Held while a VM is moved; the kernel ends it with the process.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Refuses a name that could lead out of the folders in which it names files.
pub(crate) fn check_vm_name(vm: &str) -> Result<()> {
    check_name_of("VM name", vm).map_err(|error| Error::refused(error.to_string()))
}

impl Lock {
    /// Waits for whoever has it, with a limit.
    pub fn take(vm: &str) -> Result<Self> {
        check_vm_name(vm)?;
        let folder = places::state_dir().join("migrations");
        // Backends of other users look into it.
        fs::create_dir_all(&folder)?;
        let path = folder.join(format!("{vm}.lock"));
        let file = File::create(&path)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(LOOK_AGAIN);
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::refused(format!(
                        "another farside has been moving VM {vm} on this host for {PATIENCE:?} ({} is locked)",
                        path.display()
                    )));
                }
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
    }
}
