//! Builds the guest agent, statically linked, from this checkout.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{self, Cache};
use crate::command::output;
use crate::progress::Progress;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The agent's binary, and the key of its sources.
pub(crate) fn prepare(cache: &Cache, progress: &Progress) -> Result<(PathBuf, String)> {
    let source = source()?;
    let key = source_key(&source)?;
    let entry = cache.entry("agent", &key, |directory| {
        let task = progress.spinner("Building the guest agent");
        let target = cache.root().join("build");
        build(&source, &target)?;
        let built = target.join(TARGET).join("release/guest-agent");
        fs::copy(&built, directory.join("guest-agent"))
            .with_context(|| format!("copying {}", built.display()))?;
        task.done();
        Ok(())
    })?;
    Ok((entry.join("guest-agent"), key))
}

/// The agent's sources in the current checkout, as cargo reports it at run time: the path
/// at build time may be that of another checkout that shares the target directory.
fn source() -> Result<PathBuf> {
    let running = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).to_owned();
    let packages = running.iter().chain([&built]);
    packages
        .flat_map(|package| package.ancestors())
        .map(|directory| directory.join("tests/testbed/guest-agent"))
        .find(|source| source.join("Cargo.toml").exists())
        .context("no sources of the guest agent: run through cargo, in a checkout")
}

fn build(source: &Path, target: &Path) -> Result<()> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    output(
        Command::new(cargo)
            .arg("build")
            .arg("--manifest-path")
            .arg(source.join("Cargo.toml"))
            .args(["--release", "--bin", "guest-agent", "--target", TARGET])
            .args(["--config", "profile.release.strip=true"])
            .env("CARGO_TARGET_DIR", target)
            .env("RUSTFLAGS", "-C target-feature=+crt-static")
            // It would override RUSTFLAGS.
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            // `cargo xtask test` sets it for libtest; dependencies would be built for it.
            .env_remove("RUSTC_BOOTSTRAP"),
        "the guest agent is built from source, so it needs cargo",
    )
    .with_context(|| {
        format!("building the guest agent (it needs Rust's target {TARGET} and a static libc)")
    })?;
    Ok(())
}

fn source_key(source: &Path) -> Result<String> {
    let mut files = vec![source.join("Cargo.toml")];
    let directory = source.join("src");
    let entries = fs::read_dir(&directory)
        .with_context(|| format!("listing {} (the checkout is needed)", directory.display()))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("listing {}", directory.display()))?;
        files.push(entry.path());
    }
    files.sort();
    let mut parts = Vec::new();
    for file in files {
        let content = fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        parts.push(
            file.file_name()
                .unwrap_or_default()
                .as_encoded_bytes()
                .to_vec(),
        );
        parts.push(content);
    }
    Ok(cache::key(parts))
}
