//! A disk image for VMs that play hosts: QEMU with its libraries and firmware, the guest's
//! kernel and a small initramfs for a nested VM; and OpenSSH.
//!
//! It is ext4 on virtio-blk, read on demand, whereas an initramfs would be copied as a
//! whole at each boot.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{self, Cache};
use crate::command::output;
use crate::debian::Debian;
use crate::host::Host;
use crate::progress::Progress;
use crate::{elf, recipe, vmlinux};

/// Incremented when the code below changes the result of the same inputs.
const MAKER: &str = "3";

/// The disk's mount point in a VM.
pub(crate) const MOUNT: &str = "/tools";

/// QEMU on the mounted disk.
pub(crate) const QEMU: &str = "/tools/bin/qemu-system-x86_64";

/// The nested guest's kernel on the mounted disk.
pub(crate) const KERNEL: &str = "/tools/boot/vmlinux";

/// The nested guest's initramfs on the mounted disk.
pub(crate) const INITRAMFS: &str = "/tools/boot/nested.cpio";

/// Size of the file system; the file is sparse.
const LEN: &str = "512M";

const QEMU_PROGRAM: &str = "usr/bin/qemu-system-x86_64";

/// The image; made if it is not cached. `guest` is the cache entry with the initramfs, made
/// from `guest_key`.
pub(crate) fn prepare(
    cache: &Cache,
    debian: &Debian,
    host: &Host,
    guest: &Path,
    guest_key: &str,
    progress: &Progress,
) -> Result<PathBuf> {
    let key = cache::key([guest_key, &debian.key, MAKER]);
    let entry = cache.entry("tools", &key, |directory| {
        let task = progress.spinner("Making the disk with QEMU for nested guests");
        let content = directory.join("content");
        fill(&content, debian, host, guest)?;
        let image = directory.join("tools.img");
        ext4(Command::new(host.bin.join("mke2fs")), &content, &image, LEN)
            .context("making the disk with QEMU for nested guests")?;
        fs::remove_dir_all(&content).with_context(|| format!("removing {}", content.display()))?;
        task.done();
        Ok(())
    })?;
    Ok(entry.join("tools.img"))
}

/// Makes a sparse ext4 image of `len`, such as `4G`, with the contents of a directory.
pub(crate) fn ext4(mut mke2fs: Command, content: &Path, image: &Path, len: &str) -> Result<()> {
    let made = mke2fs
        .args(["-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d"])
        .arg(content)
        .arg(image)
        .arg(len);
    output(made, "mke2fs is part of the test bed").map(drop)
}

fn fill(content: &Path, debian: &Debian, host: &Host, guest: &Path) -> Result<()> {
    let root = debian.root();
    let copy = |from: &Path, to: &str| {
        let to = content.join(to);
        let directory = to.parent().unwrap_or(content);
        fs::create_dir_all(directory)
            .with_context(|| format!("creating {}", directory.display()))?;
        fs::copy(from, &to).with_context(|| format!("copying {}", from.display()))
    };
    let programs = [recipe::HOST_PROGRAMS, &[QEMU_PROGRAM]].concat();
    for file in [recipe::NESTED_FIRMWARE, &programs, &[elf::LOADER]].concat() {
        copy(&root.join(file), file)?;
    }
    for library in elf::library_closure(&root, &programs)? {
        let to = library.to_string_lossy();
        copy(&root.join(&library), &to)?;
    }
    copy(&guest.join("nested.cpio"), "boot/nested.cpio")?;
    vmlinux::extract(
        &debian.kernel,
        &content.join("boot/vmlinux"),
        &host.bin.join("zstd"),
    )?;

    let script = content.join("bin/qemu-system-x86_64");
    fs::create_dir_all(content.join("bin")).context("creating a directory for a script")?;
    fs::write(&script, wrapper())
        .and_then(|()| fs::set_permissions(&script, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("writing {}", script.display()))
}

/// Starts QEMU with its packaged loader and libraries, independent of the VM's.
fn wrapper() -> String {
    format!(
        "#!/bin/sh\nexec {MOUNT}/{loader} --library-path {MOUNT}/usr/lib/x86_64-linux-gnu \
         {MOUNT}/{QEMU_PROGRAM} -L {MOUNT}/usr/share/qemu -L {MOUNT}/usr/share/seabios \"$@\"\n",
        loader = elf::LOADER,
    )
}
