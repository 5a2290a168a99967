//! A disk image that OVMF boots: one FAT file system over the whole disk, with
//! systemd-boot, the guest's kernel and its lean initramfs: OVMF reads slowly.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::Testbed;
use crate::command::output;

/// FAT32 needs 65,525 clusters.
const SMALLEST: u64 = 128 << 20;

pub(crate) fn make(testbed: &Testbed, image: &Path, len: u64, append: &str) -> Result<()> {
    ensure!(
        len >= SMALLEST,
        "a boot image of {len} bytes is too small for kernel and initramfs: at least {SMALLEST}"
    );
    File::create(image)
        .and_then(|file| file.set_len(len))
        .with_context(|| format!("creating {}", image.display()))?;

    let temporary = tempfile::tempdir().context("creating a temporary directory")?;
    let text = |name: &str, text: String| {
        let path = temporary.path().join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok::<_, anyhow::Error>(path)
    };
    let loader = text("loader.conf", "timeout 0\ndefault guest.conf\n".to_owned())?;
    let entry = text(
        "guest.conf",
        format!(
            "title farside test guest\nlinux /vmlinuz\ninitrd /initramfs.cpio\noptions {} {append}\n",
            testbed.kernel_args()
        ),
    )?;

    let run = |command: &mut Command| {
        // mtools may reject the image's unusual geometry.
        command.env("MTOOLS_SKIP_CHECK", "1");
        output(command, "mtools is part of the test bed").map(drop)
    };
    run(testbed
        .tool("mformat")
        .arg("-F")
        .arg("-i")
        .arg(image)
        .arg("::"))?;
    for directory in ["::/EFI", "::/EFI/BOOT", "::/loader", "::/loader/entries"] {
        run(testbed.tool("mmd").arg("-i").arg(image).arg(directory))?;
    }
    for (from, to) in [
        (testbed.systemd_boot().as_path(), "::/EFI/BOOT/BOOTX64.EFI"),
        (loader.as_path(), "::/loader/loader.conf"),
        (entry.as_path(), "::/loader/entries/guest.conf"),
        (testbed.kernel(), "::/vmlinuz"),
        (testbed.lean_initramfs(), "::/initramfs.cpio"),
    ] {
        run(testbed.tool("mcopy").arg("-i").arg(image).arg(from).arg(to))
            .with_context(|| format!("copying {} into the boot image", from.display()))?;
    }
    Ok(())
}
