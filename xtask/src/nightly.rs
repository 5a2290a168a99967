//! `cargo xtask fuzz` and `miri`: chores of the nightly toolchain.

use std::{
    fs,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail, ensure};
use farside_testbed::die_with_us;

use crate::{args::Fuzz, cargo::workspace};

/// The crate of the targets' binaries, from the workspace's directory.
const BINARIES: &str = "tests/fuzz/libfuzzer";

/// Crates without I/O, whose tests Miri can run.
const PURE: [&str; 3] = [
    "farside-config-space",
    "farside-guest-layout",
    "farside-pci",
];

fn nightly(arguments: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command
        .args(["run", "nightly", "cargo"])
        .args(arguments)
        .current_dir(workspace());
    die_with_us(&mut command);
    command
}

/// Fuzzes the targets until one fails.
pub(crate) fn fuzz(args: &Fuzz) -> Result<ExitCode> {
    let list = nightly(&["fuzz", "list", "--fuzz-dir", BINARIES]).output();
    let list = list.context("running rustup, which the nightly toolchain comes with")?;
    ensure!(
        list.status.success(),
        "cannot list the fuzz targets: {}(needs `rustup toolchain install nightly` and `cargo install cargo-fuzz`)",
        String::from_utf8_lossy(&list.stderr)
    );
    let list = String::from_utf8(list.stdout).context("the list of fuzz targets")?;
    let targets: Vec<&str> = list.split_whitespace().collect();
    let mut unknown = args.targets.iter();
    if let Some(name) = unknown.find(|name| !targets.contains(&name.as_str())) {
        bail!("no fuzz target {name:?}: there are {}", targets.join(", "));
    }
    for target in targets {
        if !args.targets.is_empty() && args.targets.iter().all(|name| name != target) {
            continue;
        }
        // libFuzzer writes the inputs that it finds to the first directory, for the next run, too.
        let found = format!("target/fuzz/{target}");
        fs::create_dir_all(workspace().join(&found)).context("a directory for the corpus")?;
        let committed = format!("tests/fuzz/corpus/{target}");
        let limit = format!("-max_total_time={}", args.seconds);
        println!("== {target}");
        let status = nightly(&[
            "fuzz",
            "run",
            "--fuzz-dir",
            BINARIES,
            target,
            &found,
            &committed,
        ])
        .args(["--", &limit, "-timeout=30", "-print_final_stats=1"])
        .status()
        .context("running cargo fuzz")?;
        if !status.success() {
            println!("{target} failed ({status})");
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the tests of the crates in [`PURE`].
pub(crate) fn miri() -> Result<ExitCode> {
    let packages = PURE.iter().flat_map(|package| ["--package", package]);
    let status = nightly(&["miri", "test"])
        .args(packages)
        // Property tests look for a file of failures, and take minutes for each hundred cases.
        .env("MIRIFLAGS", "-Zmiri-disable-isolation")
        .env("PROPTEST_CASES", "2")
        .status()
        .context("running cargo miri")?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
