//! A Debian root directory: the test bed's release with packages installed and configured,
//! for tests of software as installed by a user: a libvirtd, the product's package.
//!
//! Made by mmdebstrap, kept in the cache, immutable afterwards: entering it
//! ([`DebianRoot::enter`]) mounts an overlay in memory, which takes all writes.
//!
//! Unlike the rest of the test bed this needs root: packages are configured by chroot, and
//! entering mounts. [`DebianRoot::missing`] reports missing requirements, and
//! [`crate::become_root`] provides root to an ordinary user.

mod inside;
mod make;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::cache::{self, Cache};
use crate::command::output;
use crate::progress::Progress;
use crate::root_user::{lacks_root, one_line};
use crate::{Testbed, recipe};

pub use inside::Inside;

/// A root directory of Debian.
#[derive(Debug, Clone)]
pub struct DebianRoot {
    directory: PathBuf,
}

impl DebianRoot {
    /// The reason why this machine cannot make or enter one, if any.
    pub fn missing() -> Option<String> {
        let unshare = || {
            let mut unshare = Command::new("unshare");
            unshare.args(["--mount", "--pid", "--fork", "true"]);
            let error = output(&mut unshare, "it is in the package util-linux").err()?;
            let why = one_line(&error);
            Some(format!("a Debian root cannot be entered here: {why}"))
        };
        lacks_root().or_else(unshare)
    }

    /// Makes a root directory with these packages and their dependencies, or finds it in
    /// the cache ([`crate::Testbed::prepare`]). `name`, of lower-case letters,
    /// distinguishes it from others there.
    ///
    /// QEMU, libvirt and Linux come from the release's backports if available there. No
    /// service is started.
    pub fn prepare(
        testbed: &Testbed,
        name: &str,
        packages: &[&str],
        progress: &Progress,
    ) -> Result<Self> {
        check(name)?;
        if let Some(why) = Self::missing() {
            bail!("{why}");
        }
        // Separate from entries made without root, as an ordinary user could not even list
        // some of these.
        let cache = Cache::open(testbed.0.cache.join("roots"), || {
            progress.note("Waiting for another process that prepares the test bed");
        })?;
        let key = cache::key(
            [recipe::RELEASE, make::MAKER]
                .iter()
                .chain(make::BACKPORTS)
                .chain(recipe::FROM_BACKPORTS)
                .chain(&[""])
                .chain(packages),
        );
        let directory = cache
            .entry(name, &key, |directory| {
                let mmdebstrap = testbed.tool("mmdebstrap");
                make::make(
                    &directory.join("root"),
                    mmdebstrap,
                    name,
                    packages,
                    progress,
                )
            })
            .with_context(|| format!("cannot make the Debian root {name}"))?;
        Ok(Self {
            directory: directory.join("root"),
        })
    }

    /// Its path. Read-only.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Enters a private copy of it; see [`Inside`].
    pub fn enter(&self) -> Result<Inside> {
        self.enter_with(&[])
    }

    /// As [`DebianRoot::enter`], with bind mounts: each directory of this machine with its
    /// mount point.
    pub fn enter_with(&self, binds: &[(&Path, &Path)]) -> Result<Inside> {
        self.start(binds, None)
    }

    /// As [`DebianRoot::enter_with`], with that host name and a separate, empty network
    /// namespace.
    pub fn enter_as(&self, host: &str, binds: &[(&Path, &Path)]) -> Result<Inside> {
        self.start(binds, Some(host))
    }

    fn start(&self, binds: &[(&Path, &Path)], host: Option<&str>) -> Result<Inside> {
        Inside::start(&self.directory, binds, host)
            .with_context(|| format!("entering {}", self.directory.display()))
    }
}

/// The cache parses the part after a dash as the key.
fn check(name: &str) -> Result<()> {
    ensure!(
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase()),
        "{name:?} is no name of a Debian root: it may have lower-case letters only"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain() {
        check("libvirt").unwrap();
        for name in ["", "a-b", "../x"] {
            let error = check(name).unwrap_err();
            assert!(error.to_string().contains("lower-case"), "{name}");
        }
    }
}
