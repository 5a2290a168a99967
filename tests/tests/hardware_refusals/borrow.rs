//! Refusals of a backend on the device's own host.

use anyhow::{Result, ensure};
use farside_tests::SHORT;

use crate::{
    host::{HERE, Host, LIFE, Place},
    scripted::Scripted,
    stage::{DRIVE, GROUPED, NEIGHBOUR, NO_RESET},
};

pub fn guest_ram_that_a_device_cannot_reach_is_told_before_the_vm_starts(
    host: &Host,
) -> Result<()> {
    let lender = host.lend(HERE, &format!("--vfio disk0={DRIVE}"))?;
    let serve = |memory| format!("serve --vm a --device disk0 --memory {memory}");
    // An emulated VT-d translates 39 or 48 bits.
    let words = [
        "disk0",
        DRIVE,
        "0x1000000000000..=0xffffffffffffffff is not usable",
        "keep guest RAM out",
    ];
    host.refuses("RAM beyond the address width", HERE, &serve("300T"), &words)?;
    host.verdict()?;
    let backend = host.serve(HERE, "a", "disk0", "--memory 256M")?;
    backend.stop()?;
    lender.stop()
}

pub fn the_memlock_limit_is_looked_at_before_the_vm_starts(host: &Host) -> Result<()> {
    // An ordinary user with access to the device, granted by the administrator.
    host.bind(DRIVE, "vfio-pci")?;
    let user = format!(
        "set -e
        echo >/sys/bus/pci/devices/{DRIVE}/driver_override
        grep -q ^op: /etc/passwd 2>/dev/null || echo op:x:1000:1000::/tmp:/bin/sh >>/etc/passwd
        mkdir -p /run/op && chown 1000:1000 /run/op
        chown 1000 /dev/vfio/$(basename $(readlink /sys/bus/pci/devices/{DRIVE}/iommu_group))"
    );
    host.exec_ok(&user, SHORT)?;
    let as_user = |limit: &str, args: &str| {
        format!(
            "ulimit -l {limit}
            exec busybox su op -c 'export FARSIDE_RUNTIME_DIR=/run/op; exec farside {args}'"
        )
    };
    let lend = as_user(
        "64",
        &format!("lend --name op --vfio disk0={DRIVE} >/tmp/op.log 2>&1"),
    );
    let running = host.exec_start(&lend, SHORT)?;
    let up = host.wait_for("[ -S /run/op/lender.sock ]");
    up.map_err(|error| error.context(host.story()))?;
    let serve = as_user("64", "serve --vm a --device disk0 --memory 256M");
    let words = ["disk0", "memlock", "64 KiB", "256 MiB"];
    host.refuses_shell("the memlock limit", &serve, &words)?;
    host.exec_ok("kill -TERM $(pidof farside)", SHORT)?;
    let ended = running.wait_for(SHORT)?;
    ensure!(ended.success(), "the user's lender: {ended}");
    // The lender did not unbind it from another driver.
    ensure!(host.driver(DRIVE)? == "vfio-pci");
    let back = format!(
        "cd /sys/bus/pci/devices/{DRIVE}; echo {DRIVE} >driver/unbind; echo {DRIVE} >/sys/bus/pci/drivers_probe"
    );
    host.exec_ok(&back, SHORT)?;
    host.verdict()
}

pub fn a_lender_without_privileges_lends_what_root_has_bound(host: &Host) -> Result<()> {
    const OP: Place = Place("/run/op");
    let before = host.look()?;
    let bind = format!(
        "set -e
        grep -q ^op: /etc/passwd 2>/dev/null || echo op:x:1000:1000::/tmp:/bin/sh >>/etc/passwd
        grep -q ^op: /etc/group 2>/dev/null || printf 'op:x:1000:\\nop-vfio:x:1001:op\\n' >>/etc/group
        mkdir -p /run/op && chown 1000:1000 /run/op
        printf 'name = \"op\"\\n[[device]]\\nid = \"disk0\"\\n' >/tmp/op.toml
        echo 'vfio = {{ function = \"{DRIVE}\" }}' >>/tmp/op.toml
        farside bind --config /tmp/op.toml --group op-vfio"
    );
    host.exec_ok(&bind, SHORT)?;
    ensure!(host.driver(DRIVE)? == "vfio-pci");
    // Without privileges it can neither unbind the function nor open the kernel's log.
    let lend = "ulimit -l unlimited
        exec busybox su op -c 'export FARSIDE_RUNTIME_DIR=/run/op; echo $$ >/run/op/pid
            exec farside lend --config /tmp/op.toml' </dev/kmsg >/tmp/op.log 2>&1";
    let running = host.exec_start(lend, LIFE)?;
    let up = host.wait_for("[ -S /run/op/lender.sock ]");
    up.map_err(|error| error.context(host.story()))?;
    let backend = host.serve(OP, "a", "disk0", "")?;
    let mut vmm = Scripted::start(host, OP, "a", "disk0")?;
    vmm.step("io 1M")?;
    // A function that is open stays.
    let release = "farside bind --release --config /tmp/op.toml";
    host.exec_ok(release, SHORT)?;
    ensure!(host.driver(DRIVE)? == "vfio-pci");
    vmm.step("io 1M")?;
    vmm.quit()?;
    backend.stop()?;
    host.exec_ok("kill -TERM $(cat /run/op/pid)", SHORT)?;
    let ended = running.wait_for(SHORT)?;
    ensure!(ended.success(), "the user's lender: {ended}");
    let log = host.exec_ok("cat /tmp/op.log", SHORT)?;
    for complaint in ["will not be seen", "not given back", "ermission denied"] {
        ensure!(!log.contains(complaint), "{log}");
    }
    ensure!(host.driver(DRIVE)? == "vfio-pci");
    // Also when lender.toml does not have it any more.
    let other =
        "printf 'name = \"op\"\n[[device]]\nid = \"dma0\"\nmodel.dma-test = {}\n' >/tmp/op.toml";
    host.exec_ok(other, SHORT)?;
    host.exec_ok(release, SHORT)?;
    let after = host.look()?;
    ensure!(before == after, "before:\n{before}\nafter:\n{after}");
    Ok(())
}

pub fn a_device_that_another_vm_has_names_that_vm(host: &Host) -> Result<()> {
    let lender = host.lend(HERE, &format!("--vfio disk0={DRIVE}"))?;
    let first = host.serve(HERE, "first", "disk0", "")?;
    let second = host.serve(HERE, "second", "disk0", "")?;
    let mut vmm = Scripted::start(host, HERE, "first", "disk0")?;
    vmm.step("io 1M")?;
    let mut late = Scripted::start(host, HERE, "second", "disk0")?;
    let answer = late.try_step("place")?;
    second.wait_log("borrowed by VM first")?;
    let borrow = host.status(HERE)?.borrow("second", "disk0")?;
    let error = borrow.last_error.clone().unwrap_or_default();
    log::info!("a device that another VM has: {error}; {answer}");
    ensure!(
        error.contains("VM first") && borrow.is_closed(),
        "{borrow:?}"
    );
    late.kill()?;
    // The first borrow was not disturbed.
    vmm.step("io 1M")?;
    vmm.step("unbind")?;
    vmm.quit()?;
    host.wait_free()?;
    let mut vmm = Scripted::start(host, HERE, "second", "disk0")?;
    vmm.step("io 1M")?;
    vmm.quit()?;
    first.stop()?;
    second.stop()?;
    lender.stop()
}

pub fn a_vmm_that_keeps_a_device_open_keeps_it_from_others(host: &Host) -> Result<()> {
    let lender = host.lend(HERE, &format!("--vfio disk0={DRIVE}"))?;
    let first = host.serve(HERE, "first", "disk0", "")?;
    let mut vmm = Scripted::start(host, HERE, "first", "disk0")?;
    vmm.step("io 1M")?;
    first.kill()?;
    lender.wait_log("has not released it")?;
    let second = host.serve(HERE, "second", "disk0", "")?;
    let mut late = Scripted::start(host, HERE, "second", "disk0")?;
    late.try_step("place")?;
    second.wait_log("in use")?;
    let error = host.status(HERE)?.borrow("second", "disk0")?.last_error;
    let error = error.unwrap_or_default();
    log::info!("a VMM that keeps the device: {error}");
    for word in [DRIVE, "VM first", "descriptor"] {
        ensure!(error.contains(word), "no {word:?} in: {error}");
    }
    late.kill()?;
    vmm.kill()?;
    let mut vmm = Scripted::start(host, HERE, "second", "disk0")?;
    vmm.step("io 1M")?;
    vmm.quit()?;
    second.stop()?;
    lender.stop()
}

pub fn what_cannot_be_reset_is_lent_to_one_vm(host: &Host) -> Result<()> {
    for (more, refused) in [("", true), ("--allow-dirty", false)] {
        let lender = host.lend(HERE, &format!("--vfio odd={NO_RESET} {more}"))?;
        if refused {
            lender.wait_log("cannot be reset")?;
        }
        let first = host.serve(HERE, "first", "odd", "")?;
        let mut vmm = Scripted::start(host, HERE, "first", "odd")?;
        vmm.step("reset")?;
        vmm.quit()?;
        first.stop()?;
        let serve = "serve --vm second --device odd --memory 256M";
        if refused {
            let words = ["odd", NO_RESET, "VM first", "allow-dirty"];
            host.refuses("a device that cannot be reset", HERE, serve, &words)?;
        } else {
            let second = host.serve(HERE, "second", "odd", "--memory 256M")?;
            let mut vmm = Scripted::start(host, HERE, "second", "odd")?;
            vmm.step("reset")?;
            second.wait_log("borrowed")?;
            vmm.quit()?;
            second.stop()?;
        }
        lender.stop()?;
    }
    Ok(())
}

pub fn what_cannot_be_reset_alone_is_reset_with_its_bus(host: &Host) -> Result<()> {
    let before = host.look()?;
    let lender = host.lend(
        HERE,
        &format!("--vfio odd={GROUPED} --vfio rng={NEIGHBOUR}"),
    )?;
    lender.wait_log("rng shares IOMMU group")?;
    // Whichever is borrowed first.
    let orders = [("first", "odd", "rng"), ("second", "rng", "odd")];
    for (n, (vm, one, other)) in (1..).zip(orders) {
        let backend = host.serve(HERE, vm, one, &format!("--device {other} --memory 256M"))?;
        let mut vmm = Scripted::start(host, HERE, vm, one)?;
        vmm.step("reset")?;
        backend.wait_log(&format!("{one} (VM {vm}): borrowed"))?;
        let resets = lender.log()?.matches("all functions on the bus of").count();
        ensure!(resets == n, "{resets} resets for {n} VMs");
        let late_backend = host.serve(HERE, "third", other, "")?;
        let mut late = Scripted::start(host, HERE, "third", other)?;
        late.try_step("place")?;
        let error = host.status(HERE)?.borrow("third", other)?.last_error;
        let error = error.unwrap_or_default();
        for word in [
            &format!("{other} shares IOMMU group"),
            one,
            &format!("VM {vm}"),
        ] {
            ensure!(error.contains(word), "no {word:?} in: {error}");
        }
        late.kill()?;
        late_backend.stop()?;
        vmm.quit()?;
        backend.stop()?;
        host.wait_free()?;
    }
    lender.stop()?;
    let after = host.look()?;
    ensure!(before == after, "before:\n{before}\nafter:\n{after}");
    Ok(())
}

/// A function that was left in use keeps the others of its group from being lent, and no other device.
pub fn a_group_that_is_in_use_keeps_no_other_device_from_being_lent(host: &Host) -> Result<()> {
    host.exec_ok("truncate -s 16M /tmp/disk0.img", SHORT)?;
    let lend = format!("--vfio odd={GROUPED} --vfio rng={NEIGHBOUR} --nvme disk0=/tmp/disk0.img");
    let lender = host.lend(HERE, &lend)?;
    let backend = host.serve(HERE, "first", "odd", "")?;
    let mut vmm = Scripted::start(host, HERE, "first", "odd")?;
    vmm.step("reset")?;
    lender.kill()?;
    let lender = host.lend(HERE, &lend)?;
    for device in ["odd", "rng"] {
        lender.wait_log(&format!("device {device} is not lent until"))?;
    }
    let other = host.serve(HERE, "second", "disk0", "")?;
    let mut disk = Scripted::start(host, HERE, "second", "disk0")?;
    disk.step("io 1M")?;
    disk.quit()?;
    other.stop()?;
    vmm.kill()?;
    backend.stop()?;
    lender.stop()?;
    let lender = host.lend(HERE, &lend)?;
    let backend = host.serve(HERE, "first", "odd", "")?;
    let mut vmm = Scripted::start(host, HERE, "first", "odd")?;
    vmm.step("reset")?;
    vmm.quit()?;
    backend.stop()?;
    lender.stop()?;
    // The lender that was killed has not given them back.
    for function in [GROUPED, NEIGHBOUR] {
        let back = format!(
            "cd /sys/bus/pci/devices/{function}; echo >driver_override
            echo {function} >driver/unbind; echo {function} >/sys/bus/pci/drivers_probe"
        );
        host.exec_ok(&back, SHORT)?;
    }
    Ok(())
}
