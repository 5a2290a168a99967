//! Two guests share one namespace, and reserve it in turns.

use anyhow::{Context, ensure};
use farside_tests::{Cluster, Guest, MIB, SHORT};
use libtest_mimic::Completion;
use rustix::process::{Signal, kill_process};

use crate::{
    check,
    outlive::{child, worker},
    passed,
};

const DISKS: [&str; 2] = ["left", "right"];

/// Types of reservations (NVM Express 1.4, figure 445).
const WRITE_EXCLUSIVE: u8 = 1;
const EXCLUSIVE_ACCESS: u8 = 2;
const WRITE_EXCLUSIVE_REGISTRANTS_ONLY: u8 = 3;

const PREEMPT: u8 = 1;
const PREEMPT_AND_ABORT: u8 = 2;

/// A guest, and its key.
struct Host<'a> {
    guest: &'a Guest<'a>,
    key: u64,
}

impl Host<'_> {
    fn nvme(&self, command: &str) -> anyhow::Result<String> {
        self.guest.sh(&format!("nvme {command}"))
    }

    fn register(&self) -> anyhow::Result<()> {
        let command = format!("resv-register /dev/nvme0n1 --nrkey={} --rrega=0", self.key);
        self.nvme(&command).map(drop)
    }

    fn acquire(&self, kind: u8, action: u8, preempted: u64) -> anyhow::Result<()> {
        let key = self.key;
        let command = format!(
            "resv-acquire /dev/nvme0n1 --crkey={key} --prkey={preempted} --rtype={kind} --racqa={action}"
        );
        self.nvme(&command).map(drop)
    }

    fn release(&self, kind: u8) -> anyhow::Result<()> {
        let key = self.key;
        let command = format!("resv-release /dev/nvme0n1 --crkey={key} --rtype={kind} --rrela=0");
        self.nvme(&command).map(drop)
    }

    /// Type of the reservation, and keys of the registrants.
    fn report(&self) -> anyhow::Result<(u64, Vec<u64>)> {
        let text = self.nvme("resv-report /dev/nvme0n1 --eds --output-format=json")?;
        let report: serde_json::Value = serde_json::from_str(&text)?;
        let number = |value: &serde_json::Value, of: &str| {
            value[of].as_u64().with_context(|| format!("{of}: {text}"))
        };
        let listed = report["regctlext"].as_array();
        let listed = listed.with_context(|| format!("registrants: {text}"))?;
        let keys = listed.iter().map(|it| number(it, "rkey"));
        Ok((number(&report, "rtype")?, keys.collect::<Result<_, _>>()?))
    }

    /// Whether it may read, and write.
    fn may(&self) -> anyhow::Result<(bool, bool)> {
        let may = |copy: &str| {
            let command =
                format!("dd {copy} bs=4k count=1 2>/dev/null && echo may || echo may not");
            Ok::<_, anyhow::Error>(self.guest.sh(&command)? == "may")
        };
        Ok((
            may("if=/dev/nvme0n1 of=/dev/null iflag=direct")?,
            may("if=/dev/zero of=/dev/nvme0n1 seek=8 oflag=direct")?,
        ))
    }
}

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
    let hosts = [(&a, 10), (&b, 11)].map(|(guest, key)| Host { guest, key });
    let [left, right] = &hosts;
    for host in &hosts {
        host.guest.wait_disk()?;
        // Linux gives a PCIe controller none.
        let id = format!(
            "printf '\\x{:02x}\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0' >/tmp/id",
            host.key
        );
        let set = "nvme set-feature /dev/nvme0 -f 0x81 --value=1 -l 16 -d /tmp/id";
        host.guest.sh(&format!("{id}; {set}"))?;
    }
    let uuid = |host: &Host<'_>| host.guest.sh("cat /sys/block/nvme0n1/uuid");
    ensure!(uuid(left)? == uuid(right)?, "two namespaces");
    let both = || anyhow::Ok((left.may()?, right.may()?));

    // What one writes, the other one reads.
    left.guest
        .sh("echo from left | dd of=/dev/nvme0n1 bs=4k conv=sync oflag=direct 2>/dev/null")?;
    let read = "dd if=/dev/nvme0n1 bs=4k count=1 iflag=direct 2>/dev/null | head -n 1";
    ensure!(right.guest.sh(read)? == "from left");

    ensure!(both()? == (ALL, ALL));
    ensure!(
        left.acquire(WRITE_EXCLUSIVE, 0, 0).is_err(),
        "without a key"
    );
    left.register()?;
    left.acquire(WRITE_EXCLUSIVE, 0, 0)?;
    ensure!(both()? == (ALL, READ));
    right.register()?;
    ensure!(right.acquire(EXCLUSIVE_ACCESS, 0, 0).is_err(), "it is held");
    ensure!(both()? == (ALL, READ));
    ensure!(
        right.report()? == (1, vec![10, 11]),
        "{:?}",
        right.report()?
    );

    // The other one takes it, while the holder writes and its processes are killed.
    let fio = "fio --output-format=terse --name=load --filename=/dev/nvme0n1 --direct=1 --ioengine=libaio \
               --rw=randwrite --bs=4k --iodepth=16 --offset=1M --size=16M --time_based --runtime=30";
    let load = left.guest.exec_start(fio, SHORT)?;
    kill_process(worker(lender.pid(), DISKS[0])?, Signal::KILL)?;
    kill_process(child(keeper.pid(), "serve")?, Signal::KILL)?;
    right.acquire(EXCLUSIVE_ACCESS, PREEMPT_AND_ABORT, 10)?;
    let output = load.wait()?;
    // EBADE, as Linux says of a reservation conflict.
    let has_conflict = format!("{output}").contains("Invalid exchange");
    ensure!(!output.success() && has_conflict, "not refused: {output}");
    ensure!(both()? == (NONE, ALL));
    ensure!(left.report()? == (2, vec![11]));
    left.register()?;
    ensure!(both()? == (NONE, ALL));
    right.release(EXCLUSIVE_ACCESS)?;
    ensure!(both()? == (ALL, ALL));

    // Registrants share it, also after a reboot of one, which gives its identifier anew.
    right.acquire(WRITE_EXCLUSIVE_REGISTRANTS_ONLY, 0, 0)?;
    ensure!(both()? == (ALL, ALL));
    left.guest.reboot(farside_tests::BOOT)?;
    left.guest.wait_disk()?;
    ensure!(both()? == (READ, ALL), "a host without an identifier");
    left.guest.sh(
        "printf '\\x0a\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0' >/tmp/id
        nvme set-feature /dev/nvme0 -f 0x81 --value=1 -l 16 -d /tmp/id",
    )?;
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
