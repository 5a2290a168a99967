//! Logs of background processes.

use std::{
    fs::File,
    os::unix::{fs::FileExt, process::CommandExt},
    path::PathBuf,
    process::{Command, Stdio},
};

use farside_daemon::{VmName, files};
use farside_vm_config::places;

use crate::{Error, process::Process};

/// Maximum number of log lines in a message.
const LINES: usize = 12;

/// Maximum number of bytes of a log that are read for them.
const BYTES: u64 = 64 << 10;

/// An appended log, and the offset of this run's part.
pub(crate) struct Log {
    pub(crate) path: PathBuf,
    file: File,
    start: u64,
}

impl Log {
    /// Opens `name` in the VM's state directory.
    pub(crate) fn open(vm: &VmName, name: &str) -> Result<Self, Error> {
        let directory = places::vm_state(vm);
        let path = directory.join(name);
        let opened = files::create_directory(&directory).and_then(|()| {
            let file = files::append(&path)?;
            let start = file.metadata()?.len();
            Ok((file, start))
        });
        let (file, start) =
            opened.map_err(Error::system(format!("cannot log to {}", path.display())))?;
        Ok(Self { path, file, start })
    }

    /// Starts a background process that writes to the log, in its own process group, which does not
    /// receive the terminal's signals.
    pub(crate) fn spawn(&self, command: &mut Command) -> Result<Process, Error> {
        let what = format!("cannot log to {}", self.path.display());
        let writer = || self.file.try_clone().map_err(Error::system(what.clone()));
        let child = command
            .stdin(Stdio::null())
            .stdout(writer()?)
            .stderr(writer()?)
            .current_dir("/")
            .process_group(0)
            .spawn()
            .map_err(Error::system(format!(
                "cannot run {}",
                command.get_program().display()
            )))?;
        Process::of_child(&child).map_err(Error::system("pidfd"))
    }

    /// The last lines of this run, for a message.
    pub(crate) fn last_words(&self) -> String {
        let read = || {
            let len = self.file.metadata()?.len();
            let start = self.start.max(len.saturating_sub(BYTES));
            let mut bytes = vec![0; len.saturating_sub(start) as usize];
            let read = self.file.read_at(&mut bytes, start)?;
            Ok::<_, std::io::Error>(String::from_utf8_lossy(&bytes[..read]).into_owned())
        };
        let text = read().unwrap_or_default();
        let lines: Vec<_> = text.trim().lines().collect();
        match lines.as_slice() {
            [] => format!("it printed nothing (log: {})", self.path.display()),
            lines => {
                let last = &lines[lines.len().saturating_sub(LINES)..];
                format!("{} (log: {})", last.join("\n  "), self.path.display())
            }
        }
    }
}
