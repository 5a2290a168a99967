//! Lender and backend under a real systemd.

use anyhow::{Context, Result, anyhow, ensure};

use crate::{
    exposure, guest,
    machine::Machine,
    stage::{Stage, install},
};

const LENDER: &str = "farside-lender.service";
const LENDER_SOCKET: &str = "farside-lender.socket";
const BACKEND: &str = "farside@web1.service";
const BACKEND_SOCKET: &str = "farside@web1.socket";

/// Number of restarts of a unit that does not become ready. On a slow machine, one or two are
/// timeouts.
const MAX_RESTARTS: u32 = 5;

pub fn systemd_starts_restarts_and_ends_lender_and_backend(stage: &Stage) -> Result<()> {
    let inside = stage.enter()?;
    install(&inside)?;
    let machine = Machine::boot(&inside)?;
    drop(inside);
    scenes(&machine).map_err(|error| anyhow!("{error:#}\n{}", machine.story()))?;
    machine.end()
}

fn scenes(machine: &Machine) -> Result<()> {
    machine.sh("(echo 'worker-memory-max = \"512 MiB\"'
          cat /usr/share/doc/farside/examples/lender.toml) > /etc/farside/lender.toml
         cp /usr/share/doc/farside/examples/vm.toml /etc/farside/vm/web1.toml
         echo 'socket-group = \"farside-qemu\"' >> /etc/farside/vm/web1.toml
         install -o farside -g farside -m 600 /dev/null /var/lib/farside/disk0.img
         truncate -s 64M /var/lib/farside/disk0.img
         systemctl daemon-reload")?;
    by_sockets(machine)?;
    admits_the_group(machine)?;
    guest::uses_the_drive(machine)?;
    guest::has_its_own_user(machine)?;
    guest::needs_the_group(machine)?;
    machine.sh(&format!("systemctl start {BACKEND_SOCKET}"))?;
    answer(machine)?;
    comes_back(machine)?;
    ends(machine)?;
    foreign_sockets_are_refused(machine)?;
    without_sockets(machine)?;
    has_a_network_where_it_is_configured(machine)?;
    has_vfio_where_it_is_configured(machine)?;
    sets_functions_online_where_it_may(machine)?;
    has_volumes_where_they_are_configured(machine)?;
    has_a_tap_where_it_is_configured(machine)?;
    purged_while_it_runs(machine)
}

/// Nothing runs until a client connects; then the required units are started and become
/// ready.
fn by_sockets(machine: &Machine) -> Result<()> {
    machine.sh(&format!("systemctl start {LENDER_SOCKET} {BACKEND_SOCKET}"))?;
    for unit in [LENDER, BACKEND] {
        let state = machine.show(unit, "ActiveState")?;
        ensure!(state == "inactive", "{unit} is {state} before it is asked");
    }
    let status = answer(machine)?;
    ensure!(
        status.contains("web1") && status.contains("disk0"),
        "{status}"
    );
    for (unit, says) in [
        (LENDER, "lending at /run/farside/lender.sock"),
        (BACKEND, "serving disk0 to VM web1"),
    ] {
        // It is active only after READY=1.
        ensure!(machine.show(unit, "Type")? == "notify", "{unit}");
        let state = machine.show(unit, "ActiveState")?;
        ensure!(state == "active", "{unit} is {state} and answers");
        let text = machine.show(unit, "StatusText")?;
        ensure!(text == says, "{unit} says {text:?}");
        let pid = machine.show(unit, "MainPID")?;
        let process = machine.sh(&format!("cat /proc/{pid}/status /proc/{pid}/limits"))?;
        let uid = machine.sh("id -u farside")?;
        ensure!(
            process.contains(&format!("Uid:\t{0}\t{0}\t{0}", uid.trim()))
                && process.contains("CapBnd:\t0000000000000000"),
            "{unit} is no unprivileged user's: {process}"
        );
        let locked = process.lines().find(|line| line.contains("Max locked"));
        ensure!(
            locked.is_some_and(|line| line.contains("unlimited")),
            "{unit}: {locked:?}"
        );
        let limits = (
            machine.show(unit, "MemoryMax")?,
            machine.show(unit, "TasksMax")?,
        );
        ensure!(
            limits.0.parse::<u64>().is_ok() && limits.1.parse::<u64>().is_ok(),
            "{unit} has no limits: {limits:?}"
        );
        exposure::is_small(&|script| machine.sh(script), unit)?;
    }
    sees_its_own_state(machine)
}

/// Of the state, a backend sees that of VMs and the lenders that it remembers itself: not the images,
/// nor what other backends and the lender remember.
fn sees_its_own_state(machine: &Machine) -> Result<()> {
    let pid = machine.show(BACKEND, "MainPID")?;
    let seen = machine.sh(&format!(
        "set -e
         install -d -m 700 -o farside -g farside /var/cache/farside/web2
         echo '{{}}' > /var/cache/farside/web2/lenders.json
         echo '{{}}' > /var/lib/farside/known/lenders.json
         cd /proc/{pid}/root/var/lib/farside
         ls . known ../../cache/farside
         for file in vm/here here ../../cache/farside/here known/lenders.json; do
             touch $file 2> /dev/null && echo written: $file || true
         done
         stat -c '%U %a %n' /var/cache/farside /var/cache/farside/web1 /var/cache/farside/web1/*
         rm -r /var/lib/farside/known/lenders.json /var/cache/farside/web1/* /var/cache/farside/web2"
    ))?;
    let expected = ".:\nknown\nvm\n\n../../cache/farside:\nweb1\n\nknown:\n\
         written: known/lenders.json\n\
         root 755 /var/cache/farside\nfarside 700 /var/cache/farside/web1\n\
         root 644 /var/cache/farside/web1/lenders.json\n";
    ensure!(seen == expected, "{seen}");
    Ok(())
}

/// The first answer of the backend, which comes once the units are ready; on a loaded machine
/// that may take longer than the command waits. Fails with the journal of a unit that systemd
/// has to start again and again.
fn answer(machine: &Machine) -> Result<String> {
    machine.sh(&format!(
        "until farside status --vm web1 2> /dev/null; do
             for unit in {LENDER} {BACKEND}; do
                 restarts=$(systemctl show --value -p NRestarts $unit)
                 [ $restarts -lt {MAX_RESTARTS} ] && continue
                 echo \"$unit was started again $restarts times:\"
                 journalctl --no-pager -u $unit | tail -n 30
                 exit 1
             done
         done"
    ))
}

/// QEMU of another user can connect through its group only.
fn admits_the_group(machine: &Machine) -> Result<()> {
    let modes = machine.sh("stat -c '%n %U:%G %a' /run/farside/vm/web1 \
         /run/farside/vm/web1/* /run/farside/lender.sock")?;
    // The backend, which may not change groups, has created the control socket.
    ensure!(
        modes.contains("/disk0.sock farside:farside-qemu 660")
            && modes.contains("/web1 farside:farside-qemu 2710")
            && modes.contains("/control farside:farside-qemu 600")
            && modes.contains("/lender.sock farside:farside 600"),
        "{modes}"
    );
    let connect = "env FARSIDE_RUNTIME_DIR=/run/farside farside status --vm web1";
    let member = format!("setpriv --reuid=nobody --regid=farside-qemu --clear-groups {connect}");
    let stranger = format!("setpriv --reuid=nobody --regid=nogroup --clear-groups {connect}");
    machine.sh(&member)?;
    let said = machine.sh(&format!("{stranger} 2>&1 && echo connected || true"))?;
    ensure!(
        said.contains("ermission denied") && !said.contains("connected"),
        "{said}"
    );
    Ok(())
}

/// A killed backend is restarted, on the same sockets.
fn comes_back(machine: &Machine) -> Result<()> {
    let socket = "stat -c %i /run/farside/vm/web1/disk0.sock";
    // By its keeper, the main process.
    let keeper = machine.show(BACKEND, "MainPID")?;
    machine.sh(&format!(
        "kill -KILL $(cat /proc/{keeper}/task/{keeper}/children)"
    ))?;
    let kept = "farside status --vm web1 2> /dev/null | grep -q 'started again 1 times'";
    machine.sh(&format!("until {kept}; do sleep 0.1; done"))?;
    ensure!(
        machine.show(BACKEND, "MainPID")? == keeper,
        "{BACKEND} has another main process"
    );
    // The keeper, by the next service, which takes over from the spare. On a slow machine systemd may have restarted the
    // unit before.
    let restarts = || -> Result<u32> { Ok(machine.show(BACKEND, "NRestarts")?.parse()?) };
    let restarted = restarts()?;
    let (socket_before, backend) = (machine.sh(socket)?, pid(machine)?);
    machine.sh(&format!("kill -KILL {keeper}"))?;
    machine.sh(&format!(
        "n=0; until [ $(systemctl show --value -p NRestarts {BACKEND}) -gt {restarted} ] \
                 && farside status --vm web1 2> /dev/null | grep -q 'started again 2 times'; do
             n=$((n + 1)); [ $n -lt 300 ] || exit 1; sleep 0.1
         done"
    ))?;
    let main = machine.show(BACKEND, "MainPID")?;
    ensure!(
        machine.show(BACKEND, "ActiveState")? == "active" && main != "0" && main != backend,
        "{BACKEND} has the main process {main}"
    );
    ensure!(
        main != keeper && pid(machine)? != backend,
        "{BACKEND} was not started again"
    );
    // It does not wait for the services that it restarts.
    machine.sh("systemctl restart farside.target
         until [ -z \"$(systemctl list-jobs --no-legend)\" ]; do sleep 0.1; done")?;
    answer(machine)?;
    let (socket_after, next) = (machine.sh(socket)?, machine.show(BACKEND, "MainPID")?);
    ensure!(
        next != main && socket_before == socket_after && pid(machine)? != backend,
        "process and socket were {main} and {socket_before:?}, are {next} and {socket_after:?}"
    );
    Ok(())
}

/// The backend's process.
fn pid(machine: &Machine) -> Result<String> {
    let status = machine.sh("farside status --vm web1 --json")?;
    let word = |rest: &str| {
        rest.split([',', '}', '\n'])
            .next()
            .map(str::trim)
            .map(str::to_owned)
    };
    let pid = status
        .split_once("\"pid\":")
        .and_then(|(_, rest)| word(rest));
    pid.with_context(|| format!("no pid in {status}"))
}

fn ends(machine: &Machine) -> Result<()> {
    machine.sh(&format!("systemctl stop {BACKEND_SOCKET}"))?;
    for unit in [BACKEND, BACKEND_SOCKET] {
        let (state, result) = (
            machine.show(unit, "ActiveState")?,
            machine.show(unit, "Result")?,
        );
        ensure!(
            state == "inactive" && result == "success",
            "{unit}: {state}, {result}"
        );
    }
    nothing_is_left_of_web1(machine)
}

fn nothing_is_left_of_web1(machine: &Machine) -> Result<()> {
    let left = machine.sh("ls -A /run/farside/vm")?;
    ensure!(left.is_empty(), "left in /run/farside/vm: {left}");
    Ok(())
}

/// A socket unit that was made for other devices.
fn foreign_sockets_are_refused(machine: &Machine) -> Result<()> {
    machine.sh(&format!(
        "sed -i 's/\"disk0\"/\"disk0\", \"disk9\"/' /etc/farside/vm/web1.toml
         systemctl daemon-reload
         systemctl start {BACKEND_SOCKET}
         sed -i 's/, \"disk9\"//' /etc/farside/vm/web1.toml"
    ))?;
    let said = machine.sh(&format!(
        "systemctl start {BACKEND} 2>&1 && echo started
         systemctl stop {BACKEND_SOCKET} {BACKEND} 2>&1
         journalctl --no-pager -u {BACKEND} | tail -n 30"
    ))?;
    ensure!(
        said.contains("listens at /run/farside/vm/web1/disk9.sock")
            && said.contains("daemon-reload")
            && !said.contains("started\n"),
        "{said}"
    );
    machine.sh(&format!(
        "systemctl daemon-reload; systemctl reset-failed {BACKEND} || true"
    ))?;
    Ok(())
}

/// Without socket unit, the service creates its sockets, and removes them.
fn without_sockets(machine: &Machine) -> Result<()> {
    // It can assign its sockets only to groups that it is a member of.
    let unit = "/etc/systemd/system/farside@web1.service.d/group.conf";
    machine.sh(&format!(
        "mkdir -p $(dirname {unit})
         printf '[Service]\\nSupplementaryGroups=farside-qemu\\nSystemCallFilter=@chown\\n' > {unit}
         systemctl daemon-reload
         systemctl start {BACKEND}
         farside status --vm web1"
    ))?;
    let modes = machine.sh("stat -c '%n %G %a' /run/farside/vm/web1 /run/farside/vm/web1/*")?;
    ensure!(
        modes.contains("/vm/web1 farside-qemu 710")
            && modes.contains("/disk0.sock farside-qemu 660")
            && modes.contains("/status farside 600"),
        "{modes}"
    );
    starts_as_the_units_user(machine)?;
    // It exposes the unit more than those of the package.
    machine.sh(&format!("rm {unit} && systemctl daemon-reload"))?;
    nothing_is_left_of_web1(machine)
}

/// `farside start` does not run QEMU as root in a directory of the backend's user, and names the
/// command that does it as that user. Root's `farside stop` ends both.
fn starts_as_the_units_user(machine: &Machine) -> Result<()> {
    let said = machine.sh("farside start web1 2>&1 && echo started || true")?;
    let command = said
        .split_once("`runuser")
        .and_then(|(_, rest)| rest.split_once('`'))
        .map(|(command, _)| format!("runuser{command}"));
    let command = command.filter(|_| !said.contains("started\n"));
    let command = command.with_context(|| format!("no command is named: {said}"))?;
    machine.sh("set -e
         test ! -e /var/lib/farside/vm/web1
         cp /etc/farside/vm/web1.toml /tmp
         sed -i 's/poweroff -f/sleep 1000/; s|/var/lib/farside-qemu/web1|/var/lib/farside|' /etc/farside/vm/web1.toml
         usermod --append --groups kvm farside")?;
    let said = machine.sh(&format!("{command} 2>&1"))?;
    ensure!(said.contains("VM web1 runs"), "{command}: {said}");
    let user = machine.sh("stat -c %U /proc/$(cat /run/farside/vm/web1/qemu.pid)")?;
    ensure!(user == "farside\n", "QEMU runs as {user}");
    machine.sh("farside stop web1 --limit 0 --force 2>&1
         rm /var/lib/farside/console
         mv /tmp/web1.toml /etc/farside/vm/")?;
    Ok(())
}

/// The services have no network, until their configuration names TCP addresses.
fn has_a_network_where_it_is_configured(machine: &Machine) -> Result<()> {
    const ADDRESS: &str = "tcp:127.0.0.1:7410";
    let namespace = |pid: &str| machine.sh(&format!("readlink /proc/{pid}/ns/net"));
    let of_host = namespace("1")?;
    ensure!(
        namespace(&machine.show(LENDER, "MainPID")?)? != of_host,
        "the lender has the host's network"
    );
    machine.sh(&format!(
        "set -e
         cp -a /etc/farside /tmp/etc-farside
         sed -i '1i listen = [\"{ADDRESS}\"]' /etc/farside/lender.toml
         sed -i 's/^model.nvme.*/&\\nborrowers = [\"network\"]/' /etc/farside/lender.toml
         sed -i '1i lenders = [\"{ADDRESS}\"]' /etc/farside/vm/web1.toml
         systemctl daemon-reload
         systemctl restart {LENDER}"
    ))?;
    ensure!(
        namespace(&machine.show(LENDER, "MainPID")?)? == of_host,
        "the lender has another network than the host"
    );
    let listed = machine.sh(&format!("farside devices --lender {ADDRESS}"))?;
    ensure!(listed.contains("disk0"), "{listed}");
    for unit in [LENDER, BACKEND] {
        exposure::is_small(&|script| machine.sh(script), unit)?;
    }
    // Backend, worker and guest, in their units, over the network.
    guest::runs(machine)?;
    let said = machine.sh(&format!("journalctl --no-pager -u {LENDER} | tail -n 20"))?;
    ensure!(
        said.contains("lent over the network") && said.contains("returned"),
        "{said}"
    );
    machine.sh(&format!(
        "systemctl stop {BACKEND} {BACKEND_SOCKET} 2>&1 || true"
    ))?;
    machine.sh(&format!(
        "set -e
         rm -r /etc/farside && mv /tmp/etc-farside /etc/farside
         systemctl daemon-reload
         systemctl restart {LENDER}
         systemctl reset-failed {BACKEND} || true"
    ))?;
    Ok(())
}

/// With the drop-in for physical devices, the lender has VFIO's directory and the kernel's log, and no
/// privileges.
fn has_vfio_where_it_is_configured(machine: &Machine) -> Result<()> {
    const DROP_IN: &str = "/etc/systemd/system/farside-lender.service.d/vfio.conf";
    machine.sh(&format!(
        "set -e
         mkdir -p /dev/vfio && touch /dev/vfio/here
         install -D -m 644 /usr/share/doc/farside/examples/lender-vfio.conf {DROP_IN}
         systemctl daemon-reload
         systemctl restart {LENDER}"
    ))?;
    let state = machine.show("farside-vfio.service", "ActiveState")?;
    ensure!(state == "active", "farside-vfio.service is {state}");
    let pid = machine.show(LENDER, "MainPID")?;
    let seen = machine.sh(&format!(
        "readlink /proc/{pid}/fd/0
         ls /proc/{pid}/root/dev/vfio
         grep -e Uid -e CapBnd -e CapPrm /proc/{pid}/status"
    ))?;
    let uid = machine.sh("id -u farside")?;
    ensure!(
        seen.starts_with("/dev/kmsg\nhere\n")
            && seen.contains(&format!("Uid:\t{0}\t{0}", uid.trim()))
            && seen.matches("\t0000000000000000").count() == 2,
        "{seen}"
    );
    // Of the user's services, which VMMs are among, the lender alone is in the functions' group.
    let gid = machine.sh("getent group farside-vfio | cut -d : -f 3")?;
    let groups = machine.sh(&format!("grep Groups /proc/{pid}/status"))?;
    let of_user = machine.sh("id -G farside")?;
    let has = |groups: &str| groups.split_whitespace().any(|id| id == gid.trim());
    ensure!(has(&groups) && !has(&of_user), "{gid}{groups}{of_user}");
    exposure::is_small(&|script| machine.sh(script), LENDER)?;
    machine.sh(&format!(
        "set -e
         rm -r {DROP_IN} /dev/vfio
         systemctl daemon-reload
         systemctl restart {LENDER}"
    ))?;
    Ok(())
}

/// With the drop-in of the documentation, root's unit sets virtual functions of an NVMe controller online. Without, it leaves
/// them as they are.
fn sets_functions_online_where_it_may(machine: &Machine) -> Result<()> {
    const UNIT: &str = "farside-vfio.service";
    const DROP_IN: &str = "/etc/systemd/system/farside-vfio.service.d/nvme.conf";
    const DOCUMENTATION: &str = include_str!("../../../docs/nvme-virtual-functions.md");
    let (_, drop_in) = DOCUMENTATION
        .split_once("```ini\n")
        .context("no drop-in is documented")?;
    let (drop_in, _) = drop_in.split_once("```").context("a block without end")?;
    let pf = machine.sh("basename $(readlink -f /sys/class/nvme/nvme0/device)")?;
    let pf = pf.trim();
    machine.sh(&format!(
        "set -e
         cp -p /etc/farside/lender.toml /tmp
         printf '[[vfs]]\nof = \"{pf}\"\ncount = 2\n' >> /etc/farside/lender.toml
         mkdir -p $(dirname {DROP_IN})"
    ))?;
    let start = || {
        machine.sh(&format!(
            "set -e
             systemctl restart {UNIT}
             journalctl --sync
             id=$(systemctl show --value -p InvocationID {UNIT})
             journalctl --no-pager -o cat _SYSTEMD_INVOCATION_ID=$id"
        ))
    };
    let said = start()?;
    let unknown = format!("whether virtual functions of {pf} have to be set online is unknown");
    ensure!(
        said.contains(&unknown) && !said.contains("is online"),
        "{said}"
    );
    machine.write(DROP_IN, drop_in)?;
    machine.sh("systemctl daemon-reload")?;
    let said = start()?;
    for vf in [1, 2] {
        let online = format!("virtual function {vf} is online as secondary controller");
        ensure!(said.contains(&online), "{said}");
    }
    exposure::is_at_most(
        &|script| machine.sh(script),
        UNIT,
        exposure::GREATEST_WITH_ADMIN_COMMANDS,
    )?;
    machine.sh(&format!(
        "set -e
         systemctl stop {UNIT}
         echo 0 > /sys/bus/pci/devices/{pf}/sriov_numvfs
         mv /tmp/lender.toml /etc/farside/
         rm -r $(dirname {DROP_IN})
         systemctl daemon-reload"
    ))?;
    Ok(())
}

/// Root's `farside volume` acts as the lender's user, so that the lender can use what it makes.
fn has_volumes_where_they_are_configured(machine: &Machine) -> Result<()> {
    let said = machine.sh(&format!(
        "set -e
         # Restarts of the scenes before count to the unit's limit.
         systemctl reset-failed {LENDER}
         cp -p /etc/farside/lender.toml /tmp
         sed -i '1i volumes = \"/var/lib/farside/volumes\"' /etc/farside/lender.toml
         systemctl restart {LENDER}
         farside volume create disk8 8M
         cd /var/lib/farside && stat -c '%U:%G %a %n' volumes volumes/disk8 volumes/disk8/*
         farside devices | grep -o 'disk8 .*8 MiB'
         systemctl restart {LENDER}
         farside volume resize disk8 16M
         farside volume delete disk8
         rm volumes/.lock volumes/.socket && rmdir volumes
         mv /tmp/lender.toml /etc/farside/"
    ))?;
    for part in [
        "farside:farside 700 volumes\n",
        "farside:farside 600 volumes/disk8/image\n",
        "farside NVMe, 8 MiB",
        "disk8 has 16 MiB (was 8 MiB)",
        "disk8 is deleted",
    ] {
        ensure!(said.contains(part), "{part:?}: {said}");
    }
    Ok(())
}

/// With the drop-in for network devices, a guest reaches this machine by a tap interface of the lender's user.
fn has_a_tap_where_it_is_configured(machine: &Machine) -> Result<()> {
    const DROP_IN: &str = "/etc/systemd/system/farside-lender.service.d/tap.conf";
    const DESCRIPTION: &str = "/etc/farside/vm/web1.toml";
    const DRIVER: &str = "$b modprobe nvme;";
    machine.sh(&format!(
        "set -e
         systemctl reset-failed {LENDER}
         # udev does this elsewhere.
         chmod 666 /dev/net/tun
         ip tuntap add tap0 mode tap user farside
         ip addr add 10.9.0.1/24 dev tap0
         ip link set tap0 up
         cp -a /etc/farside /tmp/etc-farside
         printf '%s\n' '[[device]]' 'id = \"nic0\"' 'model.virtio-net = {{ tap = \"tap0\" }}' >> /etc/farside/lender.toml
         install -D -m 644 /usr/share/doc/farside/examples/lender-tap.conf {DROP_IN}
         systemctl daemon-reload
         systemctl restart {LENDER}"
    ))?;
    exposure::is_small(&|script| machine.sh(script), LENDER)?;
    let ping = format!(
        "{DRIVER} $b modprobe virtio_net; $b ip addr add 10.9.0.2/24 dev eth0; \
         $b ip link set eth0 up; $b ping -c 1 -W 60 10.9.0.1;"
    );
    let description = machine.sh(&format!("cat {DESCRIPTION}"))?;
    let description = description
        .replace("[\"disk0\"]", "[\"disk0\", \"nic0\"]")
        .replace(DRIVER, &ping);
    machine.write(DESCRIPTION, &description)?;
    // The backend has the devices that it started with.
    machine.sh(&format!(
        "systemctl stop {BACKEND} {BACKEND_SOCKET} 2>&1; systemctl daemon-reload"
    ))?;
    let said = guest::runs(machine)?;
    ensure!(said.contains("1 packets received"), "{said}");
    machine.sh(&format!(
        "set -e
         systemctl stop {BACKEND} {BACKEND_SOCKET} 2>&1
         rm -r {DROP_IN} /etc/farside && mv /tmp/etc-farside /etc/farside
         systemctl daemon-reload
         systemctl restart {LENDER}"
    ))?;
    Ok(())
}

fn purged_while_it_runs(machine: &Machine) -> Result<()> {
    machine.sh(&format!("systemctl start {BACKEND_SOCKET} {BACKEND}"))?;
    machine.sh("dpkg --purge farside 2>&1")?;
    let left = machine
        .sh("grep -l farside /proc/[0-9]*/comm || true; ls -d /run/farside 2>/dev/null || true")?;
    ensure!(left.is_empty(), "left after purge: {left}");
    let units = machine.sh("systemctl list-units --no-legend --plain 'farside*'")?;
    ensure!(units.is_empty(), "units after purge: {units}");
    machine.sh("test ! -e /var/cache/farside && test ! -e /var/lib/farside-qemu")?;
    // Files of the user remain.
    machine.sh("test -e /etc/farside/vm/web1.toml")?;
    let stored = machine.sh("ls /var/lib/farside")?;
    ensure!(
        stored == "disk0.img\n",
        "in /var/lib/farside after purge: {stored}"
    );
    Ok(())
}
