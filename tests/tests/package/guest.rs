//! A guest whose backend and QEMU are units: the effects of hardening show only when a
//! device is really used.

use anyhow::{Context, Result, bail, ensure};
use farside_testbed::{NESTED_KVM_CPU, NESTED_KVM_MACHINE};

use crate::{exposure, machine::Machine};

const QEMU: &str = "farside-qemu@web1.service";
const QEMU_SOCKET: &str = "farside-qemu@web1.socket";
const BACKEND_SOCKET: &str = "farside@web1.socket";
const BACKEND: &str = "farside@web1.service";
/// The examples of units.
const TEMPLATES: [&str; 2] = ["farside-qemu@.service", "farside-qemu@.socket"];
const UNITS: &str = "/etc/systemd/system";
const DESCRIPTION: &str = "/etc/farside/vm/web1.toml";
const SAVED: &str = "/tmp/web1.saved.toml";
const IMAGE: &str = "/var/lib/farside/disk0.img";
/// The output of the guest.
const CONSOLE: &str = "/var/lib/farside-qemu/web1/console";

/// The control group of the worker of its lease.
const WORKER: &str = "/sys/fs/cgroup/system.slice/farside-lender.service/worker-disk0-*";

/// The guest's script in place of a system: reads a line from the disk, writes one to its
/// second sector, and powers off.
const IN_GUEST: &str = "b=/usr/bin/busybox; $b mount -t proc proc /proc; \
    $b mount -t devtmpfs dev /dev; $b modprobe nvme; n=0; \
    until [ -b /dev/nvme0n1 ] || [ $n = 600 ]; do $b sleep 0.1; n=$((n+1)); done; \
    $b head -n 1 /dev/nvme0n1; \
    echo by-the-guest | $b dd of=/dev/nvme0n1 bs=512 seek=1 conv=sync,fsync; $b poweroff -f";

/// In place of its end: writes again and again, and prints the longest time between two, in hundredths of a
/// second. The close writes to the disk; the kernel prints errors. Without processes that start and end
/// (see [`NESTED_KVM_CPU`]).
const WRITES: &str = "last=; max=0; while :; do echo x > /dev/nvme0n1; \
    read up idle < /proc/uptime; now=${up%.*}${up#*.}; n=$((now-${last:-$now})); last=$now; \
    if [ $n -gt $max ]; then max=$n; echo longest $n; fi; done";

/// A nested guest boots, with a real kernel and its NVMe driver.
pub fn uses_the_drive(machine: &Machine) -> Result<()> {
    describe(machine)?;
    runs(machine).map(drop)
}

/// The guest of the VM configuration runs as a unit, and uses the disk. Returns its output.
pub fn runs(machine: &Machine) -> Result<String> {
    install(machine)?;
    machine.sh(&format!(
        "echo by-the-host | dd of={IMAGE} conv=notrunc status=none"
    ))?;
    // Units, sockets, lender, limits, QEMU: the VM has all it needs.
    machine.sh("farside doctor --timeout 120 web1 2>&1")?;
    // `--wait` would require D-Bus, which is missing.
    let group = machine
        .sh(&format!(
            "systemctl start {QEMU}
             pid=$(systemctl show --value -p MainPID {QEMU})
             until grep -q . {WORKER}/cgroup.procs 2> /dev/null; do kill -0 $pid || exit 1; sleep 0.1; done
             grep -H . {WORKER}/cgroup.procs {WORKER}/pids.max {WORKER}/memory.max {WORKER}/cgroup.controllers
             tail -f --pid=$pid /dev/null"
        ))
        .with_context(|| console(machine))?;
    // The worker of the lease has a control group of its own, with limits, while it runs: it is made and limited first.
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
    remove(machine)?;
    Ok(said)
}

fn install(machine: &Machine) -> Result<()> {
    for template in TEMPLATES {
        machine.sh(&format!(
            "install -m 644 /usr/share/doc/farside/examples/{template} {UNITS}/"
        ))?;
    }
    machine.sh("systemctl daemon-reload").map(drop)
}

fn remove(machine: &Machine) -> Result<()> {
    for template in TEMPLATES {
        machine.sh(&format!("rm {UNITS}/{template}"))?;
    }
    machine.sh(&format!("rm {CONSOLE}; systemctl daemon-reload"))?;
    Ok(())
}

/// Where QEMU's user tries to write: in its own directory it can.
const DIRECTORIES: &str = "/run/farside /run/farside/vm /run/farside/vm/web1 /run/farside/vm/web2 \
    /var/lib/farside /var/lib/farside/vm /var/cache/farside /etc/farside /var/lib/farside-qemu \
    /var/lib/farside-qemu/web1";

/// `farside start` of root runs QEMU by its unit, as a user that reaches its VM's devices and nothing
/// else of farside; root's commands reach its monitor.
pub fn has_its_own_user(machine: &Machine) -> Result<()> {
    install(machine)?;
    machine.sh(&format!(
        "cp {DESCRIPTION} {SAVED} && sed -i 's@[$]b poweroff -f@{WRITES}@' {DESCRIPTION}"
    ))?;
    let said = machine.sh("farside start web1 2>&1")?;
    let pid = machine.show(QEMU, "MainPID")?;
    ensure!(
        said.contains(&format!("VM web1 runs (QEMU is process {pid})")),
        "{said}"
    );
    // The guest has used the disk. What follows would slow down its start.
    machine
        .sh(&format!(
            "until grep -q 'records out' {CONSOLE}; do kill -0 {pid} || exit 1; sleep 0.2; done"
        ))
        .with_context(|| console(machine))?;
    let process = machine.sh(&format!(
        "cat /proc/{pid}/status; tr '\\0' ' ' < /proc/{pid}/cmdline"
    ))?;
    let uid = machine.sh("id -u farside-qemu")?;
    let has = [
        &format!("\nUid:\t{0}\t{0}\t{0}\t{0}\n", uid.trim()),
        "\nCapBnd:\t0000000000000000\n",
        "\nNoNewPrivs:\t1\n",
        "\nSeccomp:\t2\n",
        "fd=3,server=on,wait=off -qmp chardev:qmp ",
    ];
    ensure!(has.iter().all(|part| process.contains(part)), "{process}");
    exposure::is_small(&|script| machine.sh(script), QEMU)?;
    outlives_a_restart_of_everything(machine, &pid)?;
    reaches_its_devices_alone(machine, &pid)?;
    // The commands of root, and what the backend does for them, reach the monitor.
    let said = machine.sh("set -e; exec 2>&1
         farside status --vm web1
         install -o farside -g farside -m 600 /dev/null /var/lib/farside/disk1.img
         truncate -s 64M /var/lib/farside/disk1.img
         farside lend --add --nvme disk1=/var/lib/farside/disk1.img
         farside attach web1 disk1
         farside detach web1 disk0
         farside stop web1 --limit 0 --force
         farside lend --remove disk1
         rm /var/lib/farside/disk1.img")?;
    let done = [
        "disk1 is plugged into VM web1",
        "disk0 is returned",
        "VM web1 is stopped",
    ];
    ensure!(done.iter().all(|part| said.contains(part)), "{said}");
    for unit in [QEMU, QEMU_SOCKET] {
        let state = machine.sh(&format!(
            "n=0; while [ $(systemctl show --value -p ActiveState {unit}) != inactive ]; do
                 n=$((n + 1)); [ $n -lt 300 ] || break; sleep 0.1
             done
             systemctl show -p ActiveState,Result {unit}"
        ))?;
        ensure!(
            state == "Result=success\nActiveState=inactive\n",
            "{unit}: {state}"
        );
    }
    machine.sh("test ! -e /run/farside/vm/web1/qmp && rm -r /var/lib/farside/vm/web1")?;
    Ok(())
}

/// How often everything is restarted.
const RESTARTS: usize = 3;

/// `systemctl restart farside.target` costs the guest a pause, no I/O error.
fn outlives_a_restart_of_everything(machine: &Machine, qemu: &str) -> Result<()> {
    let longest = |machine: &Machine| -> Result<u32> {
        let last = machine.sh(&format!("grep -a ^longest {CONSOLE} | tail -n 1"))?;
        let number = last.split_whitespace().nth(1);
        number
            .and_then(|number| number.parse().ok())
            .with_context(|| format!("{last:?}; {}", console(machine)))
    };
    // It prints one at its first write.
    machine.sh(&format!(
        "until grep -a -q ^longest {CONSOLE}; do kill -0 {qemu} || exit 1; sleep 0.2; done; sleep 3"
    ))?;
    let before = longest(machine)?;
    for round in 1..=RESTARTS {
        machine.sh(&format!(
            "set -e
             systemctl restart farside.target
             n=0; until farside status --vm web1 | grep -q 'started again {round} times' \\
                     && farside status --vm web1 | grep -q 'process: connected'; do
                 n=$((n + 1)); [ $n -lt 300 ] || exit 1; sleep 0.1
             done
             sleep 2"
        ))?;
    }
    let after = longest(machine)?;
    println!(
        "longest time between two writes of the guest: {before}0 ms, with {RESTARTS} restarts of everything {after}0 ms"
    );
    let errors = machine.sh(&format!("grep -a -c -i 'error' {CONSOLE} || true"))?;
    ensure!(errors.trim() == "0", "{}", console(machine));
    let now = machine.show(QEMU, "MainPID")?;
    ensure!(now == qemu, "QEMU was process {qemu}, and is {now}");
    Ok(())
}

fn reaches_its_devices_alone(machine: &Machine, pid: &str) -> Result<()> {
    // Another VM's monitor.
    machine.sh(&format!(
        "install -d -m 711 -o farside -g farside /run/farside/vm/web2
         printf '[Socket]\nListenStream=/run/farside/vm/web2/qmp\nSocketUser=farside\n\
             SocketMode=0600\nAccept=yes\n' > {UNITS}/other.socket
         printf '[Service]\nExecStart=/bin/true\n' > {UNITS}/other@.service
         systemctl daemon-reload && systemctl start other.socket"
    ))?;
    let tries = format!(
        "for path in {DIRECTORIES}; do touch $path/here 2> /dev/null && echo written: $path; done
         for path in lender.sock vm/web1/disk0.sock vm/web1/qmp vm/web2/qmp; do
             test -w /run/farside/$path && echo opens: $path
         done; true"
    );
    let user = |name: &str| format!("setpriv --reuid={name} --regid={name} --init-groups");
    let as_qemu = user("farside-qemu");
    let expected = "written: /var/lib/farside-qemu/web1\nopens: vm/web1/disk0.sock\n";
    let seen = machine.sh(&format!("{as_qemu} sh -c '{tries}'"))?;
    ensure!(seen == expected, "as QEMU's user: {seen}");
    // In the unit, it does not even see what belongs to others.
    let inside = machine.sh(&format!(
        "nsenter --mount --target {pid} {as_qemu} sh -c '{tries}
         ls /run/farside /run/farside/vm /var/lib/farside-qemu'"
    ))?;
    let listed = "/run/farside:\nvm\n\n/run/farside/vm:\nweb1\n\n/var/lib/farside-qemu:\nweb1\n";
    ensure!(
        inside == format!("{expected}{listed}"),
        "in QEMU's unit: {inside}"
    );
    let namespaces = machine.sh(&format!("readlink /proc/1/ns/pid /proc/{pid}/ns/pid"))?;
    let [first, own] = namespaces.lines().collect::<Vec<_>>()[..] else {
        bail!("{namespaces}");
    };
    ensure!(first != own, "QEMU sees the processes of the host");
    // connect(2) itself. farside's user gets further: that socket is no lender's.
    for path in ["lender.sock", "vm/web1/qmp", "vm/web2/qmp"] {
        let connect = format!("farside devices --lender /run/farside/{path} 2>&1 || true");
        let refused = machine.sh(&format!("{as_qemu} {connect}"))?;
        let taken = machine.sh(&format!("{} {connect}", user("farside")))?;
        ensure!(
            refused.contains("ermission denied") && !taken.contains("ermission denied"),
            "{path}: {refused}; {taken}"
        );
    }
    machine.sh(&format!(
        "systemctl stop other.socket
         rm -r {UNITS}/other.socket {UNITS}/other@.service /run/farside/vm/web2
         rm /var/lib/farside-qemu/web1/here"
    ))?;
    Ok(())
}

/// Without the group, QEMU cannot connect to its devices, and the remedy is named.
pub fn needs_the_group(machine: &Machine) -> Result<()> {
    let said = machine.sh(&format!(
        "sed 's/^socket-group/# &/' {SAVED} > {DESCRIPTION}
         systemctl stop {BACKEND_SOCKET} {BACKEND} 2>&1
         systemctl daemon-reload
         systemctl start {QEMU}
         n=0; until systemctl is-failed --quiet {QEMU}; do
             n=$((n + 1)); [ $n -lt 300 ] || exit 1; sleep 0.1
         done
         journalctl --no-pager -u {QEMU} | tail -n 30
         sed -i 's/^# socket-group = \"farside-qemu\"$/socket-group = \"farside-qemu\"/' {DESCRIPTION}
         systemctl reset-failed {QEMU}
         systemctl stop {BACKEND_SOCKET} {BACKEND} 2>&1
         systemctl daemon-reload"
    ))?;
    ensure!(
        said.contains("device disk0 of VM web1")
            && said.contains("set `socket-group = \"farside-qemu\"`"),
        "{said}"
    );
    remove(machine)
}

/// Adds QEMU and the guest's kernel to the VM configuration.
fn describe(machine: &Machine) -> Result<()> {
    let (accel, cpu, options) = match machine.has_kvm()? {
        true => ("kvm", NESTED_KVM_CPU, NESTED_KVM_MACHINE),
        false => ("tcg", "max", "pit=on"),
    };
    let description = machine.sh(&format!("cat {DESCRIPTION}"))?;
    // More is not pinned within the 5 s of QEMU on each emulated host.
    let small = description
        .replace("memory = \"4 GiB\"", "memory = \"128 MiB\"")
        .replace("cpus = 2", "cpus = 1");
    ensure!(
        small.contains("128 MiB"),
        "the example is another: {description}"
    );
    let text = format!(
        "{small}
qemu = \"{qemu}\"
accel = \"{accel}\"
qemu-args = [
    \"-nodefaults\", \"-no-user-config\", \"-no-reboot\", \"-display\", \"none\",
    \"-cpu\", \"{cpu}\", \"-machine\", \"{options}\",
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
