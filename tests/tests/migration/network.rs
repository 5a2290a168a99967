//! A VM whose drive is borrowed over the network, with TLS, from one of the two hosts.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::Vm;
use farside_tests::{BOOT, Daemon, Transfer, noise, sha256, sha256_of};
use libtest_mimic::Completion;
use rustix::process::{Pid, Signal, kill_process};

use crate::stage::{Chain, Stage, VM, shown};

/// The time limit of the guest's driver, in milliseconds, and how long its lender is silent: several times that, and
/// longer than a silent connection counts as one.
const DRIVERS_LIMIT: u32 = 4000;
const SILENCE: Duration = Duration::from_secs(20);

/// Writes to the disk in the background; leaves `/tmp/dd-ended` with dd's exit status.
const WRITE: &str = "(dd if=/dev/zero of=/dev/nvme0n1 bs=4096 seek=8192 count=64 oflag=direct 2>/tmp/dd; \
     echo $? >/tmp/dd-ended) >/dev/null 2>&1 &";

/// Longest time for which no host may run a VM that moves cold, in seconds. On an idle machine it takes some tenths of
/// a second; this is for a machine that runs other tests, too.
const OFF: f64 = 5.0;

/// Starts a lender on host `b`, from which the VM borrows, with more lines in its configuration.
fn lend(stage: &Stage, settings: &str) -> Result<Daemon> {
    lend_model(stage, "--nvme", settings)
}

fn lend_model(stage: &Stage, model: &str, settings: &str) -> Result<Daemon> {
    lend_with(stage, &[model], settings)
}

/// As [`lend`]: the model of the disk, and more arguments.
fn lend_with(stage: &Stage, args: &[&str], settings: &str) -> Result<Daemon> {
    let (model, more) = args.split_first().context("no model")?;
    let ca = shown(&stage.path("b", "ca"));
    stage.ok("b", &["pki", "init", "--directory", &ca])?;
    for (host, address) in [("a", "10.99.0.1"), ("b", "10.99.0.2")] {
        let to = shown(&stage.path(host, "etc/pki"));
        let issue = ["pki", "issue", host, "--directory", &ca, "--output", &to];
        stage.ok("b", &[&issue[..], &["--address", address]].concat())?;
    }
    let image = stage.path("b", "disk0.img");
    fs::File::create(&image)?.set_len(64 << 20)?;
    let drive = format!("disk0={}", shown(&image));
    let address = "tls:10.99.0.2:7410";
    let mut lend = vec![
        "lend", "--name", "rack1", model, &drive, "--listen", address,
    ];
    lend.extend(["--borrower", "host=a", "--borrower", "host=b"]);
    lend.extend(more);
    let lender = Daemon::start("the lender", stage.command("b", &lend)?)?;
    lender.wait_log(address, crate::SHORT)?;
    let text = stage.description()?;
    let third = shown(&stage.lender_socket());
    stage.describe(&format!("{settings}{}", text.replace(&third, address)))?;
    Ok(lender)
}

/// Moves the VM cold; returns how long it was off.
fn move_cold(stage: &Stage, from: &str, to: &str) -> Result<f64> {
    let said = stage.ok(from, &["migrate", VM, "--to", to])?;
    let off = said.split_once("it was off for ");
    let off = off.and_then(|(_, rest)| rest.split_once(" s ")?.0.parse().ok());
    let off = off.with_context(|| format!("how long was it off? {said}"))?;
    log::info!("{VM} was off for {off} s from {from} to {to}");
    Ok(off)
}

/// 4 GiB of its RAM are pinned for the disk.
pub fn a_drive_moves_with_its_large_vm(stage: &Stage) -> Result<Completion> {
    let lender = lend(stage, "")?;
    let small = fs::read_to_string(stage.path("a", &format!("etc/vm/{VM}.toml")))?;
    let large = small.replace("memory = \"384M\"", "memory = \"4G\"");
    ensure!(large != small, "the VM's RAM is another: {small}");
    stage.describe(&large)?;
    stage.ok("a", &["start", VM])?;
    let mut chain = Chain::default();
    // QEMU is killed when this is dropped.
    let mut guest = stage.guest()?;
    chain.grow(&guest)?;
    lender.wait_log("lent over the network", crate::SHORT)?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        let off = move_cold(stage, from, to)?;
        ensure!(off < OFF, "off for {off} s from {from} to {to}");
        guest = stage.guest()?;
        chain.verify(&guest)?;
        chain.grow(&guest)?;
    }
    ensure!(stage.running()? == ["a"], "{:?}", stage.running());
    stage.refused("b", &["start", VM], &["has moved to"])?;
    Ok(Completion::Completed)
}

/// Its driver resets the controller meanwhile, which needs no lender.
pub fn a_guest_outlasts_a_cut_longer_than_its_drivers_limit(stage: &Stage) -> Result<Completion> {
    let _lender = lend(stage, "")?;
    stage.ok("a", &["start", VM])?;
    let mut chain = Chain::default();
    let guest = stage.guest()?;
    chain.grow(&guest)?;
    let limit = format!("echo {DRIVERS_LIMIT} >/sys/block/nvme0n1/queue/io_timeout");
    guest.exec_ok(&limit, crate::SHORT)?;
    write_over_a_silence(stage, &guest, WRITE)?;
    let ended = guest.exec_ok("cat /tmp/dd-ended /tmp/dd; dmesg | grep nvme", crate::SHORT)?;
    ensure!(ended.starts_with("0\n"), "{ended}");
    ensure!(
        ended.contains("reset controller"),
        "the driver has not reset: {ended}"
    );
    chain.verify(&guest)?;
    Ok(Completion::Completed)
}

/// Writes to the disk while all of its lender is stopped, and after it.
fn write_over_a_silence(stage: &Stage, guest: &Vm, write: &str) -> Result<()> {
    let signal = |signal| -> Result<()> {
        for pid in stage.processes("b", &["farside"])? {
            let pid = Pid::from_raw(pid).context("a process id")?;
            kill_process(pid, signal)?;
        }
        Ok(())
    };
    signal(Signal::STOP)?;
    guest.exec_ok(write, crate::SHORT)?;
    std::thread::sleep(SILENCE);
    let waits = guest.exec_ok("ls /tmp/dd-ended || echo waits", crate::SHORT)?;
    ensure!(waits.contains("waits"), "I/O without a lender: {waits}");
    signal(Signal::CONT)?;
    guest.wait_path("/tmp/dd-ended", crate::SHORT)
}

/// Its driver has no time limit: I/O waits.
pub fn a_virtio_blk_disk_waits_for_its_lender(stage: &Stage) -> Result<Completion> {
    let _lender = lend_model(stage, "--virtio-blk", "")?;
    stage.ok("a", &["start", VM])?;
    let guest = stage.adopt(BOOT)?;
    guest.wait_agent(BOOT)?;
    guest.exec_ok("modprobe virtio_blk", crate::SHORT)?;
    guest.wait_path("/dev/vda", crate::SHORT)?;
    guest.exec_ok(
        "head -c 262144 /dev/urandom >/tmp/data; cat /tmp/data /tmp/data >/dev/vda; sync",
        crate::SHORT,
    )?;
    let write = "(dd if=/tmp/data of=/dev/vda bs=4096 seek=8192 oflag=direct conv=fsync 2>/tmp/dd; \
         echo $? >/tmp/dd-ended) >/dev/null 2>&1 &";
    write_over_a_silence(stage, &guest, write)?;
    let ended = guest.exec_ok("cat /tmp/dd-ended /tmp/dd", crate::SHORT)?;
    ensure!(ended.starts_with("0\n"), "{ended}");
    guest.exec_ok(
        "echo 3 >/proc/sys/vm/drop_caches
         for at in 0 64 8192; do
             dd if=/dev/vda bs=4096 skip=$at count=64 iflag=direct | cmp - /tmp/data || exit 1
         done",
        crate::SHORT,
    )?;
    let sum = guest.exec_ok("sha256sum /tmp/data", crate::SHORT)?;
    let there = sha256_of(&stage.path("b", "disk0.img"), 32 << 20, 256 << 10)?;
    ensure!(
        sum.starts_with(&there),
        "{there} is in the image, not {sum}"
    );
    Ok(Completion::Completed)
}

/// After `lost-after`: I/O ends with an error, and the device is removed as hot-unplug does.
pub fn a_guest_loses_a_drive_that_stays_out_of_reach_and_lives_on(
    stage: &Stage,
) -> Result<Completion> {
    let mut lender = lend(stage, "lost-after = 5\n")?;
    stage.ok("a", &["start", VM])?;
    let guest = stage.guest()?;
    Chain::default().grow(&guest)?;
    lender.kill()?;
    // Its worker may serve some I/O until it has noticed.
    let deadline = Instant::now() + crate::SHORT;
    while !stage.run("a", &["status"])?.stdout.contains("I/O waits") {
        ensure!(Instant::now() < deadline, "the device still has a lender");
    }
    guest.exec_ok(WRITE, crate::SHORT)?;
    guest.wait_path("/tmp/dd-ended", crate::SHORT)?;
    let ended = guest.exec_ok("cat /tmp/dd-ended /tmp/dd", crate::SHORT)?;
    ensure!(!ended.starts_with("0\n"), "dd without a lender: {ended}");
    let gone = "for i in $(seq 600); do
            grep -q 0x010802 /sys/bus/pci/devices/*/class || [ -e /dev/nvme0n1 ] || exit 0
            sleep 0.1
        done
        dmesg | tail -n 30; exit 1";
    guest.exec_ok(gone, crate::SHORT)?;
    ensure!(stage.running()? == ["a"], "{:?}", stage.running());
    // The backend's helper, which has asked the guest, has the VM's lock until QEMU has removed the device, too.
    stage.ok("a", &["stop", VM])?;
    Ok(Completion::Completed)
}

/// A tap interface of host `b` is the VM's network device, on whichever host it runs.
pub fn a_network_device_waits_for_its_lender_and_moves_with_its_vm(
    stage: &Stage,
) -> Result<Completion> {
    for line in [
        "tuntap add tap0 mode tap",
        "address add 10.98.0.1/24 dev tap0",
        "link set tap0 up",
    ] {
        stage.ip("b", line)?;
    }
    let lender = lend_with(stage, &["--nvme", "--virtio-net", "nic0=tap0"], "")?;
    let text = fs::read_to_string(stage.path("a", &format!("etc/vm/{VM}.toml")))?;
    let drive = "{ id = \"disk0\", port = 1 }";
    let both = text.replace(drive, &format!("{drive}, {{ id = \"nic0\", port = 2 }}"));
    ensure!(both != text, "the VM's devices are others: {text}");
    stage.describe(&both)?;
    stage.ok("a", &["start", VM])?;
    let mut guest = stage.guest()?;
    lender.wait_log("device nic0: lent over the network", crate::SHORT)?;
    let up = "modprobe virtio_net
        ip address add 10.98.0.2/24 dev eth0; ip link set eth0 up
        ping -c 1 -W 30 10.98.0.1";
    guest.exec_ok(up, crate::SHORT)?;
    // Larger than a buffer of the driver; not than the MTU.
    let ping = "ping -c 3 -s 1400 -W 30 10.98.0.1";
    guest.exec_ok(ping, crate::SHORT)?;
    fetch(stage, &guest)?;
    let silent = "(ping -c 1 -W 60 10.98.0.1; echo $? >/tmp/ping-ended) >/tmp/ping 2>&1 &";
    write_over_a_silence(stage, &guest, &silent.replace("ping-ended", "dd-ended"))?;
    let ended = guest.exec_ok("cat /tmp/dd-ended /tmp/ping", crate::SHORT)?;
    ensure!(ended.starts_with("0\n"), "{ended}");
    for (from, to) in [("a", "b"), ("b", "a")] {
        move_cold(stage, from, to)?;
        guest = stage.guest()?;
        guest.exec_ok(up, crate::SHORT)?;
        fetch(stage, &guest)?;
    }
    Ok(Completion::Completed)
}

/// The guest fetches data from the network behind its device.
fn fetch(stage: &Stage, guest: &Vm) -> Result<()> {
    let listener = stage.listen("b", "10.98.0.1")?;
    let port = listener.local_addr()?.port();
    let sender = Transfer::send(listener, noise(port.into(), 8 << 20));
    let fetch = format!("nc 10.98.0.1 {port} </dev/null | sha256sum");
    let fetched = guest.exec_ok(&fetch, BOOT)?;
    let sent = sha256(&sender.wait()?);
    ensure!(fetched.starts_with(&sent), "{fetched} is not {sent}");
    Ok(())
}
