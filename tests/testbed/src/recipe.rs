//! The contents of the test bed. Any change here rebuilds it.

/// The Debian release of all packages; the source packages in [`FROM_BACKPORTS`] come from
/// its backports.
pub(crate) const RELEASE: &str = "trixie";

/// Source packages whose version in the release is too old.
pub(crate) const FROM_BACKPORTS: &[&str] = &["qemu", "seabios", "linux", "linux-signed-amd64"];

/// Packages to fetch, with their dependencies.
pub(crate) const PACKAGES: &[&str] = &[
    // Host tools.
    "qemu-system-x86",
    "qemu-utils",
    "seabios",
    "ovmf",
    "u-boot-qemu",
    "mtools",
    "systemd-boot-efi",
    "zstd",
    // For the tests of libvirt and of the package, and for hosts that are network
    // namespaces.
    "dpkg-dev",
    "iproute2",
    "mmdebstrap",
    "perl",
    "xz-utils",
    // Guest software.
    "linux-image-amd64",
    "busybox-static",
    "dosfstools",
    "e2fsprogs",
    "fio",
    "mount",
    "nvme-cli",
    "ocfs2-tools",
    "openssh-client",
    "openssh-server",
    "openssh-sftp-server",
    "pciutils",
    "util-linux",
    "xfsprogs",
];

/// Dependencies needed only for installation, configuration or boot, none of which happens
/// here: assumed to be installed.
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

/// Unused directories of the unpacked packages.
pub(crate) const UNUSED_DIRECTORIES: &[&str] = &[
    "usr/share/bash-completion",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/zoneinfo",
    "usr/share/zsh",
];

/// Binaries made runnable on the host, besides QEMU.
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
    "usr/sbin/tc",
    "usr/sbin/fsck.ext4",
    "usr/sbin/mke2fs",
    "usr/sbin/xfs_repair",
];

/// The interpreter of [`HOST_SCRIPTS`].
pub(crate) const PERL: &str = "usr/bin/perl";

/// Perl scripts made runnable on the host.
pub(crate) const HOST_SCRIPTS: &[&str] = &["usr/bin/dpkg-shlibdeps", "usr/bin/mmdebstrap"];

/// Binaries copied into the guest, with their libraries.
pub(crate) const GUEST_PROGRAMS: &[&str] = &[
    "usr/bin/fio",
    "usr/bin/lspci",
    "usr/bin/mount",
    "usr/bin/setpci",
    "usr/bin/umount",
    "usr/sbin/nvme",
    "usr/sbin/fsck.ocfs2",
    "usr/sbin/mkfs.ocfs2",
    "usr/sbin/mount.ocfs2",
    "usr/sbin/o2cb",
    "usr/sbin/ocfs2_hb_ctl",
    "usr/sbin/tc",
    "usr/sbin/blkdiscard",
    "usr/sbin/blockdev",
    "usr/sbin/fstrim",
    "usr/sbin/fsck.ext4",
    "usr/sbin/mkfs.ext4",
    "usr/sbin/mkfs.vfat",
    "usr/sbin/mkfs.xfs",
    "usr/sbin/xfs_repair",
];

/// Files copied into the guest unchanged.
pub(crate) const GUEST_FILES: &[&str] = &["usr/share/misc/pci.ids", "etc/mke2fs.conf"];

/// The static busybox, for everything else.
pub(crate) const BUSYBOX: &str = "usr/bin/busybox";

/// The applets of busybox that the guest has links for.
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

/// Modules that init loads, in this order: for the agent's port, NVMe and the power button;
/// without udev no other process would load these.
pub(crate) const BOOT_MODULES: &[&str] =
    &["virtio_pci", "virtio_console", "nvme", "button", "evdev"];

/// Modules available in the guest: loaded by mount or by hand.
pub(crate) const MODULES: &[&str] = &[
    "9p",
    "9pnet_virtio",
    "dm_delay",
    "dm_flakey",
    "dm_log_writes",
    "dm_snapshot",
    "dm_thin_pool",
    "dm_zero",
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
    "nvme_loop",
    "nvme_tcp",
    "nvmet_tcp",
    "ocfs2",
    "ocfs2_stack_o2cb",
    "pvpanic_pci",
    "sch_netem",
    "tun",
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

/// Modules that the init of a nested guest loads: for the power button.
pub(crate) const NESTED_BOOT_MODULES: &[&str] = &["button", "evdev"];

/// Modules of a nested guest, loaded by hand: drivers for borrowed devices and for disks beside them.
pub(crate) const NESTED_MODULES: &[&str] = &[
    "ahci",
    "e1000e",
    "igb",
    "igbvf",
    "nvme",
    "nvme_tcp",
    "sd_mod",
    "usb_storage",
    "virtio_blk",
    "virtio_net",
    "xhci_pci",
];

/// Binaries on the disk of VMs that play hosts, besides QEMU.
pub(crate) const HOST_PROGRAMS: &[&str] = &[
    "usr/bin/scp",
    "usr/bin/ssh",
    "usr/bin/ssh-keygen",
    "usr/lib/openssh/sftp-server",
    "usr/lib/openssh/sshd-auth",
    "usr/lib/openssh/sshd-session",
    "usr/sbin/sshd",
];

/// Firmware and option ROMs for a nested QEMU, in the packages.
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
        UNUSED_DIRECTORIES,
        HOST_TOOLS,
        HOST_SCRIPTS,
        GUEST_PROGRAMS,
        GUEST_FILES,
        BUSYBOX_NAMES,
        BOOT_MODULES,
        MODULES,
        NESTED_BOOT_MODULES,
        NESTED_MODULES,
        HOST_PROGRAMS,
        NESTED_FIRMWARE,
    ] {
        parts.extend(list);
        parts.push("");
    }
    parts
}
