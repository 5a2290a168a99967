//! What the test bed consists of. Changing anything here rebuilds it.

/// The Debian release that everything comes from; its backports are used for
/// the source packages in [`FROM_BACKPORTS`].
pub(crate) const RELEASE: &str = "trixie";

/// Source packages that the release itself has too old.
pub(crate) const FROM_BACKPORTS: &[&str] = &["qemu", "seabios", "linux", "linux-signed-amd64"];

/// Packages to fetch, with what they depend on.
pub(crate) const PACKAGES: &[&str] = &[
    // The host's side.
    "qemu-system-x86",
    "qemu-utils",
    "seabios",
    "ovmf",
    "mtools",
    "systemd-boot-efi",
    "zstd",
    // Tests of libvirt and of the package, and hosts that are network namespaces.
    "dpkg-dev",
    "iproute2",
    "mmdebstrap",
    "perl",
    "xz-utils",
    // The guest's side.
    "linux-image-amd64",
    "busybox-static",
    "dosfstools",
    "e2fsprogs",
    "fio",
    "mount",
    "nvme-cli",
    "pciutils",
    "util-linux",
    "xfsprogs",
];

/// Packages that others depend on, but only to be installed, configured or
/// booted, which never happens here: taken for installed.
pub(crate) const NOT_NEEDED: &[&str] = &[
    "adduser",
    "base-passwd",
    "binutils",
    "bzip2",
    "debconf",
    "dmsetup",
    "dpkg",
    "dracut",
    "init-system-helpers",
    "linux-base",
    "initramfs-tools",
    "kmod",
    "libpam-modules",
    "libpam-runtime",
    "login.defs",
    "make",
    "media-types",
    "netbase",
    "passwd",
    "patch",
    "python3",
    "python3-dbus",
    "readline-common",
    "systemd",
    "tar",
    "tzdata",
    "udev",
    "uuid-runtime",
];

/// Folders of the unpacked packages that nothing here reads.
pub(crate) const UNUSED_FOLDERS: &[&str] = &[
    "usr/share/bash-completion",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/zoneinfo",
    "usr/share/zsh",
];

/// Programs that become runnable on the host, beside QEMU.
pub(crate) const HOST_TOOLS: &[&str] = &[
    "usr/bin/ip",
    "usr/bin/qemu-img",
    "usr/bin/qemu-io",
    "usr/bin/mcopy",
    "usr/bin/mformat",
    "usr/bin/mmd",
    "usr/bin/xz",
    "usr/bin/zstd",
    "usr/sbin/debugfs",
    "usr/sbin/fsck.ext4",
    "usr/sbin/mke2fs",
    "usr/sbin/xfs_repair",
];

/// What runs [`HOST_SCRIPTS`].
pub(crate) const PERL: &str = "usr/bin/perl";

/// Perl scripts that become runnable on the host.
pub(crate) const HOST_SCRIPTS: &[&str] = &["usr/bin/dpkg-shlibdeps", "usr/bin/mmdebstrap"];

/// Programs that go into the guest, with the libraries they need.
pub(crate) const GUEST_PROGRAMS: &[&str] = &[
    "usr/bin/fio",
    "usr/bin/lspci",
    "usr/bin/mount",
    "usr/bin/setpci",
    "usr/bin/umount",
    "usr/sbin/nvme",
    "usr/sbin/blkdiscard",
    "usr/sbin/blockdev",
    "usr/sbin/fstrim",
    "usr/sbin/fsck.ext4",
    "usr/sbin/mkfs.ext4",
    "usr/sbin/mkfs.vfat",
    "usr/sbin/mkfs.xfs",
    "usr/sbin/xfs_repair",
];

/// Files that go into the guest as they are.
pub(crate) const GUEST_FILES: &[&str] = &["usr/share/misc/pci.ids", "etc/mke2fs.conf"];

/// The static busybox, for everything else.
pub(crate) const BUSYBOX: &str = "usr/bin/busybox";

/// What busybox is called in the guest.
pub(crate) const BUSYBOX_NAMES: &[&str] = &[
    "[",
    "awk",
    "base64",
    "basename",
    "cat",
    "chmod",
    "cmp",
    "cp",
    "cut",
    "date",
    "dd",
    "df",
    "dirname",
    "dmesg",
    "du",
    "echo",
    "env",
    "expr",
    "false",
    "find",
    "free",
    "grep",
    "gunzip",
    "gzip",
    "head",
    "hexdump",
    "hostname",
    "id",
    "ifconfig",
    "insmod",
    "ip",
    "kill",
    "ln",
    "losetup",
    "ls",
    "lsmod",
    "md5sum",
    "mkdir",
    "mkfifo",
    "mknod",
    "mktemp",
    "modinfo",
    "modprobe",
    "mountpoint",
    "mv",
    "nc",
    "nproc",
    "od",
    "pgrep",
    "pidof",
    "ping",
    "pkill",
    "printf",
    "ps",
    "pwd",
    "readlink",
    "realpath",
    "rm",
    "rmdir",
    "rmmod",
    "sed",
    "seq",
    "setsid",
    "sh",
    "sha256sum",
    "sha512sum",
    "sleep",
    "sort",
    "stat",
    "sync",
    "sysctl",
    "tail",
    "tar",
    "taskset",
    "tee",
    "test",
    "time",
    "timeout",
    "touch",
    "tr",
    "true",
    "truncate",
    "tty",
    "umount",
    "uname",
    "uniq",
    "uptime",
    "wc",
    "which",
    "xargs",
    "xxd",
    "yes",
    "zcat",
];

/// Modules that init loads, in this order: the way to the agent, and NVMe and
/// the power button, which nothing else would load without udev.
pub(crate) const BOOT_MODULES: &[&str] =
    &["virtio_pci", "virtio_console", "nvme", "button", "evdev"];

/// Modules that are there to be loaded: by mount, by hand.
pub(crate) const MODULES: &[&str] = &[
    "9p",
    "9pnet_virtio",
    "e1000e",
    "ext4",
    "igb",
    "igbvf",
    "kvm_amd",
    "kvm_intel",
    "loop",
    "nls_ascii",
    "nls_cp437",
    "nls_iso8859_1",
    "nls_utf8",
    "pvpanic_pci",
    "uio_pci_generic",
    "vfat",
    "vfio_iommu_type1",
    "vfio_pci",
    "virtio_balloon",
    "virtio_blk",
    "virtio_mem",
    "virtio_net",
    "xfs",
];

/// Modules of a nested guest, to be loaded by hand: what it borrows.
pub(crate) const NESTED_MODULES: &[&str] = &["igbvf", "nvme"];

/// Firmware and option ROMs that a nested QEMU needs, in the packages.
pub(crate) const NESTED_FIRMWARE: &[&str] = &[
    "usr/share/qemu/kvmvapic.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/share/qemu/pvh.bin",
    "usr/share/seabios/bios-256k.bin",
];

/// The release and its backports.
pub(crate) fn suites() -> [String; 2] {
    [RELEASE.to_owned(), format!("{RELEASE}-backports")]
}

/// Everything above, for the cache key.
pub(crate) fn parts() -> Vec<&'static str> {
    let mut parts = vec![RELEASE, BUSYBOX];
    for list in [
        FROM_BACKPORTS,
        PACKAGES,
        NOT_NEEDED,
        UNUSED_FOLDERS,
        HOST_TOOLS,
        HOST_SCRIPTS,
        GUEST_PROGRAMS,
        GUEST_FILES,
        BUSYBOX_NAMES,
        BOOT_MODULES,
        MODULES,
        NESTED_MODULES,
        NESTED_FIRMWARE,
    ] {
        parts.extend(list);
        parts.push("");
    }
    parts
}
