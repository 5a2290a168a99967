//! The binaries that are copied into the VMs.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use farside_testbed::VmBuilder;

use crate::binary;

/// The product and the scripted VMM, stripped of debug information.
#[derive(Clone)]
pub struct Programs {
    farside: Vec<u8>,
    scripted_vmm: Vec<u8>,
}

impl Programs {
    /// Builds them.
    pub fn build() -> Result<Self> {
        Ok(Self {
            farside: stripped(binary::farside()?)?,
            scripted_vmm: stripped(&binary::scripted_vmm()?)?,
        })
    }

    /// Adds them to a VM.
    pub fn add_to(&self, builder: VmBuilder) -> VmBuilder {
        builder
            .file("usr/bin/farside", 0o755, self.farside.clone())
            .file("usr/bin/scripted-vmm", 0o755, self.scripted_vmm.clone())
    }
}

/// A binary without its debug information, which is nine tenths of it.
pub fn stripped(program: &Path) -> Result<Vec<u8>> {
    let directory = tempfile::tempdir().context("creating a temporary directory")?;
    let to = directory.path().join("program");
    let status = Command::new("objcopy")
        .arg("--strip-debug")
        .args([program, &to])
        .status()
        .context("running objcopy, which comes with the linker that Rust needs (binutils)")?;
    ensure!(status.success(), "objcopy {} failed", program.display());
    fs::read(&to).with_context(|| format!("reading {}", to.display()))
}
