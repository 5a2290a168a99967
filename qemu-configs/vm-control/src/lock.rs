//! One command at a time on a VM: two that plug devices into the same port, or
//! one that stops what another starts, would leave things half done. A command
//! that is killed gives its lock back with its files.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
};

use farside_vm_config::places;

use crate::Error;

/// Held while a command is at work on a VM.
pub(crate) struct Lock(#[allow(dead_code, reason = "held, not used")] File);

impl Lock {
    pub(crate) fn take(vm: &str) -> Result<Self, Error> {
        let directory = places::vm_state(vm);
        let path = directory.join("command.lock");
        let at = || Error::system(format!("cannot lock VM {vm} by {}", path.display()));
        fs::create_dir_all(&directory).map_err(at())?;
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(at())?;
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => {
                let mut pid = String::new();
                // For the message only.
                let _ = file.read_to_string(&mut pid);
                let by = match pid.trim() {
                    "" => String::new(),
                    pid => format!(" (process {pid})"),
                };
                let vm = vm.to_owned();
                return Err(Error::Locked { vm, by });
            }
            Err(fs::TryLockError::Error(error)) => return Err(at()(error)),
        }
        file.set_len(0)
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .map_err(at())?;
        Ok(Self(file))
    }
}
