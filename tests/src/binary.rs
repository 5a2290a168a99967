//! The binaries under test.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use anyhow::{Context, Result, anyhow, bail};

/// `$FARSIDE_BIN`, else cargo's build, made once per process. (Cargo's own lock serialises
/// builds by several processes.)
pub fn farside() -> Result<&'static Path> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PROGRAM
        .get_or_init(|| find().map_err(|error| format!("{error:#}")))
        .as_deref()
        .map_err(|error| anyhow!("{error}"))
}

fn find() -> Result<PathBuf> {
    given_or_built("FARSIDE_BIN", "farside")
}

/// `$FARSIDE_SCRIPTED_VMM`, else cargo's build.
pub fn scripted_vmm() -> Result<PathBuf> {
    given_or_built("FARSIDE_SCRIPTED_VMM", "farside-scripted-vmm")
}

/// `cargo xtask test` builds both together with the tests, and sets the variables.
fn given_or_built(variable: &str, package: &str) -> Result<PathBuf> {
    match std::env::var_os(variable) {
        Some(path) => Ok(path.into()),
        None => build(package),
    }
}

/// Builds the binary of a package of this workspace.
fn build(package: &str) -> Result<PathBuf> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "--package", package])
        .args(["--message-format", "json-render-diagnostics"])
        // `cargo xtask test` sets it for libtest; dependencies would be built for it.
        .env_remove("RUSTC_BOOTSTRAP")
        .stderr(Stdio::inherit())
        .output()
        .context("running cargo")?;
    if !output.status.success() {
        bail!("cargo build -p {package} failed ({})", output.status);
    }
    // The last artifact is the binary; its dependencies come first.
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
        .next_back()
        .with_context(|| format!("cargo build -p {package} made no program"))
}
