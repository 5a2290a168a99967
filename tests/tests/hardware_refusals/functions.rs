//! Refusals of `farside lend` before it listens.

use anyhow::{Result, ensure};
use farside_tests::SHORT;

use crate::{
    host::{HERE, Host},
    stage::{BRIDGE, CARD, DRIVE, GROUPED, MOUNTED, NEIGHBOUR, NO_RESET},
};

pub fn what_cannot_be_lent_stays_with_its_driver(host: &Host) -> Result<()> {
    let refuses = |what, args: &str, words: &[&str]| {
        host.refuses(what, HERE, &format!("lend --vfio {args}"), words)
    };
    let nowhere = "0000:00:1e.7";
    refuses(
        "no such function",
        &format!("x={nowhere}"),
        &[nowhere, "no PCI function"],
    )?;
    refuses(
        "a filter that matches nothing",
        "x=vendor=dead,device=beef",
        &["dead", "beef", "matches"],
    )?;
    refuses(
        "VFs where there are none",
        &format!("x=vfs-of:{CARD}"),
        &[CARD, "virtual functions", "--vfs"],
    )?;
    refuses(
        "the same function twice",
        &format!("x={DRIVE} --vfio y={DRIVE}"),
        &[DRIVE, "as x already", "once"],
    )?;
    refuses(
        "the same id twice",
        &format!("x={DRIVE} --vfio x={NO_RESET}"),
        &["\"x\"", "twice"],
    )?;
    refuses("a bridge", &format!("x={BRIDGE}"), &[BRIDGE, "bridge"])?;
    refuses(
        "too many VFs",
        &format!("x=vfs-of:{CARD} --vfs {CARD}=9"),
        &[CARD, "1 to 7", "9"],
    )?;
    refuses(
        "VFs of a function without SR-IOV",
        &format!("x={DRIVE} --vfs {DRIVE}=2"),
        &[DRIVE, "SR-IOV"],
    )?;
    // Virtual functions created and functions bound before the refusal are restored.
    refuses(
        "a bad device after good ones",
        &format!("v=vfs-of:{CARD} --vfs {CARD}=2 --vfio d={DRIVE} --vfio x={nowhere}"),
        &[nowhere],
    )?;
    host.verdict()?;

    ensure!(host.driver(DRIVE)? == "nvme");
    let lend = format!("--vfio v=vfs-of:{CARD} --vfs {CARD}=2 --vfio d={DRIVE}");
    takes_and_gives_back(host, &lend)
}

/// The valid command works, and leaves no trace.
fn takes_and_gives_back(host: &Host, args: &str) -> Result<()> {
    let before = host.look()?;
    let lender = host.lend(HERE, args)?;
    ensure!(host.look()? != before);
    lender.stop()?;
    let after = host.look()?;
    ensure!(before == after, "before:\n{before}\nafter:\n{after}");
    Ok(())
}

pub fn a_group_that_the_host_uses_names_its_members(host: &Host) -> Result<()> {
    ensure!(host.driver(NEIGHBOUR)? == "virtio-pci");
    let lend = format!("lend --vfio x={GROUPED}");
    let words = [
        GROUPED,
        "IOMMU group",
        "0000:02:02.0 (virtio-pci)",
        "one VM at a time can have functions of a group",
    ];
    host.refuses("a group that the host uses", HERE, &lend, &words)?;
    host.verdict()?;
    // With the other function unbound, the group is viable.
    let unbind = format!("echo {NEIGHBOUR} >/sys/bus/pci/drivers/virtio-pci/unbind");
    host.exec_ok(&unbind, SHORT)?;
    let lent = takes_and_gives_back(host, &format!("--vfio x={GROUPED}"));
    host.exec_ok(&unbind.replace("unbind", "bind"), SHORT)?;
    lent
}

pub fn what_is_in_use_is_taken_by_force_alone(host: &Host) -> Result<()> {
    let lend = |function: &str| format!("lend --vfio x={function}");
    let words = [MOUNTED, "mounted at /mnt/data", "Unmount", "--force"];
    host.refuses("a mounted drive", HERE, &lend(MOUNTED), &words)?;
    let words = [CARD, "eth0 is up", "bring down", "--force"];
    host.refuses("an interface that is up", HERE, &lend(CARD), &words)?;
    host.verdict()?;

    let lender = host.lend(HERE, &format!("--vfio x={CARD} --force"))?;
    ensure!(host.driver(CARD)? == "vfio-pci");
    ensure!(lender.log()?.contains("eth0 is up"), "{}", lender.log()?);
    lender.stop()?;
    ensure!(host.driver(CARD)? == "igb");
    host.exec_ok(
        &format!("ip link set $(ls /sys/bus/pci/devices/{CARD}/net) up"),
        SHORT,
    )?;
    // The mount refers to a disk that is gone; nothing is written to it any more.
    host.exec_ok("umount /mnt/data", SHORT)?;
    takes_and_gives_back(host, &format!("--vfio x={MOUNTED}"))
}

pub fn vfio_pci_that_is_missing_says_how_to_get_it(host: &Host) -> Result<()> {
    let lend = format!("lend --vfio x={DRIVE}");
    host.exec_ok("rmmod vfio_pci", SHORT)?;
    let words = ["vfio-pci", "modprobe vfio-pci"];
    host.refuses("vfio-pci is not loaded", HERE, &lend, &words)?;
    let table = "/lib/modules/$(uname -r)/modules.dep";
    host.exec_ok(
        &format!("cp {table} /tmp/table; sed -i '/vfio-pci.ko:/d' {table}"),
        SHORT,
    )?;
    let words = ["vfio-pci", "CONFIG_VFIO_PCI", "CONFIG_VFIO_IOMMU_TYPE1"];
    host.refuses("a kernel without vfio-pci", HERE, &lend, &words)?;
    host.exec_ok(&format!("cp /tmp/table {table}; modprobe vfio_pci"), SHORT)?;
    host.verdict()?;
    takes_and_gives_back(host, &format!("--vfio x={DRIVE}"))
}
