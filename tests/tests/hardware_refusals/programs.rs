//! The programs that go into the VMs, without what only a debugger needs.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::VmBuilder;
use farside_tests::Cluster;

/// Puts `farside` and the scripted VMM into a VM.
pub fn add_to(builder: VmBuilder) -> Result<VmBuilder> {
    let cluster = Cluster::new()?;
    let farside = cluster.farside(&[])?.get_program().to_owned();
    Ok(builder
        .file("usr/bin/farside", 0o755, stripped(Path::new(&farside))?)
        .file("usr/bin/scripted-vmm", 0o755, stripped(&scripted_vmm()?)?))
}

/// What cargo makes of the package.
fn scripted_vmm() -> Result<PathBuf> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "--package", "farside-scripted-vmm"])
        .args(["--message-format", "json-render-diagnostics"])
        .stderr(Stdio::inherit())
        .output()
        .context("running cargo")?;
    ensure!(output.status.success(), "cargo build: {}", output.status);
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
        .next_back()
        .context("cargo made no scripted-vmm")
}

fn stripped(program: &Path) -> Result<Vec<u8>> {
    let folder = tempfile::tempdir()?;
    let to = folder.path().join("program");
    let status = Command::new("objcopy")
        .arg("--strip-debug")
        .args([program, &to])
        .status()
        .context("running objcopy (binutils)")?;
    ensure!(status.success(), "objcopy {} failed", program.display());
    std::fs::read(&to).with_context(|| format!("reading {}", to.display()))
}
