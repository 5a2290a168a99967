//! Several VMs, several devices, one lender.

use anyhow::{Context, ensure};
use farside_tests::{BorrowState, Cluster, Guest, MIB, SHORT, noise, sha256, sha256_of};
use libtest_mimic::Completion;

use crate::{check, passed};

pub fn two_vms_use_their_own_drives_of_one_lender(cluster: &Cluster) -> anyhow::Result<Completion> {
    let ids = ["left", "right", "other"];
    let mut args = Vec::new();
    for id in ids {
        let image = cluster.image(id, 64 * MIB)?;
        args.extend(["--nvme".to_owned(), format!("{id}={}", image.display())]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let _lender = cluster.lend(&args)?;
    let _backend_a = cluster.serve("a", &["left", "right"]).start()?;
    let _backend_b = cluster.serve("b", &["other"]).start()?;
    let a = cluster.guest("a").boot()?;
    let b = cluster
        .guest("b")
        .machine(farside_tests::Machine::I440fx)
        .boot()?;
    let (left, right, other) = (disk(&a, 0x10, 0)?, disk(&a, 0x10, 1)?, disk(&b, 0x10, 0)?);
    ensure!(left != right, "two disks, one name: {left}");

    // All three concurrently.
    let write = |guest: &Guest<'_>, seed: u64| -> anyhow::Result<String> {
        let data = noise(seed, 4 * MIB as usize);
        guest.write_file(&format!("/tmp/data{seed}"), &data)?;
        Ok(sha256(&data))
    };
    let sums = [write(&a, 21)?, write(&a, 22)?, write(&b, 23)?];
    let dd = |seed: u64, disk: &str| {
        format!(
            "for i in 0 1 2 3; do dd if=/tmp/data{seed} of={disk} bs=64k seek=$((i*64)) oflag=direct || exit 1; done"
        )
    };
    let jobs = [
        a.exec_start(&dd(21, &left), SHORT)?,
        a.exec_start(&dd(22, &right), SHORT)?,
        b.exec_start(&dd(23, &other), SHORT)?,
    ];
    for job in jobs {
        let output = job.wait()?;
        ensure!(output.success(), "{output}");
    }
    for (id, sum) in ids.iter().zip(&sums) {
        let image = cluster.directory().join(format!("{id}.img"));
        for copy in 0..4 {
            ensure!(
                sha256_of(&image, copy * 4 * MIB, 4 * MIB)? == *sum,
                "{id}, copy {copy}"
            );
        }
    }
    check::open(cluster, &a, "left", 1)?;
    check::open(cluster, &a, "right", 1)?;
    check::open(cluster, &b, "other", 1)?;
    check::no_faults(cluster, &ids)?;

    let listed = cluster.run(&["devices"])?.stdout;
    for (id, vm) in [("left", "VM a"), ("right", "VM a"), ("other", "VM b")] {
        let line = listed.lines().find(|line| line.starts_with(id));
        ensure!(line.is_some_and(|line| line.contains(vm)), "{id}: {listed}");
    }
    a.power_off()?;
    cluster.wait_free("left")?;
    cluster.wait_free("right")?;
    check::io(&b, &other, 24)?;
    b.power_off()?;
    passed()
}

/// The disk at the address that `farside qemu` assigns to device `number`: behind a root
/// port at that function, or on the single bus.
fn disk(guest: &Guest<'_>, slot: u32, number: u32) -> anyhow::Result<String> {
    guest.wait_disk()?;
    let q35 = format!("/sys/bus/pci/devices/0000:00:{slot:02x}.{number}/*:*/nvme");
    let i440fx = format!("/sys/bus/pci/devices/0000:00:{:02x}.0/nvme", slot + number);
    let name = guest.sh(&format!(
        "ls -d {q35}/nvme* {i440fx}/nvme* 2>/dev/null || true"
    ))?;
    let name = name.rsplit('/').next().context("a name")?;
    let path = format!("/dev/{name}n1");
    guest.wait_path(&path, SHORT)?;
    Ok(path)
}

pub fn a_device_that_another_vm_has_is_refused_with_the_name_of_that_vm(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend_a = cluster.serve("first", &["disk0"]).start()?;
    let backend_b = cluster.serve("second", &["disk0"]).start()?;
    let first = cluster.guest("first").paused().start()?;
    cluster.wait_state("first", "disk0", BorrowState::Leased)?;

    let refused = match cluster.guest("second").paused().start() {
        Ok(_) => anyhow::bail!("the second VM started with a device that the first has"),
        Err(error) => format!("{error:#}"),
    };
    ensure!(refused.contains("VM second"), "{refused}");
    backend_b.wait_log("device disk0 is borrowed by VM first (generation ", SHORT)?;
    let status = cluster.status()?;
    let borrow = status.borrow("second", "disk0")?;
    ensure!(
        borrow.state == BorrowState::Unleased && borrow.is_closed(),
        "{borrow:?}"
    );
    ensure!(
        borrow
            .last_error
            .as_deref()
            .is_some_and(|error| error.contains("VM first")),
        "{borrow:?}"
    );
    ensure!(status.lent("disk0")?.borrowed_by.as_deref() == Some("first"));
    // The first borrow was not disturbed.
    check::closed(cluster, "first", "disk0")?;

    first.kill_qemu()?;
    cluster.wait_free("disk0")?;
    let second = cluster.guest("second").boot()?;
    second.wait_disk()?;
    check::open(cluster, &second, "disk0", 1)?;
    check::io(&second, "/dev/nvme0n1", 25)?;
    second.power_off()?;
    passed()
}
