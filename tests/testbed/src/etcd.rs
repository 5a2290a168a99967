//! etcd's server, for tests of how hosts find lenders. Fetched by itself, when a test asks for it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::apt::{self, Wanted};
use crate::cache::{self, Cache};
use crate::host;
use crate::progress::Progress;
use crate::recipe;

/// Incremented when the code below changes the result.
const MAKER: &str = "1";

const PACKAGE: &str = "etcd-server";

/// Dependencies that the test bed's other packages have, or that only installation needs.
const NOT_NEEDED: &[&str] = &[
    "adduser",
    "init-system-helpers",
    "libc6",
    "pipexec",
    "sysvinit-utils",
];

/// A binary that runs on the host, with the libraries below `root`.
pub(crate) fn prepare(cache: &Cache, root: &Path, progress: &Progress) -> Result<PathBuf> {
    let libraries = root.display().to_string();
    let key = cache::key([recipe::RELEASE, PACKAGE, MAKER, &libraries]);
    let entry = cache.entry("etcd", &key, |directory| {
        let wanted = Wanted {
            suites: &recipe::suites(),
            packages: &[PACKAGE],
            installed: NOT_NEEDED,
        };
        let downloads = cache.root().join("apt");
        let packages = apt::download(&downloads, &wanted, progress)?;
        apt::unpack(&packages, &directory.join("root"), progress)?;
        fs::remove_dir_all(&downloads).with_context(|| format!("removing {}", downloads.display()))
    })?;
    let wrapper = entry.join("etcd");
    if !wrapper.exists() {
        // It names the entry's path. Whoever is here has the lock.
        let program = entry.join("root/usr/bin/etcd");
        fs::write(&wrapper, host::wrapper_of(root, &program, ""))
            .and_then(|()| fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)))
            .with_context(|| format!("writing {}", wrapper.display()))?;
    }
    Ok(wrapper)
}
