//! Users of a function on the host.

use farside_host_pci::{InUse, Use};

use crate::host::{MadeUpHost, bdf};

const DRIVE: &str = "sys/devices/pci0000:00/0000:00:04.0";

/// A disk with a partition at 0000:00:04.0 and an interface at 0000:00:05.0, both
/// idle.
fn host() -> MadeUpHost {
    let host = MadeUpHost::new();
    host.function("0000:00:04.0", [0x1b36, 0x0010], 0x01_0802, Some("nvme"));
    host.function("0000:00:05.0", [0x8086, 0x10c9], 0x02_0000, Some("igb"));
    host.class_device("block", &format!("{DRIVE}/nvme/nvme0"), "nvme0n1");
    host.class_device("block", &format!("{DRIVE}/nvme/nvme0/nvme0n1"), "nvme0n1p1");
    host.file("sys/class/block/nvme0n1/dev", "259:0\n");
    host.file("sys/class/block/nvme0n1p1/dev", "259:1\n");
    host.class_device("net", "sys/devices/pci0000:00/0000:00:05.0/net", "enp0s5");
    host.file("sys/class/net/enp0s5/flags", "0x1002\n");
    host.file("sys/class/net/enp0s5/operstate", "down\n");
    // Irrelevant: another disk, which is mounted, and the loopback, which is up.
    host.class_device("block", "sys/devices/pci0000:00/0000:00:06.0/x", "sda1");
    host.file("sys/class/block/sda1/dev", "8:1\n");
    host.class_device("net", "sys/devices/virtual/net", "lo");
    host.file("sys/class/net/lo/flags", "0x9\n");
    host
}

fn usage(host: &MadeUpHost, address: &str) -> Vec<String> {
    let uses = host.pci().usage(&bdf(address)).unwrap();
    uses.iter().map(InUse::to_string).collect()
}

#[test]
fn an_idle_drive_and_interface_are_free() {
    let host = host();
    assert!(usage(&host, "00:04.0").is_empty());
    assert!(usage(&host, "00:05.0").is_empty());
}

#[test]
fn a_mounted_partition_is_found_by_its_number() {
    let host = host();
    host.append(
        "proc/self/mountinfo",
        "40 22 259:1 / /mnt/my\\040data rw shared:1 - ext4 /dev/root rw\n",
    );
    assert_eq!(
        usage(&host, "00:04.0"),
        ["nvme0n1p1 is mounted at /mnt/my data"]
    );
    assert!(usage(&host, "00:05.0").is_empty());
}

#[test]
fn a_mounted_partition_is_found_by_its_name() {
    let host = host();
    host.append(
        "proc/self/mountinfo",
        "40 22 0:40 / /mnt rw - btrfs /dev/nvme0n1p1 rw\n",
    );
    assert_eq!(usage(&host, "00:04.0"), ["nvme0n1p1 is mounted at /mnt"]);
}

#[test]
fn a_mount_is_found_in_a_plain_mount_table() {
    let host = host();
    host.remove("proc/self/mountinfo");
    host.file("proc/mounts", "/dev/nvme0n1 /mnt ext4 rw 0 0\n");
    assert_eq!(usage(&host, "00:04.0"), ["nvme0n1 is mounted at /mnt"]);
}

#[test]
fn swap_is_found() {
    let host = host();
    host.append("proc/swaps", "/dev/nvme0n1p1 partition 1048572 0 -2\n");
    assert_eq!(usage(&host, "00:04.0"), ["nvme0n1p1 is swap"]);
}

#[test]
fn what_a_device_mapper_or_md_device_is_made_of_is_found() {
    let host = host();
    host.file("sys/class/block/nvme0n1p1/holders/dm-0/uevent", "");
    host.file("sys/class/block/dm-0/dm/name", "vg-root\n");
    host.file("sys/class/block/nvme0n1/holders/md127/uevent", "");
    assert_eq!(
        usage(&host, "00:04.0"),
        [
            "nvme0n1 is part of md127",
            "nvme0n1p1 is part of dm-0 (vg-root)"
        ]
    );
}

#[test]
fn an_exclusive_user_is_found_and_named_only_where_nothing_better_is_known() {
    let host = host();
    host.claim("nvme0n1");
    host.claim("nvme0n1p1");
    let uses = host.pci().usage(&bdf("00:04.0")).unwrap();
    assert_eq!(uses.len(), 2);
    assert!(uses.iter().all(|used| used.how == Use::Claimed));
    host.append("proc/swaps", "/dev/nvme0n1p1 partition 1048572 0 -2\n");
    assert_eq!(usage(&host, "00:04.0"), ["nvme0n1p1 is swap"]);
}

#[test]
fn the_disk_of_a_multipath_namespace_is_found_although_it_lies_elsewhere() {
    let host = host();
    host.function("0000:00:07.0", [0x1b36, 0x0010], 0x01_0802, Some("nvme"));
    let place = "sys/devices/pci0000:00/0000:00:07.0/nvme/nvme3";
    host.class_device("block", place, "nvme2c3n1");
    let subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys2";
    host.class_device("block", subsystem, "nvme2n1");
    host.class_device("block", &format!("{subsystem}/nvme2n1"), "nvme2n1p1");
    host.file("sys/class/block/nvme2n1p1/dev", "259:9\n");
    assert!(usage(&host, "00:07.0").is_empty());
    host.append(
        "proc/self/mountinfo",
        "40 22 259:9 / /srv rw - xfs /dev/nvme2n1p1 rw\n",
    );
    assert_eq!(usage(&host, "00:07.0"), ["nvme2n1p1 is mounted at /srv"]);
}

#[test]
fn an_interface_that_is_up_is_found() {
    let host = host();
    host.file("sys/class/net/enp0s5/flags", "0x1003\n");
    assert_eq!(usage(&host, "00:05.0"), ["enp0s5 is up"]);
    host.file("sys/class/net/enp0s5/flags", "nonsense\n");
    assert!(usage(&host, "00:05.0").is_empty());
    host.file("sys/class/net/enp0s5/operstate", "up\n");
    assert_eq!(usage(&host, "00:05.0"), ["enp0s5 is up"]);
}

#[test]
fn virtual_functions_go_with_their_physical_one() {
    let host = host();
    host.file("sys/bus/pci/devices/0000:00:05.0/sriov_totalvfs", "7\n");
    host.file("sys/bus/pci/devices/0000:00:05.0/sriov_numvfs", "2\n");
    assert_eq!(
        usage(&host, "00:05.0"),
        ["0000:00:05.0 has 2 virtual functions"]
    );
}
