//! A small kernel with iommufd, which Debian's kernel lacks: built from the source of
//! Debian's package, with `make tinyconfig` and a fragment. It takes minutes, so it is
//! built on request only, and kept in the cache.
//!
//! The source tree is outside the cache's entries, under a separate lock: other processes
//! can prepare their test beds meanwhile, and an interrupted build resumes.

mod tools;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FlockOperation, flock};

use crate::apt::{self, Wanted};
use crate::cache::{self, Cache};
use crate::command::output;
use crate::progress::Progress;
use crate::recipe;
use tools::Tools;

/// The version of Debian's kernel, in the test bed's release or its backports.
const VERSION: &str = "7.2";

const FRAGMENT: &str = include_str!("fragment.config");

/// Incremented when the code below changes the result of the same fragment.
const MAKER: &str = "1";

/// The cache entry, and the image in it.
const ENTRY: &str = "small-kernel";
const IMAGE: &str = "bzImage";

/// The build directory, in the cache directory.
const BUILDING: &str = "building-kernel";

/// Approximate number of lines that `make` prints.
const LINES: u64 = 2000;

/// Dependencies of the source package that this build does not need.
const NOT_NEEDED: &[&str] = &["binutils", "xz-utils"];

fn key() -> String {
    cache::key([recipe::RELEASE, VERSION, FRAGMENT, MAKER])
}

/// The kernel's image, if it has been built.
pub(crate) fn find(cache: &Path) -> Option<PathBuf> {
    let image = cache.join(format!("{ENTRY}-{}", key())).join(IMAGE);
    image.exists().then_some(image)
}

/// The kernel's image; built if it is not cached.
pub(crate) fn build(cache: PathBuf, progress: &Progress) -> Result<PathBuf> {
    if let Some(image) = find(&cache) {
        return Ok(image);
    }
    let directory = cache.join(BUILDING);
    fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    let lock = directory.join("lock");
    let lock = File::create(&lock).with_context(|| format!("creating {}", lock.display()))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        progress.note("Waiting for another process that builds the kernel");
        flock(&lock, FlockOperation::LockExclusive).context("locking the kernel's directory")?;
    }
    // Another process may have built it meanwhile.
    if let Some(image) = find(&cache) {
        return Ok(image);
    }
    let tools = Tools::prepare(&directory.join("tools"), progress)
        .context("cannot get what builds a kernel")?;
    let tree = source(&directory, progress).context("cannot get the kernel's source")?;
    configure(&tree, &tools, progress).context("cannot configure the kernel")?;
    compile(&tree, &tools, progress)?;

    let opened = Cache::open(cache, || {
        progress.note("Waiting for another process that prepares the test bed");
    })?;
    let entry = opened.entry(ENTRY, &key(), |entry| {
        for (from, to) in [("arch/x86/boot/bzImage", IMAGE), (".config", "config")] {
            let from = tree.join(from);
            fs::copy(&from, entry.join(to))
                .with_context(|| format!("copying {}", from.display()))?;
        }
        Ok(())
    })?;
    // Two gigabytes that are not read any more.
    fs::remove_dir_all(&directory).with_context(|| format!("removing {}", directory.display()))?;
    Ok(entry.join(IMAGE))
}

/// The source tree, unpacked.
fn source(directory: &Path, progress: &Progress) -> Result<PathBuf> {
    let tree = directory.join(format!("linux-{VERSION}"));
    if tree.exists() {
        return Ok(tree);
    }
    let package = format!("linux-source-{VERSION}");
    let wanted = Wanted {
        suites: &recipe::suites(),
        packages: &[&package],
        installed: NOT_NEEDED,
    };
    let packages = apt::download(&directory.join("apt"), &wanted, progress).with_context(|| {
        format!(
            "{package} of {}; when Debian no longer has it, VERSION in {} wants a newer one",
            recipe::RELEASE,
            file!()
        )
    })?;
    let root = directory.join("package");
    apt::unpack(&packages, &root, progress)?;
    let task = progress.spinner("Unpacking the kernel's source");
    let making = directory.join("linux-unpacking");
    let _ = fs::remove_dir_all(&making);
    fs::create_dir(&making).with_context(|| format!("creating {}", making.display()))?;
    output(
        Command::new("tar")
            .args(["--strip-components=1", "-C"])
            .arg(&making)
            .arg("-xf")
            .arg(root.join(format!("usr/src/{package}.tar.xz"))),
        "unpacking needs it and xz (packages tar and xz-utils)",
    )?;
    fs::rename(&making, &tree).with_context(|| format!("moving {} into place", tree.display()))?;
    task.done();
    Ok(tree)
}

fn configure(tree: &Path, tools: &Tools, progress: &Progress) -> Result<()> {
    let task = progress.spinner("Configuring the kernel");
    let config = tree.join(".config");
    output(make(tree, tools).arg("tinyconfig"), tools::INSTALL)?;
    let tiny = fs::read_to_string(&config).context("reading the configuration")?;
    // Of two settings with the same name, the later one wins.
    fs::write(&config, tiny + FRAGMENT).context("writing the configuration")?;
    output(make(tree, tools).arg("olddefconfig"), tools::INSTALL)?;
    let result = fs::read_to_string(&config).context("reading the configuration")?;
    let lost = lost(FRAGMENT, &result);
    ensure!(
        lost.is_empty(),
        "Linux {VERSION} does not take {}: what they depend on is missing from the fragment, or \
         they have other names by now",
        lost.join(", ")
    );
    task.done();
    Ok(())
}

/// The settings of a fragment that are missing in a configuration.
fn lost<'a>(fragment: &'a str, config: &str) -> Vec<&'a str> {
    let settings = fragment.lines().filter(|line| line.starts_with("CONFIG_"));
    settings
        .filter(|setting| match setting.strip_suffix("=n") {
            Some(name) => config
                .lines()
                .any(|line| line.strip_prefix(name).is_some_and(|v| v.starts_with('='))),
            None => !config.lines().any(|line| line == *setting),
        })
        .collect()
}

fn compile(tree: &Path, tools: &Tools, progress: &Progress) -> Result<()> {
    let jobs = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let label = format!("Compiling the kernel ({jobs} at once; 6 minutes on two processors)");
    let task = progress.bar(label, LINES);
    let mut child = make(tree, tools)
        .arg(format!("-j{jobs}"))
        .arg("bzImage")
        // Makes the image reproducible.
        .env("KBUILD_BUILD_TIMESTAMP", "1970-01-01")
        .env("KBUILD_BUILD_USER", "farside")
        .env("KBUILD_BUILD_HOST", "testbed")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("running make")?;
    let stdout = child.stdout.take().context("make has no output")?;
    let stderr = child.stderr.take().context("make has no error output")?;
    // Read concurrently: neither pipe may fill up.
    let complaints = thread::spawn(move || {
        let mut text = Vec::new();
        let read = BufReader::new(stderr).read_to_end(&mut text);
        read.map(|_| String::from_utf8_lossy(&text).into_owned())
    });
    for (n, line) in BufReader::new(stdout).lines().enumerate() {
        line.context("reading make's output")?;
        task.set((n as u64).min(LINES));
    }
    let status = child.wait().context("waiting for make")?;
    let Ok(complaints) = complaints.join() else {
        bail!("reading make's errors failed");
    };
    ensure!(
        status.success(),
        "building the kernel in {} failed ({status}):\n{}",
        tree.display(),
        complaints.context("reading make's errors")?.trim_end()
    );
    task.done();
    Ok(())
}

/// `make` in the kernel's tree.
fn make(tree: &Path, tools: &Tools) -> Command {
    let mut command = Command::new("make");
    command.arg("-C").arg(tree).env("LC_ALL", "C");
    tools.apply(&mut command);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_did_not_survive_is_named() {
        let config = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=y\nCONFIG_CC=y\n";
        let fragment = "# x\nCONFIG_A=y\nCONFIG_B=y\nCONFIG_C=n\nCONFIG_D=n\nCONFIG_CC=y\n";
        assert_eq!(lost(fragment, config), ["CONFIG_B=y", "CONFIG_C=n"]);
    }

    #[test]
    fn only_an_image_in_the_cache_is_found() {
        let cache = tempfile::tempdir().unwrap();
        assert_eq!(find(cache.path()), None);
        let entry = cache.path().join(format!("{ENTRY}-{}", key()));
        fs::create_dir(&entry).unwrap();
        assert_eq!(find(cache.path()), None);
        fs::write(entry.join(IMAGE), "").unwrap();
        assert_eq!(find(cache.path()), Some(entry.join(IMAGE)));
    }
}
