//! Makes the root directory.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::apt;
use crate::command::output;
use crate::progress::Progress;
use crate::recipe;

/// Incremented when the code below changes the result of the same packages.
pub(super) const MAKER: &str = "1";

/// Source packages taken from backports beside those of the test bed.
pub(super) const BACKPORTS: &[&str] = &["libvirt"];

pub(super) fn make(
    root: &Path,
    mut mmdebstrap: Command,
    name: &str,
    packages: &[&str],
    progress: &Progress,
) -> Result<()> {
    let task = progress.spinner(format!("Installing the Debian root {name}"));
    let source = apt::Source::of_this_machine()?;
    let pins: Vec<&str> = [recipe::FROM_BACKPORTS, BACKPORTS].concat();
    let mut preferences = tempfile::NamedTempFile::new().context("creating a file")?;
    preferences
        .write_all(apt::preferences(&pins).as_bytes())
        .context("writing apt's preferences")?;

    mmdebstrap
        .args([
            "--quiet",
            "--mode=root",
            "--variant=minbase",
            "--format=directory",
        ])
        .args(["--architectures=amd64", "--components=main"])
        .arg("--setup-hook=cp \"$FARSIDE_PREFERENCES\" \"$1/etc/apt/preferences.d/farside\"")
        .env("FARSIDE_PREFERENCES", preferences.path())
        .env("LC_ALL", "C");
    if !packages.is_empty() {
        mmdebstrap.arg(format!("--include={}", packages.join(",")));
    }
    for setting in source.settings() {
        mmdebstrap.arg(format!("--aptopt={setting}"));
    }
    mmdebstrap.args([recipe::RELEASE]).arg(root);
    for suite in recipe::suites() {
        mmdebstrap.arg(source.line(&suite));
    }
    output(&mut mmdebstrap, "it is the test bed's own")?;
    task.done();
    Ok(())
}
