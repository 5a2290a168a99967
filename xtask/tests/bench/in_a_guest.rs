//! `farside bench run` as a user runs it, in a guest with two disks.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Result, bail, ensure};
use farside_bench::Results;
use farside_tests::{
    BOOT, MIB, SHORT, Vm, farside_program, hosts::stripped, noise, sha256, testbed,
};

use crate::{all_positive, job_names};

/// Timeout of all jobs on both disks, emulated on a loaded machine.
const LONG: Duration = Duration::from_secs(600);
const RUN: &str = "farside bench run --borrowed /dev/nvme0n1 --beside /dev/nvme1n1 \
                   --repeats 1 --seconds 1 --out /run/results.json";

pub(crate) fn run() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let images = ["a", "b"].map(|name| directory.path().join(format!("{name}.img")));
    for image in &images {
        fs::write(image, noise(4, 16 * MIB as usize))?;
    }
    let hash = |image: &PathBuf| -> Result<String> { Ok(sha256(&fs::read(image)?)) };
    let before = hash(&images[0])?;

    let mut builder = testbed()?.vm("user").memory(768 * MIB).file(
        "usr/bin/farside",
        0o755,
        stripped(farside_program()?)?,
    );
    for (index, image) in images.iter().enumerate() {
        builder = builder.args(drive(index, image));
    }
    let vm = builder.launch()?;
    vm.wait_agent(BOOT)?;
    for path in ["/dev/nvme0n1", "/dev/nvme1n1"] {
        vm.wait_path(path, SHORT)?;
    }
    // Linux probes both devices concurrently, and numbers them in order of completion.
    let first = match vm
        .exec_ok("cat /sys/block/nvme0n1/device/serial", SHORT)?
        .trim()
    {
        "d0" => &images[0],
        "d1" => &images[1],
        other => bail!("the first drive is {other:?}"),
    };

    // Read-only jobs change nothing, and the output states that.
    let printed = vm.exec_ok(RUN, LONG)?;
    ensure!(printed.contains("--write"), "{printed}");
    all_positive(&results(&vm)?, &job_names(false), 1, false)?;
    for image in &images {
        ensure!(
            hash(image)? == before,
            "a disk that was only read has changed"
        );
    }

    // A disk in use is not written to, whatever the options.
    vm.exec_ok(
        "mkfs.ext4 -q /dev/nvme1n1 && mkdir /run/mounted && mount -t ext4 /dev/nvme1n1 /run/mounted",
        SHORT,
    )?;
    refused(&vm, &format!("{RUN} --write"), &["/dev/nvme1n1 is mounted"])?;
    vm.exec_ok("umount /run/mounted", SHORT)?;
    refused(
        &vm,
        "farside bench run --borrowed /dev/nvme0n1 --beside /dev/nvme0n1 --write",
        &["the same disk"],
    )?;
    let file = "farside bench run --borrowed /dev/nvme0n1 --beside /etc/mke2fs.conf --write";
    refused(&vm, file, &["/etc/mke2fs.conf is not a block device"])?;
    refused(
        &vm,
        &format!("mv /usr/bin/fio /run; {RUN}; code=$?; mv /run/fio /usr/bin; exit $code"),
        &["fio is not installed"],
    )?;
    ensure!(hash(first)? == before, "what was refused has written");

    // All jobs.
    vm.exec_ok(&format!("{RUN} --write"), LONG)?;
    all_positive(&results(&vm)?, &job_names(true), 1, false)?;
    vm.shutdown(SHORT)?;
    ensure!(hash(first)? != before, "the jobs that write wrote nothing");
    Ok(())
}

/// QEMU's own device, on an image of the test.
fn drive(index: usize, image: &Path) -> [String; 4] {
    let image = image.display();
    [
        "-drive".into(),
        format!("if=none,id=d{index},file={image},format=raw"),
        "-device".into(),
        format!("nvme,drive=d{index},serial=d{index}"),
    ]
}

/// The results of the last run in the guest.
fn results(vm: &Vm) -> Result<Results> {
    let json = vm.read_file("/run/results.json")?;
    Ok(Results::parse(&String::from_utf8(json)?)?)
}

fn refused(vm: &Vm, command: &str, says: &[&str]) -> Result<()> {
    let output = vm.exec(command, SHORT)?;
    ensure!(!output.success(), "`{command}` succeeded: {output}");
    for word in says {
        ensure!(output.stderr.contains(word), "no {word:?}: {output}");
    }
    Ok(())
}
