//! The package and a Debian root to install it in, made once.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use anyhow::{Context, Result, anyhow, ensure};
use farside_testbed::{DebianRoot, Inside, Progress};
use tempfile::TempDir;

/// What the root has beside Debian's smallest system.
const PACKAGES: &[&str] = &["systemd", "systemd-sysv", "man-db"];

/// Where the root finds the package.
const PACKAGE: &str = "/package";

pub struct Stage {
    root: DebianRoot,
    /// With the package alone in it.
    folder: TempDir,
    package: PathBuf,
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
        let folder = tempfile::tempdir().context("creating a folder")?;
        let package = folder.path().join("farside.deb");
        make_package(&package)?;
        Ok(Self {
            root: DebianRoot::prepare("package", PACKAGES, &Progress::silent())?,
            folder,
            package,
        })
    }

    /// A private copy of the root, in which the package lies but is not
    /// installed.
    pub fn enter(&self) -> Result<Inside> {
        self.root
            .enter_with(&[(self.folder.path(), Path::new(PACKAGE))])
    }

    /// The package.
    pub fn package(&self) -> &Path {
        &self.package
    }
}

/// Runs a shell command inside, and returns what it printed.
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

/// Installs the package as a user does. dpkg refuses when a dependency is
/// missing or named wrongly.
pub fn install(inside: &Inside) -> Result<String> {
    sh(
        inside,
        "dpkg --install /package/farside.deb 2>&1 && dpkg --audit",
    )
}

/// `cargo xtask deb`, with the program that the tests have built already.
fn make_package(to: &Path) -> Result<()> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["run", "--quiet", "--package", "xtask", "--"])
        .args(["deb", "--profile", "dev", "--output"])
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
