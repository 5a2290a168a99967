//! Other vfio-user servers and clients than farside's, where they have been built: SPDK, and QEMU as a server.

mod qemu;
mod spdk;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use farside_tests::{
    BOOT, BorrowState, Cluster, Daemon, Guest, MIB, SHORT, Weight, Width, noise, sha256, told,
    trial,
};
use libtest_mimic::{Arguments, Completion, Failed};
use rustix::process::{Signal, kill_process};

const DISK: &str = "/dev/nvme0n1";

fn main() {
    env_logger::init();
    let guests = Weight::Guests;
    let trials = vec![
        trial(
            "a_controller_of_spdk_is_lent",
            guests,
            spdk::a_controller_of_spdk_is_lent,
        ),
        trial(
            "spdks_driver_uses_a_model",
            guests,
            spdk::spdks_driver_uses_a_model,
        ),
        trial(
            "spdks_compliance_tests_miss_optional_features_only",
            guests,
            spdk::spdks_compliance_tests_miss_optional_features_only,
        ),
        trial(
            "a_controller_of_another_qemu_is_lent",
            guests,
            qemu::a_controller_of_another_qemu_is_lent,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Runs a test with what the environment variable names.
fn run_with(
    variable: &str,
    what: &str,
    test: fn(&Cluster, &Path) -> Result<()>,
) -> Result<Completion, Failed> {
    let Some(path) = std::env::var_os(variable) else {
        return Ok(Completion::ignored_with(format!(
            "{variable} does not name {what}"
        )));
    };
    let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
    told(|| test(&cluster, Path::new(&path)), || cluster.story())?;
    Ok(Completion::Completed)
}

/// Kills the only worker, and waits until another one goes on, which is the one after so many kills.
fn kill_worker(cluster: &Cluster, lender: &Daemon, kills: u64) -> Result<()> {
    let workers = lender.workers();
    let [worker] = workers[..] else {
        anyhow::bail!("{} workers", workers.len());
    };
    kill_process(worker, Signal::KILL)?;
    cluster.wait_status("another worker", SHORT, |status| {
        let connection = status.borrow("a", "disk0")?.connection;
        Ok(connection.filter(|it| it.restarts == kills))
    })?;
    Ok(())
}

/// A controller at this socket, whose model's name begins so, is used by a VM, and by another one after it; between them
/// `between` is done to the server.
fn used_by_two_vms(
    cluster: &Cluster,
    socket: &Path,
    name: &str,
    server: &mut Daemon,
    between: impl FnOnce(&mut Daemon) -> Result<()>,
) -> Result<()> {
    let argument = format!("disk0={}", socket.display());
    let lender = cluster.lend(&["--vfio-user", &argument])?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").whole().cpus(2).boot()?;
    guest.wait_disk()?;
    let model = guest.sh("cat /sys/class/nvme/nvme0/model")?;
    ensure!(model.starts_with(name), "{model}");
    cluster.wait_state("a", "disk0", BorrowState::Ready)?;
    write_and_read(&guest, 1)?;
    verify(&guest, "--loops=1")?;

    // Its driver resets the controller, and the guest reboots.
    guest.sh("nvme reset /dev/nvme0")?;
    guest.wait_disk()?;
    write_and_read(&guest, 2)?;
    guest.reboot(BOOT)?;
    guest.wait_disk()?;
    write_and_read(&guest, 3)?;

    // The server goes on with the VM's memory and eventfds, whoever has handed them over.
    let load = guest.exec_start(&fio("--time_based --runtime=10"), BOOT)?;
    for kill in 1..=3 {
        std::thread::sleep(Duration::from_secs(2));
        kill_worker(cluster, &lender, kill)?;
    }
    let output = load.wait()?;
    ensure!(output.success(), "{output}");

    // The next VM finds a controller that was reset.
    guest.power_off()?;
    cluster.wait_free("disk0")?;
    between(server)?;
    let _other = cluster.serve("b", &["disk0"]).start()?;
    let guest = cluster.guest("b").whole().boot()?;
    guest.wait_disk()?;
    write_and_read(&guest, 4)?;

    // Without its server the device is gone: its registers read as all ones.
    let bdf = guest.sh("basename $(readlink -f /sys/class/nvme/nvme0/device)")?;
    server.kill()?;
    let deadline = Instant::now() + SHORT;
    while guest.config_read(&bdf, 0, Width::U16)? != 0xffff {
        ensure!(Instant::now() < deadline, "{}", lender.log());
        // No event comes to the test.
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn write_and_read(guest: &Guest<'_>, seed: u64) -> Result<()> {
    let data = noise(seed, 2 * MIB as usize);
    guest.write_file("/tmp/io", &data)?;
    guest.sh(&format!("dd if=/tmp/io of={DISK} bs=128k oflag=direct"))?;
    let back = guest.sh(&format!(
        "dd if={DISK} bs=128k count=16 iflag=direct | sha256sum"
    ))?;
    ensure!(back.contains(&sha256(&data)), "read back: {back}");
    Ok(())
}

fn fio(job: &str) -> String {
    format!(
        "fio --output-format=terse --name=verify --filename={DISK} --rw=randwrite --bsrange=4k-64k --size=16M \
         --direct=1 --ioengine=libaio --iodepth=8 --verify=crc32c --verify_fatal=1 --verify_backlog=64 {job}"
    )
}

fn verify(guest: &Guest<'_>, job: &str) -> Result<()> {
    guest.sh_within(&fio(job), BOOT)?;
    Ok(())
}
