//! `cargo xtask deb`: the Debian package.
//!
//! cargo-deb makes it, from the metadata in `cli/Cargo.toml`; this prepares its inputs: the
//! binary, and the man pages and completions that the binary prints.

use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::{Progress, Testbed};

use crate::{
    args::Deb,
    cargo::{Profile, build_product, cargo, workspace},
};

/// The version of cargo-deb to install if there is none: its use of the metadata has been
/// verified.
const CARGO_DEB: &str = "3.8.0";

/// Completion scripts: the shell, and the file name.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "farside.bash"),
    ("zsh", "_farside"),
    ("fish", "farside.fish"),
];

/// Makes the package and prints its path.
pub(crate) fn run(args: &Deb) -> Result<()> {
    let path = search_path()?;
    let program = match &args.program {
        Some(program) => program.clone(),
        None => build_product(Profile::Release)?,
    };
    let target = program
        .ancestors()
        .nth(2)
        .context("the program is in no target directory")?;
    // A target directory for cargo-deb, with all files to be packed: otherwise it refuses
    // binaries of the profile `dev`.
    let staged = target.join("deb");
    stage(&program, &staged.join("release"))?;

    let mut command = Command::new(cargo_deb(
        &farside_testbed::cache_directory()?.join(format!("cargo-deb-{CARGO_DEB}")),
    )?);
    command
        .args(["--no-build", "--strip", "--manifest-path"])
        .arg(workspace().join("cli/Cargo.toml"))
        .env("CARGO_TARGET_DIR", &staged)
        .env("PATH", path)
        .arg("--output");
    match &args.output {
        Some(output) => command.arg(output),
        None => {
            let output = target.join("debian");
            fs::create_dir_all(&output)
                .with_context(|| format!("creating {}", output.display()))?;
            command.arg(output)
        }
    };
    succeed(&mut command)
}

/// `PATH` with the tools that cargo-deb runs to find dependencies and to pack: the
/// machine's, else the test bed's.
fn search_path() -> Result<OsString> {
    let mut path = env::var_os("PATH").unwrap_or_default();
    let lacks = |program| !runs(Command::new(program).arg("--version"));
    if ["dpkg-shlibdeps", "xz"].into_iter().any(lacks) {
        let testbed = Testbed::prepare(&Progress::auto())?;
        let all = env::split_paths(&path).chain([testbed.tools().to_owned()]);
        path = env::join_paths(all).context("the test bed's directory in PATH")?;
    }
    Ok(path)
}

/// Copies binary, man pages, changelog and completions into `directory`.
fn stage(program: &Path, directory: &Path) -> Result<()> {
    // Pages of removed commands must not be packed.
    if directory.exists() {
        fs::remove_dir_all(directory)
            .with_context(|| format!("removing {}", directory.display()))?;
    }
    fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
    fs::copy(program, directory.join("farside"))
        .with_context(|| format!("copying {}", program.display()))?;
    let man = directory.join("man");
    succeed(
        Command::new(program)
            .arg("man")
            .arg(&man)
            .stdout(Stdio::null()),
    )?;
    let mut texts: Vec<PathBuf> = fs::read_dir(&man)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .with_context(|| format!("listing {}", man.display()))?;
    let changelog = directory.join("changelog");
    fs::copy(workspace().join("CHANGELOG.md"), &changelog).context("copying CHANGELOG.md")?;
    texts.push(changelog);
    // As Debian policy requires, and without a timestamp, so that the package is
    // reproducible.
    succeed(
        Command::new("gzip")
            .args(["--best", "--no-name"])
            .args(texts),
    )?;
    for (shell, name) in COMPLETIONS {
        let path = directory.join(name);
        let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        succeed(
            Command::new(program)
                .args(["completions", shell])
                .stdout(file),
        )?;
    }
    Ok(())
}

/// The path of cargo-deb; installed into `tools` if the machine has none.
fn cargo_deb(tools: &Path) -> Result<PathBuf> {
    let ours = tools.join("bin/cargo-deb");
    for program in [PathBuf::from("cargo-deb"), ours.clone()] {
        if runs(Command::new(&program).arg("--version")) {
            return Ok(program);
        }
    }
    eprintln!("Installing cargo-deb {CARGO_DEB} into {}", tools.display());
    // Unoptimised, and with the system's xz, the build takes a third of the time, and the
    // packing as long as before.
    succeed(
        cargo()
            .args(["install", "--quiet", "--locked", "--debug"])
            .args(["--no-default-features", "--version", CARGO_DEB])
            .arg("--root")
            .arg(tools)
            .arg("cargo-deb")
            .env_remove("CARGO_TARGET_DIR"),
    )
    .context("installing cargo-deb; to do so by hand: `cargo install --locked cargo-deb`")?;
    Ok(ours)
}

fn runs(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

fn succeed(command: &mut Command) -> Result<()> {
    let program = command.get_program().display().to_string();
    let status = command
        .status()
        .with_context(|| format!("running {program}"))?;
    ensure!(status.success(), "{program} failed ({status})");
    Ok(())
}
