//! The kernel's ELF image, and an initramfs for tests that boot many guests, with busybox,
//! the modules that init loads and the agent only.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cpio::{NewcBuilder, NewcReader};

use crate::cache::{self, Cache};
use crate::debian::{Debian, MODULE_LIST};
use crate::host::Host;
use crate::{archive, make_initramfs, recipe, vmlinux};

/// Incremented when the code below changes the result of the same inputs.
const MAKER: &str = "1";

#[derive(Debug)]
pub(crate) struct Lean {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
}

/// Makes it, or finds it in the cache. `agent_key` identifies the agent's binary.
pub(crate) fn prepare(
    cache: &Cache,
    debian: &Debian,
    host: &Host,
    agent: &Path,
    agent_key: &str,
) -> Result<Lean> {
    let key = cache::key([&debian.key, agent_key, MAKER]);
    let directory = cache.entry("lean", &key, |directory| {
        let zstd = host.bin.join("zstd");
        vmlinux::extract(&debian.kernel, &directory.join("vmlinux"), &zstd)?;
        let userland = directory.join("userland.cpio");
        shrink(&debian.userland(), &userland)?;
        make_initramfs(&userland, agent, &directory.join("initramfs.cpio"))?;
        fs::remove_file(&userland).with_context(|| format!("removing {}", userland.display()))
    })?;
    Ok(Lean {
        kernel: directory.join("vmlinux"),
        initramfs: directory.join("initramfs.cpio"),
    })
}

fn shrink(from: &Path, to: &Path) -> Result<()> {
    let context = || format!("making {} of {}", to.display(), from.display());
    let archive = fs::read(from).with_context(context)?;
    let file = File::create(to).with_context(context)?;
    copy_needed(&archive, BufWriter::new(file)).with_context(context)
}

/// Copies an archive without the optional parts: binaries with their libraries, and modules
/// that init does not load.
fn copy_needed<W: Write>(archive: &[u8], mut to: W) -> Result<()> {
    let at_boot = archive::read(archive, MODULE_LIST)?;
    let at_boot = str::from_utf8(&at_boot).context(MODULE_LIST)?;
    let mut rest = archive;
    loop {
        let mut entry = NewcReader::new(rest)?;
        let head = entry.entry();
        if head.is_trailer() {
            cpio::newc::trailer(to)?.flush()?;
            return Ok(());
        }
        if is_needed(head.name(), at_boot) {
            let copy = NewcBuilder::new(head.name())
                .ino(head.ino())
                .nlink(head.nlink())
                .mode(head.mode());
            let mut copy = copy.write(to, head.file_size());
            io::copy(&mut entry, &mut copy)?;
            to = copy.finish()?;
        }
        rest = entry.finish()?;
    }
}

/// Whether every guest needs the file. `at_boot` lists the modules that init loads, one per
/// line.
fn is_needed(name: &str, at_boot: &str) -> bool {
    let is_program = recipe::GUEST_PROGRAMS
        .iter()
        .chain(recipe::GUEST_FILES)
        .any(|program| *program == name);
    let is_library =
        name.starts_with("usr/lib64/") || name.starts_with("usr/lib/x86_64-linux-gnu/");
    let is_other_module = name.ends_with(".ko")
        && !at_boot
            .lines()
            .any(|module| module.strip_prefix('/') == Some(name));
    !(is_program || is_library || is_other_module)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::Archive;

    fn names(archive: &[u8]) -> Vec<String> {
        let mut names = Vec::new();
        let mut rest = archive;
        loop {
            let entry = NewcReader::new(rest).unwrap();
            if entry.entry().is_trailer() {
                return names;
            }
            names.push(entry.entry().name().to_owned());
            rest = entry.finish().unwrap();
        }
    }

    #[test]
    fn what_the_boot_needs_stays_as_it_is_and_the_rest_goes() {
        let mut archive = Archive::new(Vec::new());
        archive.file("usr/bin/busybox", 0o755, b"box").unwrap();
        archive.symlink("usr/bin/sh", "busybox").unwrap();
        let list = b"/usr/lib/modules/7/nvme.ko\n";
        archive.file("etc/farside/modules", 0o644, list).unwrap();
        archive
            .file("usr/lib/modules/7/nvme.ko", 0o644, b"one")
            .unwrap();
        archive.file("usr/bin/fio", 0o755, b"fio").unwrap();
        archive
            .file("usr/lib/x86_64-linux-gnu/libc.so.6", 0o755, b"c")
            .unwrap();
        archive
            .file("usr/lib/modules/7/xfs.ko", 0o644, b"two")
            .unwrap();
        let whole = archive.finish().unwrap();
        let mut lean = Vec::new();
        copy_needed(&whole, &mut lean).unwrap();
        let kept = names(&lean);
        for there in ["usr/bin/busybox", "usr/bin/sh", "usr/lib/modules/7/nvme.ko"] {
            assert!(kept.iter().any(|name| name == there), "{there}: {kept:?}");
        }
        for gone in ["fio", "libc.so.6", "xfs.ko"] {
            assert!(!kept.iter().any(|name| name.ends_with(gone)), "{kept:?}");
        }
        assert_eq!(lean.len() % 4, 0, "another archive follows");
    }

    #[test]
    fn an_archive_without_a_list_of_modules_is_refused() {
        let empty = Archive::new(Vec::new()).finish().unwrap();
        let error = copy_needed(&empty, Vec::new()).unwrap_err();
        assert!(error.to_string().contains(MODULE_LIST), "{error}");
    }
}
