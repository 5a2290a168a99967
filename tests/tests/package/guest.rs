//! A guest whose backend and QEMU are units: the effects of hardening show only when a
//! device is really used.

use anyhow::{Context, Result, ensure};

use crate::machine::Machine;

const QEMU: &str = "farside-qemu@web1.service";
const TEMPLATE: &str = "farside-qemu@.service";
const UNITS: &str = "/etc/systemd/system";
const DESCRIPTION: &str = "/etc/farside/vm/web1.toml";
const IMAGE: &str = "/var/lib/farside/disk0.img";
/// The output of the guest.
pub const CONSOLE: &str = "/var/lib/farside/web1.console";

/// The control group of the worker of its lease.
const WORKER: &str = "/sys/fs/cgroup/system.slice/farside-lender.service/worker-disk0-*";

/// The guest's script in place of a system: reads a line from the disk, writes one to its
/// second sector, and powers off.
const IN_GUEST: &str = "b=/usr/bin/busybox; $b mount -t proc proc /proc; \
    $b mount -t devtmpfs dev /dev; $b modprobe nvme; n=0; \
    until [ -b /dev/nvme0n1 ] || [ $n = 600 ]; do $b sleep 0.1; n=$((n+1)); done; \
    $b head -n 1 /dev/nvme0n1; \
    echo by-the-guest | $b dd of=/dev/nvme0n1 bs=512 seek=1 conv=sync,fsync; $b poweroff -f";

/// A nested guest boots, with a real kernel and its NVMe driver.
pub fn uses_the_drive(machine: &Machine) -> Result<()> {
    describe(machine)?;
    runs(machine)
}

/// The guest of the VM configuration runs as a unit, and uses the disk.
pub fn runs(machine: &Machine) -> Result<()> {
    machine.sh(&format!(
        "install -m 644 /usr/share/doc/farside/examples/{TEMPLATE} {UNITS}/
         systemctl daemon-reload
         echo by-the-host | dd of={IMAGE} conv=notrunc status=none"
    ))?;
    // Units, sockets, lender, limits, QEMU: the VM has all it needs.
    machine.sh("farside doctor --timeout 120 web1 2>&1")?;
    // `--wait` would require D-Bus, which is missing.
    let group = machine
        .sh(&format!(
            "systemctl start {QEMU}
             pid=$(systemctl show --value -p MainPID {QEMU})
             until [ -d {WORKER} ]; do kill -0 $pid || exit 1; sleep 0.1; done
             grep -H . {WORKER}/cgroup.procs {WORKER}/pids.max {WORKER}/memory.max {WORKER}/cgroup.controllers
             tail -f --pid=$pid /dev/null"
        ))
        .with_context(|| console(machine))?;
    // The worker of the lease has a control group of its own, with limits, while it runs.
    let limited = [
        "cgroup.procs:",
        "pids.max:256",
        "memory.max:536870912",
        "cpu memory pids",
    ];
    ensure!(limited.iter().all(|part| group.contains(part)), "{group}");
    machine.sh(&format!(
        "n=0; while [ -d {WORKER} ]; do n=$((n + 1)); [ $n -lt 300 ] || exit 1; sleep 0.1; done"
    ))?;
    let said = console(machine);
    let result = machine.show(QEMU, "Result")?;
    ensure!(
        result == "success" && said.contains("by-the-host"),
        "{QEMU}: {result}; {said}"
    );
    let written = machine.sh(&format!(
        "dd if={IMAGE} bs=512 skip=1 count=1 status=none | head -n 1"
    ))?;
    ensure!(written == "by-the-guest\n", "the guest wrote {written:?}");
    machine.sh(&format!("rm {CONSOLE} {UNITS}/{TEMPLATE}"))?;
    Ok(())
}

/// Adds QEMU and the guest's kernel to the VM configuration.
fn describe(machine: &Machine) -> Result<()> {
    let accel = if machine.has_kvm()? { "kvm" } else { "tcg" };
    let description = machine.sh(&format!("cat {DESCRIPTION}"))?;
    let small = description
        .replace("memory = \"4 GiB\"", "memory = \"256 MiB\"")
        .replace("cpus = 2", "cpus = 1");
    ensure!(
        small.contains("256 MiB"),
        "the example is another: {description}"
    );
    let text = format!(
        "{small}
qemu = \"{qemu}\"
accel = \"{accel}\"
qemu-args = [
    \"-nodefaults\", \"-no-user-config\", \"-no-reboot\", \"-display\", \"none\",
    \"-cpu\", \"max\",
    \"-kernel\", \"{kernel}\",
    \"-initrd\", \"{initramfs}\",
    \"-append\", 'console=ttyS0 quiet panic=-1 rdinit=/usr/bin/busybox -- sh -c \"{IN_GUEST}\"',
    \"-serial\", \"file:{CONSOLE}\",
]
",
        qemu = "/tools/bin/qemu-system-x86_64",
        kernel = "/tools/boot/vmlinux",
        initramfs = "/tools/boot/nested.cpio",
    );
    machine.write(DESCRIPTION, &text)
}

fn console(machine: &Machine) -> String {
    machine
        .sh(&format!("cat {CONSOLE}"))
        .map(|text| format!("the guest's console:\n{text}"))
        .unwrap_or_else(|error| format!("the guest has no console: {error:#}"))
}
