//! The package and a Debian root for its installation, made once.

use std::{fs, path::Path, process::Command, sync::OnceLock};

use anyhow::{Context, Result, anyhow, ensure};
use farside_testbed::{DebianRoot, Inside, Progress};
use farside_tests::{farside_program, testbed};
use tempfile::TempDir;

/// Packages of the root besides Debian's minimal system.
const PACKAGES: &[&str] = &["iproute2", "systemd", "systemd-sysv", "man-db"];

/// Names a package to test, instead of building one.
const GIVEN: &str = "FARSIDE_DEB";

/// Mount point of the package's directory in the root.
const PACKAGE: &str = "/package";

pub struct Stage {
    root: DebianRoot,
    /// Contains the package only.
    directory: TempDir,
}

impl Stage {
    pub fn shared() -> Result<&'static Self> {
        static STAGE: OnceLock<Result<Stage, String>> = OnceLock::new();
        STAGE
            .get_or_init(|| Self::new().map_err(|error| format!("{error:#}")))
            .as_ref()
            .map_err(|error| anyhow!("{error}"))
    }

    fn new() -> Result<Self> {
        let directory = tempfile::tempdir().context("creating a directory")?;
        let package = directory.path().join("farside.deb");
        match std::env::var_os(GIVEN) {
            Some(given) => fs::copy(&given, &package)
                .map(drop)
                .with_context(|| format!("copying {}, which {GIVEN} names", given.display()))?,
            None => make_package(&package)?,
        }
        Ok(Self {
            root: DebianRoot::prepare(testbed()?, "package", PACKAGES, &Progress::silent())?,
            directory,
        })
    }

    /// A private copy of the root, which has the package, not installed.
    pub fn enter(&self) -> Result<Inside> {
        self.root
            .enter_with(&[(self.directory.path(), Path::new(PACKAGE))])
    }
}

/// Runs a shell command inside, and returns its output.
pub fn sh(inside: &Inside, script: &str) -> Result<String> {
    let output = inside
        .command("sh")
        .args(["-c", script])
        .output()
        .with_context(|| format!("running {script}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{script}: {}\n{stdout}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(stdout)
}

/// Installs the package as a user does. apt refuses misspelt dependencies; all of them are
/// in the root, so nothing is fetched.
pub fn install(inside: &Inside) -> Result<String> {
    sh(
        inside,
        "apt-get install --yes --no-install-recommends /package/farside.deb 2>&1 \
         && dpkg --audit",
    )
}

/// `cargo xtask deb`, with the binary that was built for the tests.
fn make_package(to: &Path) -> Result<()> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["run", "--quiet", "--package", "xtask", "--"])
        .args(["deb", "--program"])
        .arg(farside_program()?)
        .arg("--output")
        .arg(to)
        .output()
        .context("running cargo")?;
    ensure!(
        output.status.success(),
        "cargo xtask deb failed ({}):\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
