//! A VM that boots from a Debian root, with systemd as its first process and the
//! test bed's agent as one of its services.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result, anyhow};
use farside_testbed::{Inside, Vm};
use farside_tests::{BOOT, testbed};
use tempfile::TempDir;

use crate::stage::sh;

/// Replaces the test bed's process 1: mounts the disks and switches to the root on one of
/// them. It brings the agent along, and QEMU for a nested guest.
const SWITCH: &str = "\
#!/bin/sh
b=/usr/bin/busybox
$b mkdir -p /proc /sys /dev /disk
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
for module in $($b cat /etc/farside/modules); do $b insmod $module 2>/dev/null; done
$b modprobe virtio_blk
$b modprobe ext4
$b modprobe tun
$b modprobe kvm_amd 2>/dev/null || $b modprobe kvm_intel 2>/dev/null
mount_disk() {
    while :; do
        for disk in /sys/block/vd*; do
            [ \"$($b cat $disk/serial)\" != $1 ] || break 2
        done
    done
    $b mount -t ext4 -o $3 /dev/${disk##*/} $2 || exec $b sh
}
mount_disk farside-root /disk rw
mount_disk farside-tools /disk/tools ro
$b cp /init /disk/usr/local/bin/guest-agent
$b umount /proc /sys
exec $b switch_root /disk /usr/lib/systemd/systemd
";

const AGENT: &str = "\
[Service]
ExecStart=/usr/local/bin/guest-agent serve
Environment=PATH=/usr/sbin:/usr/bin HOME=/root LC_ALL=C.UTF-8
";

/// udev does this elsewhere.
const KVM_GROUP: &str = "getent group kvm > /dev/null || groupadd --system kvm
    [ ! -e /dev/kvm ] || { chgrp kvm /dev/kvm && chmod 660 /dev/kvm; }";

/// Size of the disk; the image is sparse.
const DISK: &str = "1G";

/// An NVMe controller whose virtual functions need resources before they can be used.
const NVME: [&str; 3] = [
    "pcie-root-port,id=root-port,chassis=1",
    "nvme-subsys,id=subsystem",
    "nvme,bus=root-port,subsys=subsystem,serial=farside,max_ioqpairs=16,msix_qsize=17,sriov_max_vfs=4,\
     sriov_vq_flexible=12,sriov_vi_flexible=8",
];

/// Timeout of a command in the guest.
const SOON: Duration = BOOT;

pub struct Machine {
    vm: Vm,
    _disk: TempDir,
}

impl Machine {
    /// Boots a copy of the contents of `inside`.
    pub fn boot(inside: &Inside) -> Result<Self> {
        // Without udev, no device unit of the console ever appears: do not wait for it.
        sh(
            inside,
            &format!(
                "printf '{}' > /etc/systemd/system/guest-agent.service
                 mkdir -p /etc/systemd/system/multi-user.target.wants
                 ln -s ../guest-agent.service /etc/systemd/system/multi-user.target.wants/
                 systemd-machine-id-setup
                 mkdir /tools /tmp/disk && mount --bind / /tmp/disk",
                AGENT.replace('\n', "\\n")
            ),
        )?;
        let directory = tempfile::tempdir().context("creating a directory")?;
        let image: PathBuf = directory.path().join("root.img");
        testbed()?.make_disk(&inside.path("/tmp/disk"), &image, DISK)?;
        let vm = testbed()?
            .vm("package")
            .memory(1 << 30)
            .nested_guests(1)
            .file("/switch", 0o755, SWITCH)
            .append("rdinit=/switch systemd.getty_auto=no systemd.show_status=no")
            .arg("-drive")
            .arg(format!(
                "file={},format=raw,if=none,id=root,cache=unsafe",
                image.display()
            ))
            .args(["-device", "virtio-blk-pci,drive=root,serial=farside-root"])
            .args(NVME.iter().flat_map(|device| ["-device", device]))
            .launch()?;
        let machine = Self {
            vm,
            _disk: directory,
        };
        machine
            .vm
            .wait_agent(BOOT)
            .and_then(|()| machine.sh(KVM_GROUP))
            .map_err(|error| anyhow!("{error:#}\n{}", machine.story()))?;
        Ok(machine)
    }

    /// Runs a shell command that must succeed, and returns its output.
    pub fn sh(&self, script: &str) -> Result<String> {
        self.vm
            .exec_ok(script, SOON)
            .with_context(|| format!("in the guest: {script}"))
    }

    /// Writes a file.
    pub fn write(&self, path: &str, text: &str) -> Result<()> {
        self.vm.write_file(path, text.as_bytes())
    }

    /// Whether a nested guest runs on KVM; otherwise it is emulated.
    pub fn has_kvm(&self) -> Result<bool> {
        Ok(self.vm.exec("test -e /dev/kvm", SOON)?.success())
    }

    /// A property of a unit.
    pub fn show(&self, unit: &str, property: &str) -> Result<String> {
        let value = self.sh(&format!("systemctl show --value -p {property} {unit}"))?;
        Ok(value.trim().to_owned())
    }

    /// Logs for the analysis of a failure.
    pub fn story(&self) -> String {
        let journal = self
            .vm
            .exec("journalctl --no-pager -b -u 'farside*' | tail -n 60", SOON)
            .map(|output| output.stdout)
            .unwrap_or_default();
        let serial = self.vm.serial_log();
        let lines: Vec<&str> = serial.lines().collect();
        let end = &lines[lines.len().saturating_sub(30)..];
        format!("journal:\n{journal}\nconsole:\n{}", end.join("\n"))
    }

    /// Powers the VM off; its writes are discarded.
    pub fn end(self) -> Result<()> {
        self.vm.kill().map(drop)
    }
}
