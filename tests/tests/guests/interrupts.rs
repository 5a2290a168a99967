//! Interrupt delivery by each path.

use anyhow::ensure;
use farside_irq_relay::IrqIndex;
use farside_tests::{Cluster, DmaTester, MIB, Machine, SHORT};
use libtest_mimic::Completion;

use crate::{check, passed};

/// `VFIO_PCI_INTX_IRQ_INDEX`.
const INTX: u8 = 0;
/// `VFIO_PCI_MSIX_IRQ_INDEX`.
const MSIX: u8 = 2;

pub fn intx_on_an_i440fx_carries_io(cluster: &Cluster) -> anyhow::Result<Completion> {
    const DISKS: [&str; 2] = ["disk0", "disk1"];
    let [first, second] = DISKS.map(|disk| cluster.image(disk, 64 * MIB));
    let first = format!("disk0={}", first?.display());
    // Its doorbells are polled, and with them how the driver takes completions, which ends an interrupt.
    let second = format!("disk1={},mapped-doorbells", second?.display());
    let _lender = cluster.lend(&["--nvme", &first, "--nvme", &second])?;
    let _backend = cluster.serve("a", &DISKS).start()?;
    let guest = cluster
        .guest("a")
        .machine(Machine::I440fx)
        .cpus(2)
        .append("pci=nomsi")
        .whole()
        .boot()?;
    for disk in ["nvme0n1", "nvme1n1"] {
        let disk = format!("/dev/{disk}");
        guest.wait_path(&disk, SHORT)?;
        check::io(&guest, &disk, 7)?;
    }
    let listed = guest.sh("lspci -v -d ::0108")?;
    ensure!(listed.matches("MSI-X: Enable-").count() == 2, "{listed}");
    for disk in DISKS {
        let lent = cluster.status()?.lent(disk)?;
        ensure!(
            matches!(*lent.interrupts, [(INTX, 0, count)] if count > 8),
            "{lent:?}"
        );
        check::open(cluster, &guest, disk, 1)?;
    }
    check::no_faults(cluster, &DISKS)?;
    guest.power_off()?;
    passed()
}

/// uio_pci_generic handles an interrupt only if Interrupt Status of the device is set, and
/// masks the line by INTx disable.
pub fn a_driver_of_a_shared_line_takes_its_interrupts(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let _lender = cluster.lend(&["--dma-test", "dma0"])?;
    let _backend = cluster.serve("a", &["dma0"]).start()?;
    let guest = cluster.guest("a").machine(Machine::I440fx).whole().boot()?;
    let tester = DmaTester::new(&guest)?;
    let bdf = &tester.bdf;
    guest.sh(&format!(
        "modprobe uio_pci_generic && mkfifo /tmp/events && \
         echo uio_pci_generic > /sys/bus/pci/devices/{bdf}/driver_override && \
         echo {bdf} > /sys/bus/pci/drivers_probe"
    ))?;
    guest.wait_path("/dev/uio0", SHORT)?;
    for count in 1..=3 {
        ensure!(!tester.interrupt_status()? && !tester.intx_disable()?);
        // Opened before the interrupt: a read returns when the count differs from that at
        // open.
        guest.sh(
            "exec 3</dev/uio0; (dd bs=4 count=1 <&3 | od -An -tu4 >/tmp/events) \
             </dev/null >/dev/null 2>&1 &",
        )?;
        tester.raise()?;
        let seen = check::number(&guest, "cat /tmp/events")?;
        ensure!(seen == count, "{seen} interrupts instead of {count}");
        ensure!(tester.intx_disable()?, "the driver has masked the line");
        ensure!(tester.interrupt_status()?, "which is still asserted");
        tester.acknowledge()?;
        ensure!(!tester.interrupt_status()?, "until it is acknowledged");
        tester.set_intx_disable(false)?;
    }
    let lent = cluster.status()?.lent("dma0")?;
    ensure!(
        matches!(*lent.interrupts, [(INTX, 0, count)] if count >= 3),
        "{lent:?}"
    );
    guest.power_off()?;
    passed()
}

pub fn relayed_interrupts_carry_io_and_are_counted_alike(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let _backend = cluster
        .serve("a", &["disk0"])
        .args(&["--interrupts", "relayed"])
        .start()?;
    let guest = cluster.guest("a").cpus(2).boot()?;
    guest.wait_disk()?;
    for cpu in [1, 2] {
        guest.sh(&format!(
            "taskset {cpu} dd if=/dev/nvme0n1 of=/dev/null bs=4k count=200 iflag=direct"
        ))?;
    }
    check::io(&guest, "/dev/nvme0n1", 8)?;
    // Interrupts that the lender has sent and the backend has not passed on yet are in
    // flight.
    let (sent, passed_on) =
        cluster.wait_status("equal counts", farside_tests::SHORT, |status| {
            let borrow = status.borrow("a", "disk0")?;
            let lent = status.lent("disk0")?;
            let sent: Vec<(u16, u64)> = lent
                .interrupts
                .iter()
                .filter(|(index, ..)| *index == MSIX)
                .map(|(_, vector, count)| (*vector, *count))
                .collect();
            let passed_on: Vec<(u16, u64)> = borrow
                .interrupts
                .fired
                .iter()
                .filter(|count| count.index == IrqIndex::Msix)
                .map(|count| (count.vector, count.fired))
                .collect();
            Ok((sent == passed_on && !sent.is_empty()).then_some((sent, passed_on)))
        })?;
    // The admin queue's vector and one for each CPU.
    ensure!(sent.len() == 3, "{sent:?}");
    // The guest cannot have counted more than were passed on.
    let counted = guest.sh("grep nvme0q /proc/interrupts")?;
    let seen: u64 = counted
        .lines()
        .flat_map(|line| line.split_whitespace().skip(1).take(2))
        .filter_map(|word| word.parse::<u64>().ok())
        .sum();
    let total: u64 = passed_on.iter().map(|(_, count)| count).sum();
    ensure!(
        seen > 300 && seen <= total,
        "{seen} seen in the guest, {total} passed on\n{counted}"
    );
    guest.power_off()?;
    passed()
}

/// While bus mastering is off, QEMU drops message-signalled interrupts. Linux's virtio-blk driver waits for each one, its
/// NVMe driver for 30 seconds.
pub fn interrupts_that_are_lost_without_bus_mastering_are_raised_again(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let disk = |name: &str| {
        let image = cluster.image(name, 64 * MIB)?;
        anyhow::Ok(format!("{name}={}", image.display()))
    };
    let _lender = cluster.lend(&["--nvme", &disk("disk0")?, "--virtio-blk", &disk("disk1")?])?;
    let _backend = cluster.serve("a", &["disk0", "disk1"]).start()?;
    let guest = cluster.guest("a").cpus(2).whole().boot()?;
    guest.sh("modprobe virtio_blk")?;
    for disk in ["nvme0n1", "vda"] {
        guest.wait_path(&format!("/dev/{disk}"), SHORT)?;
        let bdf = guest.sh(&format!(
            "readlink -f /sys/block/{disk} | grep -o '[0-9a-f]*:[0-9a-f:.]*' | tail -n 1"
        ))?;
        let load = format!(
            "fio --output-format=terse --name=load --filename=/dev/{disk} --direct=1 --ioengine=libaio --rw=randread \
             --bs=4k --iodepth=8 --numjobs=2 --time_based --runtime=8"
        );
        let load = guest.exec_start(&load, SHORT)?;
        // From its first request on, as long as it runs.
        let toggled = guest.sh(&format!(
            "runs() {{ grep -q -x fio /proc/[0-9]*/comm; }}
             until grep -q '[1-9]' /sys/block/{disk}/inflight; do :; done
             n=0; while runs; do
                 setpci -s {bdf} COMMAND=0:4; setpci -s {bdf} COMMAND=4:4; n=$((n + 1))
             done
             echo $n"
        ))?;
        // Killed at its timeout if it waits for an interrupt.
        let output = load.wait()?;
        ensure!(output.success(), "{disk}: {output}");
        let toggled: u32 = toggled.trim().parse()?;
        ensure!(
            toggled >= 5,
            "{disk}: bus mastering was off {toggled} times only"
        );
        let late = guest.exec(
            "dmesg | grep -i -e 'nvme.*timeout' -e 'completion polled'",
            SHORT,
        )?;
        ensure!(!late.success(), "{disk}: {late}");
    }
    guest.power_off()?;
    passed()
}
