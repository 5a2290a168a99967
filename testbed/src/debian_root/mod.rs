//! A Debian of its own in a folder: the test bed's release with packages
//! installed and configured, for what has to be tried as a user has it: a
//! libvirtd, a package of ours.
//!
//! Made by mmdebstrap, kept in the cache, never changed after that: who enters
//! it ([`DebianRoot::enter`]) writes into memory above it.
//!
//! Unlike the rest of the test bed this needs root: packages are configured by
//! chroot, and entering mounts. [`DebianRoot::missing`] says what the machine
//! lacks.

mod inside;
mod make;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::cache::{self, Cache};
use crate::command::output;
use crate::progress::Progress;
use crate::recipe;

pub use inside::Inside;

/// A root folder of Debian.
#[derive(Debug, Clone)]
pub struct DebianRoot {
    folder: PathBuf,
}

impl DebianRoot {
    /// Why this machine cannot make or enter one; None when it can.
    pub fn missing() -> Option<String> {
        if !rustix::process::geteuid().is_root() {
            return Some(
                "a Debian root takes root: it is made by chroot and entered by mounts".into(),
            );
        }
        let tries: [(&[&str], &str); 2] = [
            (&["mmdebstrap", "--version"], make::INSTALL_MMDEBSTRAP),
            (
                &["unshare", "--mount", "--pid", "--fork", "true"],
                "it is in the package util-linux",
            ),
        ];
        tries.into_iter().find_map(|(words, provided_by)| {
            let error = output(Command::new(words[0]).args(&words[1..]), provided_by).err()?;
            Some(format!("a Debian root cannot be made here: {error:#}"))
        })
    }

    /// Makes a root folder with these packages and what they depend on, or finds
    /// it in the cache ([`crate::Testbed::prepare`]). `name`, of lower-case
    /// letters, tells it from others there.
    ///
    /// QEMU, libvirt and Linux come from the release's backports where those have
    /// them. No service is started.
    pub fn prepare(name: &str, packages: &[&str], progress: &Progress) -> Result<Self> {
        Self::prepare_in(cache::default_root()?, name, packages, progress)
    }

    fn prepare_in(
        cache: PathBuf,
        name: &str,
        packages: &[&str],
        progress: &Progress,
    ) -> Result<Self> {
        // The cache takes what follows a dash for the key.
        ensure!(
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase()),
            "{name:?} is no name of a Debian root: it may have lower-case letters only"
        );
        if let Some(why) = Self::missing() {
            bail!("{why}");
        }
        let cache = Cache::open(cache, || {
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
        let folder = cache
            .entry(&format!("root.{name}"), &key, |folder| {
                make::make(&folder.join("root"), name, packages, progress)
            })
            .with_context(|| format!("cannot make the Debian root {name}"))?;
        Ok(Self {
            folder: folder.join("root"),
        })
    }

    /// Where it is. For reading only.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Enters a private copy of it; see [`Inside`].
    pub fn enter(&self) -> Result<Inside> {
        self.enter_with(&[])
    }

    /// As [`DebianRoot::enter`], with folders of this machine, each at the path
    /// that follows it.
    pub fn enter_with(&self, binds: &[(&Path, &Path)]) -> Result<Inside> {
        self.start(binds, None)
    }

    /// As [`DebianRoot::enter_with`], as a host of that name with a network of its own, in
    /// which there is nothing yet.
    pub fn enter_as(&self, host: &str, binds: &[(&Path, &Path)]) -> Result<Inside> {
        self.start(binds, Some(host))
    }

    fn start(&self, binds: &[(&Path, &Path)], host: Option<&str>) -> Result<Inside> {
        Inside::start(&self.folder, binds, host)
            .with_context(|| format!("entering {}", self.folder.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["", "a-b", "../x"] {
            let made = DebianRoot::prepare_in(folder.path().into(), name, &[], &Progress::silent());
            assert!(
                made.unwrap_err().to_string().contains("lower-case"),
                "{name}"
            );
        }
    }
}
