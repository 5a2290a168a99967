//! Processes killed during I/O: afterwards the device cannot access any memory, the next
//! lender can lend it again, and its driver is rebound.

use anyhow::{Result, ensure};
use farside_testbed::kernel_view::LiveMappings;
use farside_tests::SHORT;

use crate::{
    host::{HERE, Host, Service},
    scripted::Scripted,
    stage::DRIVE,
};

/// Lender, backend and VMM, with I/O in progress.
struct Busy<'a> {
    lender: Service<'a>,
    backend: Service<'a>,
    vmm: Scripted<'a>,
}

impl<'a> Busy<'a> {
    fn new(host: &'a Host) -> Result<Self> {
        let lender = host.lend(HERE, &format!("--vfio disk0={DRIVE}"))?;
        let backend = host.serve(HERE, "a", "disk0", "")?;
        host.trace_iommu()?;
        let mut vmm = Scripted::start(host, HERE, "a", "disk0")?;
        vmm.step("driver")?;
        ensure!(mapped(host)? > 0, "nothing is mapped for the device");
        let done = interrupts(host)?;
        vmm.begin("interrupts 1000000")?;
        host.wait_for(&format!("[ $({INTERRUPTS}) -gt {} ]", done + 20))?;
        Ok(Self {
            lender,
            backend,
            vmm,
        })
    }
}

/// RAM of the scripted VMM's guest.
const RAM: u64 = 64 << 20;

/// The number of interrupts that the device raised through VFIO.
const INTERRUPTS: &str =
    "awk '/vfio-msix/ { for (i = 2; i <= 3; i++) n += $i } END { print n + 0 }' /proc/interrupts";

fn interrupts(host: &Host) -> Result<u64> {
    Ok(host.exec_ok(INTERRUPTS, SHORT)?.trim().parse()?)
}

/// Bytes mapped in the range of guest RAM, since the trace began. (The host's own drivers
/// map elsewhere: the kernel allocates IOVA downwards from 4 GiB.)
fn mapped(host: &Host) -> Result<u64> {
    let mappings = LiveMappings::after(&host.iommu_trace()?).ranges();
    let of_guests = |start: u64, end: u64| {
        let inside = mappings.iter().map(move |range| {
            let (from, to) = (range.start.max(start), range.end.min(end));
            to.saturating_sub(from)
        });
        inside.sum::<u64>()
    };
    Ok(of_guests(0, RAM) + of_guests(4 << 30, (4 << 30) + RAM))
}

/// Nothing is mapped; a lender can lend the device, and returns it.
fn all_is_well(host: &Host) -> Result<()> {
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
    let lender = host.lend(HERE, &format!("--vfio disk0={DRIVE}"))?;
    let backend = host.serve(HERE, "b", "disk0", "")?;
    let mut vmm = Scripted::start(host, HERE, "b", "disk0")?;
    vmm.step("io 1M")?;
    vmm.quit()?;
    backend.stop()?;
    lender.stop()?;
    ensure!(host.driver(DRIVE)? == "nvme");
    host.exec_ok(
        &format!(
            "for n in $(seq 100); do
                disk=$(ls /sys/bus/pci/devices/{DRIVE}/nvme)n1
                [ -b /dev/$disk ] && break; sleep 0.1
            done; dd if=/dev/$disk of=/dev/null bs=64k count=1 iflag=direct"
        ),
        SHORT,
    )?;
    Ok(())
}

/// Waits for more interrupts of the device.
fn goes_on(host: &Host) -> Result<()> {
    let done = interrupts(host)?;
    host.wait_for(&format!("[ $({INTERRUPTS}) -gt {} ]", done + 20))
}

/// The worker of the device. The expression does not match this command.
const WORKER: &str = "$(grep -l leas[e]-worker /proc/[0-9]*/cmdline | cut -d/ -f3)";

pub fn a_killed_lender_does_not_stop_its_function(host: &Host) -> Result<()> {
    let mut busy = Busy::new(host)?;
    let worker = host.exec_ok(&format!("echo {WORKER}"), SHORT)?;
    for _ in 0..3 {
        busy.lender.kill()?;
        goes_on(host)?;
        ensure!(mapped(host)? > 0, "nothing is mapped for the device");
        busy.lender = host.lend(HERE, &format!("--vfio disk0={DRIVE}"))?;
        goes_on(host)?;
        ensure!(host.exec_ok(&format!("echo {WORKER}"), SHORT)? == worker);
    }
    busy.vmm.kill()?;
    host.wait_free()?;
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
    busy.backend.stop()?;
    busy.lender.stop()?;
    all_is_well(host)
}

pub fn a_worker_that_is_killed_without_a_lender_is_taken_down_by_the_next(
    host: &Host,
) -> Result<()> {
    let busy = Busy::new(host)?;
    busy.lender.kill()?;
    host.exec_ok(&format!("kill -KILL {WORKER}"), SHORT)?;
    // The VMM holds a descriptor of the device, and with it the domain.
    let lender = host.lend(HERE, &format!("--vfio disk0={DRIVE}"))?;
    host.wait_free()?;
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
    busy.vmm.kill()?;
    busy.backend.stop()?;
    lender.stop()?;
    all_is_well(host)
}

pub fn a_killed_worker_leaves_no_mapping_to_the_vmm_that_lives(host: &Host) -> Result<()> {
    let busy = Busy::new(host)?;
    host.exec_ok(&format!("kill -KILL {WORKER}"), SHORT)?;
    // The VMM holds a descriptor of the device, and with it the domain.
    host.wait_free()?;
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
    let log = busy.lender.log()?;
    ensure!(log.contains("was ended by signal 9"), "{log}");
    busy.vmm.kill()?;
    busy.backend.stop()?;
    busy.lender.stop()?;
    all_is_well(host)
}

pub fn a_killed_backend_gives_its_device_back(host: &Host) -> Result<()> {
    let busy = Busy::new(host)?;
    busy.backend.kill()?;
    host.wait_free()?;
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
    busy.vmm.kill()?;
    busy.lender.stop()?;
    all_is_well(host)
}

pub fn a_killed_vmm_gives_its_device_back(host: &Host) -> Result<()> {
    let busy = Busy::new(host)?;
    busy.vmm.kill()?;
    host.wait_free()?;
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
    busy.backend.stop()?;
    busy.lender.stop()?;
    all_is_well(host)
}
