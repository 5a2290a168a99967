//! Two DMA test devices for the guest: the interrupts of one are signalled directly from
//! the device to QEMU, those of the other are relayed.

use std::{ffi::OsString, path::Path};

use anyhow::{Context, Result};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    child::Child,
    scene::{self, SHORT, await_socket, farside},
};

/// Each device's interrupt path, which is also its id, and its slot on the guest's bus.
pub(super) const TESTERS: [(&str, u8); 2] = [("direct", 0x1a), ("relayed", 0x1b)];

/// A tester's address in the guest.
pub(super) fn guest_bdf(slot: u8) -> String {
    format!("0000:00:{slot:02x}.0")
}

/// Their lender, and a backend for each. Killed on drop.
pub(super) struct Testers {
    backends: Vec<Child>,
    lender: Child,
    directory: TempDir,
}

impl Testers {
    /// Starts them.
    pub(super) fn start(program: &Path) -> Result<Self> {
        // Not the disk's directory: a VM has one backend, and here there are three.
        let directory = scene::directory("relayed")?;
        let path = directory.path();
        let [(direct, _), (relayed, _)] = TESTERS;
        let lend = farside(
            program,
            path,
            &[
                "lend",
                "--name",
                "testers",
                "--dma-test",
                direct,
                "--dma-test",
                relayed,
            ],
        );
        let mut lender = Child::spawn("the testers' lender", lend, &path.join("lender.log"))?;
        await_socket(&path.join("lender.sock"), &mut lender)?;
        let mut backends = Vec::new();
        for (id, _) in TESTERS {
            let serve = farside(
                program,
                path,
                &["serve", "--vm", id, "--device", id, "--interrupts", id],
            );
            let log = path.join(format!("{id}.log"));
            let mut backend = Child::spawn("a tester's backend", serve, &log)?;
            await_socket(&socket(path, id), &mut backend)?;
            backends.push(backend);
        }
        Ok(Self {
            backends,
            lender,
            directory,
        })
    }

    /// QEMU's arguments for both devices.
    pub(super) fn qemu_args(&self) -> Vec<OsString> {
        let device = |(id, slot): (&str, u8)| {
            let device = json!({
                "driver": "vfio-user-pci",
                "socket": { "type": "unix", "path": socket(self.directory.path(), id) },
                "addr": format!("{slot:x}"),
                "x-msg-timeout": SHORT.as_millis() as u64,
            });
            ["-device".to_owned(), device.to_string()]
        };
        TESTERS
            .into_iter()
            .flat_map(device)
            .map(Into::into)
            .collect()
    }

    /// The ends of the logs, for an error.
    pub(super) fn last_words(&self) -> String {
        let backends = self.backends.iter().map(Child::last_words);
        backends.chain([self.lender.last_words()]).collect()
    }

    /// Stops them; all must exit successfully.
    pub(super) fn stop(self) -> Result<()> {
        for backend in self.backends {
            backend.stop(SHORT).context("stopping a tester's backend")?;
        }
        self.lender
            .stop(SHORT)
            .context("stopping the testers' lender")
    }
}

fn socket(directory: &Path, id: &str) -> std::path::PathBuf {
    directory.join("vm").join(id).join(format!("{id}.sock"))
}
