//! `farside start` and `farside stop`.

use std::{
    collections::BTreeSet,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use farside_testbed::{Accel, AgentPort, Guest, TCG_CPU};
use farside_tests::{BOOT, Cluster, MIB, SHORT, Status, noise, sha256, testbed};
use libtest_mimic::Completion;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use crate::{hotplug::done, hotplug_refusals::refused, passed};

const DISK: &str = "/dev/nvme0n1";

pub fn a_vm_is_started_and_stopped_and_started_again(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let agent = AgentPort::listen("web1", cluster.directory())?;
    let _web1 = describe(cluster, &agent, &["disk0"], &[])?;

    let said = done(cluster, &["start", "web1"])?;
    ensure!(said.contains("VM web1 runs (QEMU is process"), "{said}");
    let process = std::fs::read_to_string(format!("/proc/{}/status", qemu_pid(cluster)?))?;
    ensure!(
        process.contains("Seccomp:\t2") && process.contains("NoNewPrivs:\t1"),
        "QEMU is not confined: {process}"
    );
    let guest = boot(&agent)?;
    let sum = write(&guest)?;
    ensure!(cluster.status()?.lent("disk0")?.borrowed_by.as_deref() == Some("web1"));
    let message = refused(cluster, &["start", "web1"])?;
    ensure!(message.contains("VM web1 runs already"), "{message}");

    // An attached device is dropped when the VM stops; a configured and detached one is
    // back at the next start.
    done(cluster, &["attach", "web1", "dma0"])?;
    done(cluster, &["detach", "web1", "disk0", "--limit", "120"])?;

    let said = done(cluster, &["stop", "web1", "--limit", "120"])?;
    ensure!(said.contains("VM web1 is stopped"), "{said}");
    nothing_runs(cluster, "web1")?;
    for device in ["disk0", "dma0"] {
        let lent = cluster.status()?.lent(device)?;
        ensure!(lent.borrowed_by.is_none() && lent.is_closed(), "{lent:?}");
    }
    drop(guest);
    // Stopping a VM that does not run is no error.
    done(cluster, &["stop", "web1"])?;

    done(cluster, &["start", "web1"])?;
    let guest = boot(&agent)?;
    ensure!(read(&guest)?.contains(&sum), "the data is gone");
    // After a guest powers itself off, its backend continues to run.
    let _off = guest.exec_start("sync; echo o > /proc/sysrq-trigger", SHORT)?;
    cluster.wait_free("disk0")?;
    done(cluster, &["detach", "web1", "disk0"])
        .err()
        .context("a VM that has ended has nothing to detach")?;
    done(cluster, &["start", "web1"])?;
    let guest = boot(&agent)?;
    ensure!(read(&guest)?.contains(&sum), "the data is gone");
    done(cluster, &["stop", "web1", "--limit", "120"])?;
    nothing_runs(cluster, "web1")?;
    drop(guest);

    // A guest that is still booting does not handle the ACPI shutdown yet.
    done(cluster, &["start", "web1"])?;
    done(cluster, &["stop", "web1", "--limit", "120"])?;
    nothing_runs(cluster, "web1")?;
    passed()
}

pub fn devices_at_one_port_are_functions_of_one_device(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let drives = ["disk0", "disk1"].map(|id| {
        let image = cluster.image(id, 64 * MIB)?;
        anyhow::Ok(format!("{id}={}", image.display()))
    });
    let [first, second] = drives;
    let _lender = cluster.lend(&["--nvme", &first?, "--nvme", &second?])?;
    let agent = AgentPort::listen("web1", cluster.directory())?;
    let devices = r#"[{ id = "disk0", port = 1 }, { id = "disk1", port = 1, function = 1 }]"#;
    let _web1 = describe_with(cluster, &agent, devices, &[])?;
    done(cluster, &["start", "web1"])?;
    let guest = boot(&agent)?;
    guest.wait_path("/dev/nvme1n1", SHORT)?;
    let places = guest.exec_ok(
        "for disk in nvme0 nvme1; do basename $(readlink -f /sys/class/nvme/$disk/device); done",
        SHORT,
    )?;
    let places: BTreeSet<_> = places
        .lines()
        .map(|place| place.rsplit(':').next())
        .collect();
    ensure!(places == [Some("00.0"), Some("00.1")].into(), "{places:?}");
    let both = "for disk in nvme0n1 nvme1n1; do
        dd if=/dev/zero of=/dev/$disk bs=64k count=16 oflag=direct 2>/dev/null || exit 1
    done";
    guest.exec_ok(both, SHORT)?;
    // A guest is asked for a slot.
    for (device, other) in [("disk0", "disk1"), ("disk1", "disk0")] {
        let message = refused(cluster, &["detach", "web1", device])?;
        let words = format!("device {device} is one function of a device of VM web1, with {other}");
        ensure!(message.contains(&words), "{message}");
    }
    guest.exec_ok(both, SHORT)?;
    done(cluster, &["stop", "web1", "--limit", "120"])?;
    nothing_runs(cluster, "web1")?;
    passed()
}

pub fn what_was_killed_is_started_again(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let agent = AgentPort::listen("web1", cluster.directory())?;
    let _web1 = describe(cluster, &agent, &["disk0"], &[])?;
    start_lax(cluster)?;
    let guest = boot(&agent)?;
    let sum = write(&guest)?;
    // Write permission on a socket is permission to connect.
    for name in ["qmp", "control", "status", "disk0.sock"] {
        let path = cluster.directory().join("vm/web1").join(name);
        let mode = std::fs::symlink_metadata(&path)?.permissions().mode();
        ensure!(mode & 0o022 == 0, "{}: {mode:o}", path.display());
    }

    // QEMU is killed: the backend continues, and the next QEMU finds the device.
    kill(qemu_pid(cluster)?)?;
    drop(guest);
    cluster.wait_free("disk0")?;
    done(cluster, &["start", "web1"])?;
    let guest = boot(&agent)?;
    ensure!(read(&guest)?.contains(&sum), "the data is gone");

    // The backend is killed: its keeper starts it again, and the guest goes on.
    kill(backend_pid(cluster)?)?;
    wait_for_restart(cluster)?;
    ensure!(read(&guest)?.contains(&sum), "the data is gone");

    // So is its keeper: QEMU continues without the device, until it is stopped.
    farside_keeper::end(&cluster.directory().join("keepers/web1"))?;
    cluster.wait_free("disk0")?;
    let message = refused(cluster, &["start", "web1"])?;
    ensure!(message.contains("VM web1 runs already"), "{message}");
    done(cluster, &["stop", "web1", "--limit", "0", "--force"])?;
    drop(guest);
    done(cluster, &["start", "web1"])?;
    let guest = boot(&agent)?;
    ensure!(read(&guest)?.contains(&sum), "the data is gone");
    drop(guest);
    done(cluster, &["stop", "web1", "--limit", "0", "--force"])?;
    nothing_runs(cluster, "web1")?;
    passed()
}

/// `farside start` with a umask that lets all users write.
fn start_lax(cluster: &Cluster) -> anyhow::Result<()> {
    let start = cluster.farside(&["start", "web1"])?;
    let mut lax = Command::new("sh");
    lax.args(["-c", "umask 000; exec \"$0\" \"$@\""])
        .arg(start.get_program())
        .args(start.get_args());
    for (name, value) in start.get_envs() {
        lax.env(name, value.context("a value")?);
    }
    let output = lax.output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(())
}

/// SIGKILL; waits for the end.
fn kill(pid: i32) -> anyhow::Result<()> {
    let pid = Pid::from_raw(pid).context("no process")?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    pidfd_send_signal(&process, Signal::KILL)?;
    let limit = Timespec::try_from(SHORT)?;
    let ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit))?;
    ensure!(ended == 1, "process {pid:?} does not end");
    Ok(())
}

fn qemu_pid(cluster: &Cluster) -> anyhow::Result<i32> {
    let path = cluster.directory().join("vm/web1/qemu.pid");
    Ok(std::fs::read_to_string(path)?.trim().parse()?)
}

fn backend_pid(cluster: &Cluster) -> anyhow::Result<i32> {
    let status = cluster.status()?;
    let backend = status.0.backends.first().context("no backend")?;
    Ok(backend.pid.try_into()?)
}

/// Waits until the VM's backend was started again, once.
fn wait_for_restart(cluster: &Cluster) -> anyhow::Result<()> {
    let deadline = Instant::now() + SHORT;
    // Until it has its sockets, there is no status of it.
    let restarts = || cluster.status().ok()?.0.backends.first()?.restarts;
    while restarts() != Some(1) {
        ensure!(Instant::now() < deadline, "no other backend");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

pub fn a_start_that_fails_leaves_nothing_behind(cluster: &Cluster) -> anyhow::Result<Completion> {
    let agent = AgentPort::listen("web1", cluster.directory())?;
    let failed = |words: &[&str]| -> anyhow::Result<()> {
        let message = refused(cluster, &["start", "web1"])?;
        for word in words {
            ensure!(message.contains(word), "no {word:?} in: {message}");
        }
        nothing_runs(cluster, "web1")
    };
    failed(&["VM web1 has no configuration"])?;
    let _web1 = describe(cluster, &agent, &["disk0"], &[])?;
    failed(&[
        "the backend of VM web1 does not start",
        "cannot reach the lender",
    ])?;
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _web1 = describe(cluster, &agent, &["disk7"], &[])?;
    failed(&["the backend of VM web1", "no lender has device \"disk7\""])?;
    let _web1 = describe(cluster, &agent, &["disk0"], &["-device", "no-such-thing"])?;
    failed(&["QEMU of VM web1 does not start", "no-such-thing"])?;
    ensure!(cluster.status()?.lent("disk0")?.borrowed_by.is_none());

    // A backend that ran before the start is not stopped.
    let backend = cluster.serve("web1", &["disk0"]).start()?;
    let message = refused(cluster, &["start", "web1"])?;
    ensure!(message.contains("no-such-thing"), "{message}");
    cluster.status()?.borrow("web1", "disk0")?;
    backend.terminate()?;
    passed()
}

pub fn a_guest_that_does_not_power_off_is_ended_by_force_only(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let agent = AgentPort::listen("web1", cluster.directory())?;
    // Its CPUs are stopped.
    let _web1 = describe(cluster, &agent, &["disk0"], &["-S"])?;
    let said = done(cluster, &["start", "web1"])?;
    ensure!(said.contains("is started (prelaunch)"), "{said}");
    let message = refused(cluster, &["stop", "web1", "--limit", "1"])?;
    ensure!(
        message.contains("the guest of VM web1 has not powered off within 1s")
            && message.contains("--force"),
        "{message}"
    );
    ensure!(cluster.status()?.lent("disk0")?.borrowed_by.as_deref() == Some("web1"));
    done(cluster, &["stop", "web1", "--limit", "0", "--force"])?;
    nothing_runs(cluster, "web1")?;
    ensure!(cluster.status()?.lent("disk0")?.borrowed_by.is_none());
    passed()
}

/// VM web1. `farside start` lets it outlive the test, so it is ended with this.
struct Described<'a>(&'a Cluster);

impl Drop for Described<'_> {
    fn drop(&mut self) {
        // If the test has passed, it does not run any more.
        if let Err(error) = done(self.0, &["stop", "web1", "--limit", "0", "--force"]) {
            eprintln!("VM web1 may still run: {error:#}");
        }
    }
}

fn describe<'a>(
    cluster: &'a Cluster,
    agent: &AgentPort,
    devices: &[&str],
    more: &[&str],
) -> anyhow::Result<Described<'a>> {
    describe_with(cluster, agent, &format!("{devices:?}"), more)
}

/// As [`describe`], with `devices` as the file has them.
fn describe_with<'a>(
    cluster: &'a Cluster,
    agent: &AgentPort,
    devices: &str,
    more: &[&str],
) -> anyhow::Result<Described<'a>> {
    let testbed = testbed()?;
    let tcg = testbed.accel() == Accel::Tcg;
    let text = |path: &Path| path.display().to_string();
    let mut args: Vec<String> = [
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-chardev",
        &format!("file,id=console,path={}", text(agent.console())),
        "-serial",
        "chardev:console",
        "-chardev",
        &format!("socket,id=agent,path={}", text(agent.socket())),
        "-device",
        "virtio-serial-pci,id=serial",
        "-device",
        &format!(
            "virtserialport,bus=serial.0,chardev=agent,name={}",
            AgentPort::NAME
        ),
        "-kernel",
        &text(testbed.elf_kernel()),
        "-initrd",
        &text(testbed.lean_initramfs()),
        "-append",
        &testbed.kernel_args(),
    ]
    .map(str::to_owned)
    .into();
    if tcg {
        args.extend(["-cpu", TCG_CPU].map(str::to_owned));
    }
    args.extend(more.iter().map(|&arg| arg.to_owned()));
    let accel = if tcg { "tcg" } else { "kvm" };
    let description = format!(
        "devices = {devices}\nmemory = \"512M\"\naccel = {accel:?}\nqemu = {:?}\nqemu-args = {args:?}\n",
        text(testbed.qemu()),
    );
    cluster.describe("web1", &description)?;
    Ok(Described(cluster))
}

fn boot(agent: &AgentPort) -> anyhow::Result<Guest> {
    let guest = agent.accept(BOOT)?;
    guest.wait_agent(BOOT)?;
    guest.wait_path(DISK, SHORT)?;
    Ok(guest)
}

/// Writes to the disk. Returns the checksum of the data.
fn write(guest: &Guest) -> anyhow::Result<String> {
    let data = noise(400, MIB as usize);
    guest.write_file("/tmp/io", &data)?;
    guest.exec_ok(
        &format!("dd if=/tmp/io of={DISK} bs=256k oflag=direct"),
        SHORT,
    )?;
    Ok(sha256(&data))
}

fn read(guest: &Guest) -> anyhow::Result<String> {
    let command = format!("dd if={DISK} bs=256k count=4 iflag=direct | sha256sum");
    guest.exec_ok(&command, SHORT)
}

/// Neither QEMU nor a backend of the VM runs.
fn nothing_runs(cluster: &Cluster, vm: &str) -> anyhow::Result<()> {
    let directory = cluster.directory().join("vm").join(vm);
    ensure!(!directory.join("control").exists(), "a backend is there");
    let pid = std::fs::read_to_string(directory.join("qemu.pid")).unwrap_or_default();
    let alive = !pid.trim().is_empty() && Path::new("/proc").join(pid.trim()).exists();
    ensure!(!alive, "QEMU is process {pid}");
    // Without a lender it fails, but prints nevertheless.
    let ended = cluster.run(&["status", "--json"])?;
    ensure!(Status::from_json(&ended.stdout)?.0.backend(vm).is_none());
    Ok(())
}
