//! Two guests share one namespace, and reserve it in turns.

use std::fs::File;

use anyhow::ensure;
use farside_tests::{
    Cluster, Guest, MIB, SHORT,
    reserving::{
        ACQUIRE, EXCLUSIVE_ACCESS, NO_NOTIFICATION, PREEMPT, PREEMPT_AND_ABORT,
        REGISTRATION_PREEMPTED, Reserving, WRITE_EXCLUSIVE, WRITE_EXCLUSIVE_REGISTRANTS_ONLY,
    },
};
use libtest_mimic::Completion;
use rustix::process::{Signal, kill_process};

use crate::{
    check,
    outlive::{child, worker},
    passed,
};

const DISKS: [&str; 2] = ["left", "right"];

pub fn two_guests_reserve_a_shared_namespace(cluster: &Cluster) -> anyhow::Result<Completion> {
    const ALL: (bool, bool) = (true, true);
    const READ: (bool, bool) = (true, false);
    const NONE: (bool, bool) = (false, false);
    let image = cluster.image("shared", 64 * MIB)?;
    let file = cluster.directory().join("shared.reservations");
    let disks = DISKS.map(|id| format!("{id}={},shared={}", image.display(), file.display()));
    let lender = cluster.lend(&["--nvme", &disks[0], "--nvme", &disks[1]])?;
    let keeper = cluster
        .serve("a", &DISKS[..1])
        .args(&["--keeper"])
        .start()?;
    let _other = cluster.serve("b", &DISKS[1..]).start()?;
    let (a, b) = (
        cluster.guest("a").whole().boot()?,
        cluster.guest("b").whole().boot()?,
    );
    let (sh_a, sh_b) = (|command: &str| a.sh(command), |command: &str| b.sh(command));
    let left = Reserving { sh: &sh_a, key: 10 };
    let right = Reserving { sh: &sh_b, key: 11 };
    for (guest, host) in [(&a, &left), (&b, &right)] {
        guest.wait_disk()?;
        host.identify()?;
    }
    let uuid = "cat /sys/block/nvme0n1/uuid";
    ensure!(a.sh(uuid)? == b.sh(uuid)?, "two namespaces");
    let both = || anyhow::Ok((left.may()?, right.may()?));

    // What one writes, the other one reads.
    a.sh("echo from left | dd of=/dev/nvme0n1 bs=4k conv=sync oflag=direct 2>/dev/null")?;
    let read = "dd if=/dev/nvme0n1 bs=4k count=1 iflag=direct 2>/dev/null | head -n 1";
    ensure!(b.sh(read)? == "from left");

    ensure!(both()? == (ALL, ALL));
    ensure!(
        left.acquire(WRITE_EXCLUSIVE, ACQUIRE, 0).is_err(),
        "without a key"
    );
    left.register()?;
    left.acquire(WRITE_EXCLUSIVE, ACQUIRE, 0)?;
    ensure!(both()? == (ALL, READ));
    right.register()?;
    ensure!(
        right.acquire(EXCLUSIVE_ACCESS, ACQUIRE, 0).is_err(),
        "it is held"
    );
    ensure!(both()? == (ALL, READ));
    ensure!(
        right.report()? == (1, vec![10, 11]),
        "{:?}",
        right.report()?
    );

    // The other one takes it, while the holder writes and its processes are killed.
    let fio = "fio --output-format=terse --name=load --filename=/dev/nvme0n1 --direct=1 --ioengine=libaio \
               --rw=randwrite --bs=4k --iodepth=16 --offset=1M --size=16M --time_based --runtime=30";
    let load = a.exec_start(fio, SHORT)?;
    kill_process(worker(lender.pid(), DISKS[0])?, Signal::KILL)?;
    kill_process(child(keeper.pid(), "serve")?, Signal::KILL)?;
    right.acquire(EXCLUSIVE_ACCESS, PREEMPT_AND_ABORT, 10)?;
    let output = load.wait()?;
    // EBADE, as Linux says of a reservation conflict.
    let has_conflict = format!("{output}").contains("Invalid exchange");
    ensure!(!output.success() && has_conflict, "not refused: {output}");
    ensure!(both()? == (NONE, ALL));
    ensure!(left.report()? == (2, vec![11]));
    // It is notified, once, and the host that did it is not.
    for (host, kind) in [
        (&left, REGISTRATION_PREEMPTED),
        (&left, NO_NOTIFICATION),
        (&right, NO_NOTIFICATION),
    ] {
        let found = host.notification()?;
        ensure!(found == (kind, 0), "{found:?} at {}", host.key);
    }
    left.register()?;
    ensure!(both()? == (NONE, ALL));
    right.release(EXCLUSIVE_ACCESS)?;
    ensure!(both()? == (ALL, ALL));

    // It grows for both.
    File::options()
        .write(true)
        .open(&image)?
        .set_len(80 * MIB)?;
    let resized = cluster.run(&["lend", "--resize", DISKS[1]])?;
    ensure!(
        resized.stdout == "left has 80 MiB (was 64 MiB)\nright has 80 MiB (was 64 MiB)\n",
        "{resized:?}"
    );
    for guest in [&a, &b] {
        let grown = "timeout 20 sh -c 'until [ $(blockdev --getsize64 /dev/nvme0n1) = 83886080 ]; do :; done'";
        guest.sh(grown)?;
    }
    a.sh(
        "echo at the end | dd of=/dev/nvme0n1 bs=4k seek=20479 conv=sync oflag=direct 2>/dev/null",
    )?;
    let read = "dd if=/dev/nvme0n1 bs=4k skip=20479 iflag=direct 2>/dev/null | head -n 1";
    ensure!(b.sh(read)? == "at the end");

    // Registrants share it, also after a reboot of one, which gives its identifier anew.
    right.acquire(WRITE_EXCLUSIVE_REGISTRANTS_ONLY, ACQUIRE, 0)?;
    ensure!(both()? == (ALL, ALL));
    a.reboot(farside_tests::BOOT)?;
    a.wait_disk()?;
    ensure!(both()? == (READ, ALL), "a host without an identifier");
    left.identify()?;
    ensure!(both()? == (ALL, ALL));
    left.acquire(WRITE_EXCLUSIVE, PREEMPT, 11)?;
    ensure!(both()? == (ALL, READ));
    check::no_faults(cluster, &DISKS)?;
    b.power_off()?;
    a.power_off()?;
    passed()
}

/// Names of the guests, which are nodes of the cluster, and their addresses.
const NODES: [(&str, &str); 2] = [("a", "10.9.0.1"), ("b", "10.9.0.2")];

/// Makes a guest a node of the cluster that the file system has.
fn join_cluster(guest: &Guest<'_>, (name, address): (&str, &str)) -> anyhow::Result<()> {
    let mut file = "cluster:\n\tnode_count = 2\n\tname = farside\n".to_owned();
    for (number, (name, address)) in NODES.iter().enumerate() {
        file += &format!(
            "\nnode:\n\tip_port = 7777\n\tip_address = {address}\n\tnumber = {number}\n\tname = {name}\n\tcluster = farside\n"
        );
    }
    // Its tools look for mounted devices there.
    guest.sh("mkdir -p /etc/ocfs2 && ln -sf /proc/mounts /etc/mtab")?;
    guest.write_file("/etc/ocfs2/cluster.conf", file.as_bytes())?;
    let join = format!(
        "modprobe -a virtio_net ocfs2 ocfs2_stack_o2cb
        hostname {name}
        ip addr add {address}/24 dev eth0 && ip link set lo up && ip link set eth0 up
        mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
        sysctl -w fs.ocfs2.nm.hb_ctl_path=$(which ocfs2_hb_ctl)
        o2cb register-cluster farside"
    );
    guest.sh(&join).map(drop)
}

pub fn two_guests_mount_a_cluster_file_system_on_a_shared_namespace(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    const FILES: usize = 40;
    let image = cluster.image("shared", 256 * MIB)?;
    let file = cluster.directory().join("shared.reservations");
    let disks = DISKS.map(|id| format!("{id}={},shared={}", image.display(), file.display()));
    let lender = cluster.lend(&["--nvme", &disks[0], "--nvme", &disks[1]])?;
    let _backends = [
        cluster.serve("a", &DISKS[..1]).start()?,
        cluster.serve("b", &DISKS[1..]).start()?,
    ];
    let wire = cluster.directory().join("wire.sock");
    let boot = |(name, _): (&str, &str), server: &str, mac: u8| {
        let wire = format!(
            "stream,id=wire,server={server},addr.type=unix,addr.path={}",
            wire.display()
        );
        let card = format!("virtio-net-pci,netdev=wire,romfile=,mac=52:54:00:00:00:{mac:02x}");
        let guest = cluster.guest(name).whole();
        guest.args(&["-netdev", &wire, "-device", &card]).boot()
    };
    let (a, b) = (boot(NODES[0], "on", 1)?, boot(NODES[1], "off", 2)?);
    let guests = [&a, &b];
    for (guest, node) in guests.iter().zip(NODES) {
        guest.wait_disk()?;
        join_cluster(guest, node)?;
    }
    a.sh("mkfs.ocfs2 -N 2 -b 4K -C 4K --cluster-stack=o2cb --cluster-name=farside --force /dev/nvme0n1")?;
    for guest in guests {
        guest.sh_within(
            "mkdir -p /mnt && mount.ocfs2 /dev/nvme0n1 /mnt",
            farside_tests::BOOT,
        )?;
    }
    // Both in one directory, while workers are killed.
    a.sh("mkdir /mnt/both")?;
    let make = format!(
        "for n in $(seq {FILES}); do
            echo of $(hostname) $n >/mnt/both/$(hostname)$n && sync /mnt/both/$(hostname)$n || exit 1
        done"
    );
    let making = [a.exec_start(&make, SHORT)?, b.exec_start(&make, SHORT)?];
    for disk in DISKS {
        kill_process(worker(lender.pid(), disk)?, Signal::KILL)?;
    }
    for made in making {
        let output = made.wait()?;
        ensure!(output.success(), "{output}");
    }
    let sum = "cd /mnt/both && for name in *; do echo $name $(cat $name); done | sha256sum";
    let mut expected: Vec<String> = Vec::new();
    for (name, _) in NODES {
        expected.extend((1..=FILES).map(|n| format!("{name}{n} of {name} {n}\n")));
    }
    expected.sort();
    let expected = farside_tests::sha256(expected.concat().as_bytes());
    for guest in guests {
        let found = guest.sh(sum)?;
        ensure!(found.starts_with(&expected), "{found}");
    }
    for guest in guests {
        guest.sh_within("cd / && umount /mnt", farside_tests::BOOT)?;
    }
    a.sh("fsck.ocfs2 -f -n /dev/nvme0n1")?;
    check::no_faults(cluster, &DISKS)?;
    b.power_off()?;
    a.power_off()?;
    passed()
}
