//! A lender of a DMA test device, and backends that borrow it: processes, as a user would
//! start them.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use farside_scripted_vmm::device::Device;
use tempfile::TempDir;

use crate::{
    child::Child,
    scene::{self, SHORT, await_socket, farside},
};

/// The borrowed device.
pub(super) const DEVICE: &str = "disk0";

/// Processes, and a directory with their sockets. All are removed on drop.
pub(super) struct Stage {
    program: PathBuf,
    backends: Vec<Child>,
    lender: Child,
    directory: TempDir,
}

impl Stage {
    /// Starts the lender.
    pub(super) fn start(program: &Path) -> Result<Self> {
        let directory = scene::directory("relayed")?;
        let path = directory.path();
        let arguments = ["lend", "--name", "here", "--dma-test", DEVICE];
        let lend = farside(program, path, &arguments);
        let mut lender = Child::spawn("the lender", lend, &path.join("lender.log"))?;
        await_socket(&path.join("lender.sock"), &mut lender)?;
        Ok(Self {
            program: program.to_owned(),
            backends: Vec::new(),
            lender,
            directory,
        })
    }

    /// Starts a backend of VM `vm`. Returns the device's socket.
    pub(super) fn serve(&mut self, vm: &str, more: &[&str]) -> Result<PathBuf> {
        let path = self.directory.path();
        let mut arguments = vec!["serve", "--vm", vm, "--device", DEVICE];
        arguments.extend(more);
        let serve = farside(&self.program, path, &arguments);
        let log = path.join(format!("{vm}.log"));
        let mut backend = Child::spawn("a backend", serve, &log)?;
        let socket = scene::socket(path, vm);
        // The control socket is the last that a backend creates.
        await_socket(&socket.with_file_name("control"), &mut backend)?;
        self.backends.push(backend);
        Ok(socket)
    }

    /// The directory, for sockets of others.
    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The ends of the logs, for an error.
    pub(super) fn last_words(&self) -> String {
        let backends = self.backends.iter().map(Child::last_words);
        format!(
            "{}{}",
            self.lender.last_words(),
            backends.collect::<String>()
        )
    }
}

/// Connects as a VMM does and resets the device, which borrows it. The VM that had it
/// before may still be returning it.
pub(super) fn boot(socket: &Path) -> Result<Device> {
    let until = Instant::now() + SHORT;
    loop {
        // The client does not see a refused reset, but it does see a refused connection.
        match Device::connect(socket, Duration::ZERO) {
            Ok(mut device) => {
                device.reset().context("resetting the device")?;
                return Ok(device);
            }
            Err(error) if Instant::now() >= until => return Err(error),
            Err(_) => std::thread::yield_now(),
        }
    }
}
