//! With SPDK: a controller of its NVMe-oF target, over vfio-user, is lent to a guest with Linux's driver; and its driver
//! uses a model without a VM. Debian has no package of SPDK: the tests run where `FARSIDE_SPDK` names the directory of its
//! build (`nvmf_tgt` is in `build/bin`), configured with `--with-vfio-user`.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::die_with_us;
use farside_tests::{
    BOOT, BorrowState, Cluster, Daemon, Guest, MIB, SHORT, Weight, Width, noise, sha256, told,
    trial,
};
use libtest_mimic::{Arguments, Completion, Failed};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

const BUILD: &str = "FARSIDE_SPDK";

const DISK: &str = "/dev/nvme0n1";

/// Its start takes as long as its memory takes to be cleared.
const START: Duration = Duration::from_secs(60);

fn main() {
    env_logger::init();
    let trials = vec![
        trial("a_controller_of_spdk_is_lent", Weight::Guests, || {
            run(a_controller_of_spdk_is_lent)
        }),
        trial("spdks_driver_uses_a_model", Weight::Guests, || {
            run(spdks_driver_uses_a_model)
        }),
        trial(
            "spdks_compliance_tests_miss_optional_features_only",
            Weight::Guests,
            compliance,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn run(test: fn(&Cluster, &Path) -> Result<()>) -> Result<Completion, Failed> {
    let Some(build) = std::env::var_os(BUILD) else {
        return Ok(Completion::ignored_with(format!(
            "{BUILD} does not name the directory of a build of SPDK with vfio-user"
        )));
    };
    let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
    told(|| test(&cluster, Path::new(&build)), || cluster.story())?;
    Ok(Completion::Completed)
}

/// What SPDK's target is to have: a disk of 64 MiB, at the socket `cntrl` in `directory`.
fn configuration(directory: &Path) -> Value {
    let nqn = "nqn.2026-11.test:disk";
    let step = |method: &str, params: Value| json!({ "method": method, "params": params });
    let disk = json!({ "name": "memory", "num_blocks": 64 * MIB / 512, "block_size": 512 });
    let listen = json!({ "trtype": "VFIOUSER", "traddr": directory, "trsvcid": "0" });
    json!({ "subsystems": [
        { "subsystem": "bdev", "config": [step("bdev_malloc_create", disk)] },
        { "subsystem": "nvmf", "config": [
            step("nvmf_create_transport", json!({ "trtype": "VFIOUSER" })),
            step("nvmf_create_subsystem", json!({ "nqn": nqn, "allow_any_host": true })),
            step("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": { "bdev_name": "memory" } })),
            step("nvmf_subsystem_add_listener", json!({ "nqn": nqn, "listen_address": listen })),
        ] },
    ] })
}

/// The target, which listens at the socket.
fn target(cluster: &Cluster, build: &Path, socket: &Path) -> Result<Daemon> {
    let directory = socket.parent().context("a directory")?;
    std::fs::create_dir_all(directory)?;
    let text = configuration(directory).to_string();
    let configuration = cluster.file("spdk.json", &text)?;
    let mut command = Command::new(build.join("build/bin/nvmf_tgt"));
    // No device of this machine, and no huge pages of it.
    command.args([
        "--no-pci",
        "--no-huge",
        "--mem-size",
        "1024",
        "--cpumask",
        "0x1",
        // Another process of SPDK may run here.
        "--disable-cpumask-locks",
    ]);
    command.arg("--json").arg(configuration);
    command
        .arg("--rpc-socket")
        .arg(cluster.directory().join("rpc.sock"));
    let mut server = Daemon::start("nvmf_tgt", command)?;
    let deadline = Instant::now() + START;
    while !socket.exists() {
        ensure!(server.is_running()?, "{}", server.log());
        ensure!(Instant::now() < deadline, "{}", server.log());
        // It has no other sign of readiness that is as simple.
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(server)
}

fn a_controller_of_spdk_is_lent(cluster: &Cluster, build: &Path) -> Result<()> {
    let socket = cluster.directory().join("spdk/cntrl");
    let mut server = target(cluster, build, &socket)?;
    let used = used_by_two_vms(cluster, &socket, &mut server);
    used.with_context(|| format!("nvmf_tgt: {}", server.log()))
}

fn used_by_two_vms(cluster: &Cluster, socket: &Path, server: &mut Daemon) -> Result<()> {
    let argument = format!("disk0={}", socket.display());
    let lender = cluster.lend(&["--vfio-user", &argument])?;
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").whole().cpus(2).boot()?;
    guest.wait_disk()?;
    let model = guest.sh("cat /sys/class/nvme/nvme0/model")?;
    ensure!(model.starts_with("SPDK"), "{model}");
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

    // SPDK goes on with the VM's memory and eventfds, whoever has handed them over.
    let load = guest.exec_start(&fio("--time_based --runtime=10"), BOOT)?;
    for kill in 1..=3 {
        std::thread::sleep(Duration::from_secs(2));
        let workers = lender.workers();
        let [worker] = workers[..] else {
            anyhow::bail!("{} workers", workers.len());
        };
        kill_process(worker, Signal::KILL)?;
        cluster.wait_status("another worker", SHORT, |status| {
            let connection = status.borrow("a", "disk0")?.connection;
            Ok(connection.filter(|it| it.restarts == kill))
        })?;
    }
    let output = load.wait()?;
    ensure!(output.success(), "{output}");

    // The next VM finds a controller that was reset.
    guest.power_off()?;
    cluster.wait_free("disk0")?;
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

/// A model for clients of SPDK, and the backend that serves it to them.
fn serve_model(cluster: &Cluster) -> Result<(Daemon, Daemon)> {
    let image = cluster.image("disk0", 64 * MIB)?;
    let disk = format!("disk0={},mapped-doorbells", image.display());
    let lender = cluster.lend(&["--nvme", &disk])?;
    let serve = cluster.serve("a", &["disk0"]);
    let backend = serve.args(&["--keeper", "--layout", "spdk"]).start()?;
    Ok((lender, backend))
}

/// A program of SPDK's build, as a client of the model.
fn client(cluster: &Cluster, build: &Path, program: &str) -> Command {
    let directory = cluster.directory().join("vm/a/disk0.spdk");
    let mut command = Command::new(build.join(program));
    command.arg("-r").arg(format!(
        "trtype:VFIOUSER traddr:{} subnqn:nqn.2014-08.org.nvmexpress:disk0",
        directory.display()
    ));
    command
}

/// `identify`, and `perf` with reads and writes while processes are killed.
fn spdks_driver_uses_a_model(cluster: &Cluster, build: &Path) -> Result<()> {
    let (lender, _keeper) = serve_model(cluster)?;
    let mut identify = client(cluster, build, "build/bin/spdk_nvme_identify");
    let output = identify.args(["--no-huge", "-d", "512"]).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && text.contains("farside NVMe"),
        "{output:?}"
    );

    let mut perf = client(cluster, build, "build/bin/spdk_nvme_perf");
    perf.args(["--no-huge", "-s", "512", "-q", "32", "-o", "4096"]);
    perf.args(["-w", "randrw", "-M", "50", "-t", "12"]);
    die_with_us(&mut perf);
    let perf = std::thread::spawn(move || perf.output());
    cluster.wait_state("a", "disk0", BorrowState::Ready)?;
    for kill in 1..=3 {
        std::thread::sleep(Duration::from_secs(1));
        let workers = lender.workers();
        let [worker] = workers[..] else {
            anyhow::bail!("{} workers", workers.len());
        };
        kill_process(worker, Signal::KILL)?;
        cluster.wait_status("another worker", SHORT, |status| {
            let connection = status.borrow("a", "disk0")?.connection;
            Ok(connection.filter(|it| it.restarts == kill))
        })?;
    }
    let output = perf.join().map_err(|_| anyhow::anyhow!("a panic"))??;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let is_ok = output.status.success() && said.contains("Total") && !said.contains("rror");
    ensure!(is_ok, "{said}");
    Ok(())
}

/// Pages of 2 MiB that the compliance tests need, which have no option to do without.
const HUGE_PAGES: u64 = 160;

fn compliance() -> Result<Completion, Failed> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let free = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("HugePages_Free:"));
    let free = free.map_or(Ok(0), |free| free.trim().parse())?;
    if free < HUGE_PAGES {
        return Ok(Completion::ignored_with(format!(
            "{free} free huge pages: {HUGE_PAGES} are needed"
        )));
    }
    run(comply)
}

fn comply(cluster: &Cluster, build: &Path) -> Result<()> {
    let _model = serve_model(cluster)?;
    let program = "test/nvme/compliance/nvme_compliance";
    let output = client(cluster, build, program).arg("-g").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let of = |word: &str| text.lines().filter(|line| line.ends_with(word)).count();
    let (passed, failed) = (of("passed"), of("FAILED"));
    // Keep Alive and Host Behavior Support are optional (NVM Express 1.4, 5.21.1), and SPDK's own target has them.
    let missing = text.contains("admin_get_features_optional_features ...FAILED");
    ensure!((passed, failed, missing) == (17, 1, true), "{text}");
    Ok(())
}
