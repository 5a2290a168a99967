//! `cargo xtask interleavings` and `deny`: checks by cargo that are not part of the test suite, for their time or
//! because they need the network.

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use farside_testbed::die_with_us;

use crate::cargo::cargo;

/// Runs the tests of what threads share, under loom.
pub(crate) fn interleavings() -> Result<ExitCode> {
    run(&[
        "test",
        "--release",
        "--manifest-path",
        "tests/interleavings/Cargo.toml",
    ])
}

/// Checks licences, sources and advisories of the dependencies.
pub(crate) fn deny() -> Result<ExitCode> {
    let version = cargo().args(["deny", "--version"]).output();
    let is_there = version.is_ok_and(|output| output.status.success());
    ensure!(
        is_there,
        "cargo-deny is missing: `cargo install cargo-deny`"
    );
    run(&["deny", "check"])
}

fn run(arguments: &[&str]) -> Result<ExitCode> {
    let mut cargo = cargo();
    die_with_us(cargo.args(arguments));
    let status = cargo.status().context("running cargo")?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
