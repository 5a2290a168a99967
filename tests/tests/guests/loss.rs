//! One of the processes is killed, or stopped, under a running guest.

use anyhow::ensure;
use farside_tests::{BOOT, BorrowState, Cluster, DmaTester, MIB, SHORT};
use libtest_mimic::Completion;

use crate::{check, passed};

const DISK: &str = "/dev/nvme0n1";
/// Keeps an NVMe disk busy until I/O fails or the guest ends.
const BUSY: &str = "while dd if=/dev/nvme0n1 of=/dev/null bs=4k count=256 iflag=direct; do :; done";

pub fn a_killed_qemu_gives_its_device_back_and_its_neighbour_goes_on(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let mut args = Vec::new();
    for id in ["disk0", "disk1"] {
        let image = cluster.image(id, 64 * MIB)?;
        args.extend(["--nvme".to_owned(), format!("{id}={}", image.display())]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let _lender = cluster.lend(&args)?;
    let mut backend_a = cluster.serve("a", &["disk0"]).start()?;
    let _backend_b = cluster.serve("b", &["disk1"]).start()?;
    let a = cluster.guest("a").boot()?;
    let b = cluster.guest("b").whole().boot()?;
    a.wait_disk()?;
    b.wait_disk()?;
    let first = check::open(cluster, &a, "disk0", 1)?;
    let busy_a = a.exec_start(BUSY, BOOT)?;
    let verify = format!(
        "fio --name=verify --filename={DISK} --rw=randwrite --bs=4k --size=16M --direct=1 \
         --ioengine=libaio --iodepth=8 --verify=crc32c --verify_fatal=1 --output-format=terse"
    );
    let busy_b = b.exec_start(&verify, BOOT)?;
    wait_for_io(cluster, "disk0")?;
    wait_for_io(cluster, "disk1")?;
    // The guest's end ends the command; its result is of no interest.
    drop(busy_a);
    a.kill_qemu()?;
    let lent = cluster.wait_free("disk0")?;
    ensure!(lent.fault_total == 0, "{lent:?}");
    let returned = cluster.wait_state("a", "disk0", BorrowState::Unleased)?;
    ensure!(returned.is_closed(), "{returned:?}");
    ensure!(backend_a.is_running()?, "the backend lives on");

    let output = busy_b.wait()?;
    ensure!(output.success(), "the neighbour: {output}");
    check::open(cluster, &b, "disk1", 1)?;

    let _again = cluster.guest("a").paused().start()?;
    let again = check::closed(cluster, "a", "disk0")?;
    ensure!(
        again.generation > first.generation,
        "{first:?}, then {again:?}"
    );
    passed()
}

pub fn a_killed_backend_gives_its_device_back(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (mut lender, _image) = cluster.lend_disk(64 * MIB)?;
    let mut backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    let first = check::open(cluster, &guest, "disk0", 1)?;
    let busy = guest.exec_start(BUSY, BOOT)?;
    wait_for_io(cluster, "disk0")?;
    backend.kill()?;
    let lent = cluster.wait_free("disk0")?;
    ensure!(lent.fault_total == 0, "{lent:?}");
    lender.wait_log("device disk0: revoked: the backend is gone (VM a", SHORT)?;
    ensure!(lender.is_running()?);
    // QEMU 11.1 may fail an assertion when a server disappears during I/O, so it is not
    // queried here.
    drop(busy);
    drop(guest);

    // The killed backend's sockets are left; the next backend replaces them.
    let left = cluster.sockets()?;
    ensure!(
        left.iter().any(|path| path.ends_with("disk0.sock")),
        "{left:?}"
    );
    let _backend = cluster.serve("a", &["disk0"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    let again = check::open(cluster, &guest, "disk0", 1)?;
    ensure!(
        again.generation > first.generation,
        "{first:?}, then {again:?}"
    );
    check::io(&guest, DISK, 31)?;
    guest.power_off()?;
    passed()
}

pub fn a_killed_lender_leaves_backend_and_vm_alive_until_it_returns(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (mut lender, image) = cluster.lend_disk(64 * MIB)?;
    // Else the disk waits for a lender for longer than a guest does.
    let serve = cluster.serve("a", &["disk0", "dma0"]);
    let mut backend = serve.args(&["--lost-after", "1"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    let first = check::open_with_bars(cluster, &guest, "disk0", 2, 64 << 10)?;
    check::io(&guest, DISK, 32)?;
    let tester = DmaTester::new(&guest)?;
    tester.set_bus_master(true)?;
    check::open(cluster, &guest, "dma0", 1)?;

    lender.kill_all()?;
    for device in ["disk0", "dma0"] {
        let lost = cluster.wait_state("a", device, BorrowState::Lost)?;
        ensure!(lost.is_closed(), "nothing stays pinned: {lost:?}");
    }
    let gone = tester.answer()?;
    ensure!(
        gone == 0xffff_ffff,
        "a register of a lost device reads {gone:#x}"
    );
    // The driver reads its controller's registers, finds the device gone, and fails I/O.
    guest.sh("echo 1 >/sys/class/nvme/nvme0/reset_controller 2>/dev/null || true")?;
    let failed = guest.exec(
        &format!("dd if={DISK} of=/dev/null bs=4k count=1 iflag=direct"),
        BOOT,
    )?;
    ensure!(
        // Or its size is 0 now.
        !failed.timed_out && (!failed.success() || failed.stderr.contains("0+0 records in")),
        "I/O without a lender: {failed}"
    );
    ensure!(backend.is_running()?);
    ensure!(guest.qmp().status()? == "running");

    let drive = format!("disk0={}", image.display());
    let _lender = cluster.lend(&["--nvme", &drive, "--dma-test", "dma0"])?;
    guest.reboot(BOOT)?;
    guest.wait_disk()?;
    let again = check::open_with_bars(cluster, &guest, "disk0", 2, 64 << 10)?;
    ensure!(
        again.generation > first.generation,
        "{first:?}, then {again:?}"
    );
    check::io(&guest, DISK, 33)?;
    let tester = DmaTester::new(&guest)?;
    tester.set_bus_master(true)?;
    check::open(cluster, &guest, "dma0", 1)?;
    guest.power_off()?;
    passed()
}

pub fn a_lender_told_to_stop_takes_all_back(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (mut lender, _image) = cluster.lend_disk(64 * MIB)?;
    let serve = cluster.serve("a", &["disk0"]);
    let mut backend = serve.args(&["--lost-after", "1"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    check::open(cluster, &guest, "disk0", 1)?;
    let busy = guest.exec_start(BUSY, BOOT)?;
    wait_for_io(cluster, "disk0")?;
    lender.terminate()?;
    let status = lender.wait_exit(SHORT)?;
    ensure!(status.success(), "the lender: {status}");
    ensure!(
        lender
            .log()
            .contains("device disk0: kept for its VM: the lender stops (VM a"),
        "{}",
        lender.log()
    );
    let socket = cluster.directory().join("lender.sock");
    ensure!(!socket.exists(), "{} is left", socket.display());
    let lost = cluster.wait_state("a", "disk0", BorrowState::Lost)?;
    ensure!(lost.is_closed(), "{lost:?}");
    ensure!(backend.is_running()?);
    ensure!(guest.qmp().status()? == "running");
    drop(busy);
    passed()
}

pub fn a_backend_told_to_stop_gives_all_back(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (lender, _image) = cluster.lend_disk(64 * MIB)?;
    let mut backend = cluster.serve("a", &["disk0", "dma0"]).start()?;
    let guest = cluster.guest("a").boot()?;
    guest.wait_disk()?;
    check::open_with_bars(cluster, &guest, "disk0", 2, 64 << 10)?;
    let busy = guest.exec_start(BUSY, BOOT)?;
    wait_for_io(cluster, "disk0")?;
    // The guest would lose its disk, so one signal is not enough.
    backend.terminate()?;
    backend.wait_log("not stopping yet: VM a is connected to disk0, dma0", SHORT)?;
    wait_for_io(cluster, "disk0")?;
    backend.terminate()?;
    let status = backend.wait_exit(SHORT)?;
    ensure!(status.success(), "the backend: {status}");
    // Returned, not revoked: a regular shutdown.
    for device in ["disk0", "dma0"] {
        lender.wait_log(&format!("device {device}: returned (VM a"), SHORT)?;
        cluster.wait_free(device)?;
    }
    let left = cluster.sockets()?;
    // QEMU continues to run, and so do its monitor and the lender's keeper.
    let others = ["lender.keeper/socket", "lender.sock", "vm/a/qmp"]
        .map(|name| cluster.directory().join(name));
    ensure!(left == others, "{left:?}");
    drop(busy);
    passed()
}

/// Waits until the guest's I/O has started.
fn wait_for_io(cluster: &Cluster, device: &str) -> anyhow::Result<()> {
    let before = cluster.status()?.lent(device)?.counter("io_commands")?;
    cluster.wait_status("I/O", SHORT, |status| {
        let now = status.lent(device)?.counter("io_commands")?;
        Ok((now > before + 100).then_some(()))
    })
}
