//! SPDK. Debian has no package of it: the tests run where `FARSIDE_SPDK` names the directory of its build (`nvmf_tgt` is in
//! `build/bin`), configured with `--with-vfio-user`.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::die_with_us;
use farside_tests::{BOOT, BorrowState, Cluster, Daemon, MIB};
use libtest_mimic::{Completion, Failed};
use serde_json::{Value, json};

use super::{kill_worker, run_with, used_by_two_vms};

const BUILD: &str = "FARSIDE_SPDK";

/// Its start takes as long as its memory takes to be cleared.
const START: Duration = Duration::from_secs(60);

fn run(test: fn(&Cluster, &Path) -> Result<()>) -> Result<Completion, Failed> {
    let what = "the directory of a build of SPDK with vfio-user";
    run_with(BUILD, what, test)
}

/// A controller of its target is lent to guests.
pub fn a_controller_of_spdk_is_lent() -> Result<Completion, Failed> {
    run(lend)
}

/// Its driver uses a model without a VM: `identify`, and `perf` with reads and writes while workers are killed.
pub fn spdks_driver_uses_a_model() -> Result<Completion, Failed> {
    run(drive)
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

fn lend(cluster: &Cluster, build: &Path) -> Result<()> {
    let socket = cluster.directory().join("spdk/cntrl");
    let mut server = target(cluster, build, &socket)?;
    let used = used_by_two_vms(cluster, &socket, "SPDK", &mut server, |_| Ok(()));
    used.with_context(|| format!("nvmf_tgt: {}", server.log()))
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

fn drive(cluster: &Cluster, build: &Path) -> Result<()> {
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
        kill_worker(cluster, &lender, kill)?;
    }
    let deadline = Instant::now() + BOOT;
    while !perf.is_finished() {
        ensure!(Instant::now() < deadline, "spdk_nvme_perf hangs");
        std::thread::sleep(Duration::from_millis(100));
    }
    let output = perf.join().map_err(|_| anyhow::anyhow!("a panic"))??;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let is_ok = output.status.success() && said.contains("Total") && !said.contains("rror");
    ensure!(is_ok, "{said}");
    Ok(())
}

/// Pages of 2 MiB that the compliance tests need, which have no option to do without.
const HUGE_PAGES: u64 = 160;

pub fn spdks_compliance_tests_miss_optional_features_only() -> Result<Completion, Failed> {
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
