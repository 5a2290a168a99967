//! Debian's userland in a guest: a root directory with packages on a disk of QEMU's, in which commands run by `chroot`.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use farside_testbed::{DebianRoot, Inside, Output, Progress};
use farside_tests::{BOOT, Cluster, Guest, GuestBuilder, testbed};

use crate::suite::Suite;

/// The disk's serial number.
const SERIAL: &str = "userland";

/// Its size; the image is sparse.
const LEN: &str = "4G";

/// The guest's mount point of it.
const MOUNT: &str = "/mnt";

/// A copy of a checkout, in the userland.
pub const SUITE: &str = "/suite";

/// Mount point of the checkout, while the userland is made.
const CHECKOUT: &str = "/checkout";

/// Makes an image of a Debian with the packages of a suite, with a copy of `checkout`, which is built.
pub fn make(cluster: &Cluster, suite: &Suite, checkout: &Path) -> Result<PathBuf> {
    let Suite {
        name,
        packages,
        build,
        ..
    } = suite;
    let root = DebianRoot::prepare(testbed()?, name, packages, &Progress::auto())?;
    let inside = root.enter_with(&[(checkout, Path::new(CHECKOUT))])?;
    run(
        &inside,
        &format!("cp -a {CHECKOUT} {SUITE} && cd {SUITE} && {build}"),
    )?;
    // Without the mounts in it.
    run(&inside, "mkdir /tmp/disk && mount --bind / /tmp/disk")?;
    let image = cluster.directory().join("userland.img");
    testbed()?.make_disk(&inside.path("/tmp/disk"), &image, LEN)?;
    Ok(image)
}

fn run(inside: &Inside, script: &str) -> Result<()> {
    let output = inside
        .command("sh")
        .args(["-c", script])
        .output()
        .with_context(|| format!("running {script}"))?;
    ensure!(
        output.status.success(),
        "{script}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Adds the disk with the image to a guest.
pub fn attach<'a>(guest: GuestBuilder<'a>, image: &Path) -> GuestBuilder<'a> {
    let drive = format!(
        "file={},format=raw,if=none,id=userland,cache=unsafe",
        image.display()
    );
    let device = format!("virtio-blk-pci,drive=userland,serial={SERIAL}");
    guest.whole().args(&["-drive", &drive, "-device", &device])
}

/// The userland, mounted in a guest.
pub struct Userland<'a> {
    guest: &'a Guest<'a>,
}

impl<'a> Userland<'a> {
    /// Mounts it, with udev as in a booted Debian, the kernel's modules and its configuration.
    pub fn mount(guest: &'a Guest<'a>) -> Result<Self> {
        let mount = format!(
            "set -e
            modprobe -a virtio_blk ext4
            disk=$(timeout 60 sh -c 'until grep -lx {SERIAL} /sys/block/vd*/serial; do :; done')
            disk=${{disk%/serial}}
            mount -t ext4 /dev/${{disk##*/}} {MOUNT}
            for directory in dev proc sys run; do mount --rbind /$directory {MOUNT}/$directory; done
            mkdir -p {MOUNT}/usr/lib/modules
            mount --bind /usr/lib/modules {MOUNT}/usr/lib/modules"
        );
        guest.sh_within(&mount, BOOT)?;
        let config = std::fs::read(testbed()?.kernel_config()).context("the kernel's config")?;
        let release = guest.sh("uname -r")?;
        guest.write_file(&format!("{MOUNT}/boot/config-{release}"), &config)?;
        let userland = Self { guest };
        // kmod reads binary indexes, busybox text. sudo resolves the host's name.
        userland.sh("set -e
            depmod
            echo guest >/proc/sys/kernel/hostname
            echo 127.0.0.1 localhost guest >/etc/hosts
            mount -t debugfs debugfs /sys/kernel/debug
            modprobe configfs
            mount -t configfs configfs /sys/kernel/config
            /usr/lib/systemd/systemd-udevd --daemon
            udevadm trigger --subsystem-match=block
            udevadm settle")?;
        Ok(userland)
    }

    /// The name of the guest's other virtio-blk disk.
    pub fn other_virtio_disk(&self) -> Result<String> {
        let disks = self.sh(&format!("grep -Lx {SERIAL} /sys/block/vd*/serial"))?;
        let disk = disks.strip_suffix("/serial");
        let name = disk.and_then(|disk| disk.strip_prefix("/sys/block/"));
        let name = name.filter(|name| !name.contains('/'));
        name.map(str::to_owned)
            .with_context(|| format!("not one other disk: {disks}"))
    }

    /// Runs a shell command in it.
    pub fn exec(&self, command: &str, timeout: Duration) -> Result<Output> {
        let quoted = command.replace('\'', r"'\''");
        // udev's tools do nothing in a chroot but with this variable.
        self.guest.exec(
            &format!(
                "exec chroot {MOUNT} env -i PATH=/usr/sbin:/usr/bin HOME=/root LC_ALL=C.UTF-8 \
                 SYSTEMD_IGNORE_CHROOT=1 bash -c '{quoted}'"
            ),
            timeout,
        )
    }

    /// Runs a shell command in it that must succeed.
    pub fn sh(&self, command: &str) -> Result<String> {
        let output = self.exec(command, BOOT)?;
        ensure!(output.success(), "{command}: {output}");
        Ok(output.stdout.trim().to_owned())
    }
}
