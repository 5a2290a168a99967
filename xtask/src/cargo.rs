//! Builds the product with cargo.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::die_with_us;
use serde::Deserialize;

/// The product's package.
pub(crate) const PRODUCT: &str = "farside";

/// Prefixes of the variables that cargo sets for the package whose program it runs.
const PACKAGE_VARIABLES: [&str; 2] = ["CARGO_MANIFEST_", "CARGO_PKG_"];

/// The build profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// With assertions; shares its dependencies with xtask and the tests.
    Dev,
    /// As users run it.
    Release,
}

/// Builds the `farside` binary; cargo shows its progress. Returns its path.
pub(crate) fn build_product(profile: Profile) -> Result<PathBuf> {
    let mut command = cargo();
    command
        .args(["build", "--package", PRODUCT])
        .args(["--message-format", "json-render-diagnostics"])
        .stdout(Stdio::piped());
    if profile == Profile::Release {
        command.arg("--release");
    }
    die_with_us(&mut command);
    let output = command
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .context("running cargo")?;
    ensure!(
        output.status.success(),
        "building {PRODUCT} failed ({})",
        output.status
    );
    program(&String::from_utf8_lossy(&output.stdout))
        .with_context(|| format!("cargo built no program {PRODUCT}"))
}

/// Cargo, in this workspace, as a user starts it.
pub(crate) fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(program);
    command.current_dir(workspace());
    // Those are xtask's. `ring` would be built anew, and with it all that uses TLS.
    for (name, _) in std::env::vars_os() {
        let of_package = name
            .to_str()
            .is_some_and(|name| PACKAGE_VARIABLES.iter().any(|of| name.starts_with(of)));
        if of_package {
            command.env_remove(name);
        }
    }
    command
}

/// The directory of this workspace.
pub(crate) fn workspace() -> PathBuf {
    // Cargo sets the checkout's path at run time: the path at build time may be that of
    // another checkout that shares the target directory.
    let xtask =
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&xtask).join("..")
}

/// One of cargo's messages, with the fields used here.
#[derive(Deserialize)]
struct Message {
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

/// The product's path in cargo's messages, one JSON document per line.
fn program(messages: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok())
        .find(|message| matches!(&message.target, Some(target) if target.name == PRODUCT))
        .and_then(|message| message.executable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_found_among_cargos_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"log"},"executable":null}
not JSON
{"reason":"compiler-artifact","target":{"name":"farside"},"executable":"/t/debug/farside"}
{"reason":"build-finished","success":true}
"#;
        assert_eq!(program(messages), Some("/t/debug/farside".into()));
        assert_eq!(program(""), None);
    }
}
