//! Processes killed during I/O: afterwards the device cannot access any memory, the next
//! lender can lend it again, and its driver is rebound.

use anyhow::{Result, ensure};
use farside_testbed::kernel_view::LiveMappings;
use farside_tests::{SHORT, from_env};

use crate::{
    host::{HERE, Host, Service},
    scripted::Scripted,
    stage::DRIVE,
};

/// Lender, backend and VMM, with I/O in progress.
struct Busy<'a> {
    host: &'a Host,
    lender: Service<'a>,
    backend: Service<'a>,
    vmm: Scripted<'a>,
}

impl<'a> Busy<'a> {
    fn new(host: &'a Host) -> Result<Self> {
        Self::with(host, "")
    }

    fn with(host: &'a Host, serve: &str) -> Result<Self> {
        let lender = host.lend(HERE, &format!("--vfio disk0={DRIVE}"))?;
        let backend = host.serve(HERE, "a", "disk0", serve)?;
        host.trace_iommu()?;
        let mut vmm = Scripted::start(host, HERE, "a", "disk0")?;
        vmm.step("driver")?;
        ensure!(mapped(host)? > 0, "nothing is mapped for the device");
        let mut busy = Self {
            host,
            lender,
            backend,
            vmm,
        };
        busy.begin()?;
        Ok(busy)
    }

    fn begin(&mut self) -> Result<()> {
        self.vmm.begin("interrupts 1000000")?;
        goes_on(self.host)
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

/// Kills the process that `find` prints, and waits for the next one.
fn kill(host: &Host, find: &str) -> Result<()> {
    let killed = host.exec_ok(&format!("p=$({find}); kill -KILL $p; echo $p"), SHORT)?;
    let killed = killed.trim();
    ensure!(killed.parse::<u32>().is_ok(), "not one process: {killed}");
    host.wait_for(&format!(
        "p=$({find}); [ -n \"$p\" ] && [ \"$p\" != {killed} ]"
    ))
}

const FIND_WORKER: &str = "grep -l leas[e]-worker /proc/[0-9]*/cmdline | cut -d/ -f3";

/// The backend, which is a child of its keeper, as the spare is.
const FIND_BACKEND: &str = "for p in $(cat /proc/$(cat /run/backend-a.pid)/task/*/children); do
    [ $(cat /proc/$p/comm) = farside ] && echo $p; done";

/// Number of kills, unless `FARSIDE_KILLS` is set.
const KILLS: u64 = 50;

/// Kills in the life of a scripted VMM, which is limited.
const IN_A_LIFE: u64 = 20;

/// Kills the process that `find` prints while the function does DMA and raises interrupts, then while it writes data, which is compared.
fn goes_on_over(mut busy: Busy<'_>, find: &str) -> Result<()> {
    let host = busy.host;
    let kill = || kill(host, find);
    let mut left = from_env("FARSIDE_KILLS")?.unwrap_or(KILLS);
    while left > 0 {
        let now = left.min(IN_A_LIFE);
        left -= now;
        for _ in 0..now {
            kill()?;
            goes_on(host)?;
        }
        ensure!(mapped(host)? > 0, "nothing is mapped for the device");
        busy.vmm.kill()?;
        host.wait_free()?;
        ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
        busy.vmm = Scripted::start(host, HERE, "a", "disk0")?;
        busy.vmm.step("driver")?;
        if left > 0 {
            busy.begin()?;
        }
    }
    for _ in 0..5 {
        busy.vmm.begin("io 24M")?;
        kill()?;
        kill()?;
        let answer = busy.vmm.answer()?;
        ensure!(answer["ok"] == true, "{answer}");
    }
    // What it is refused from now on is refused as before.
    busy.vmm.step("unmap high")?;
    let faults = host.exec_ok(FAULTS, SHORT)?;
    busy.vmm.step("rogue 0x100000000")?;
    host.wait_for(&format!("[ $({FAULTS}) -gt {} ]", faults.trim()))?;
    busy.vmm.quit()?;
    host.wait_free()?;
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
    busy.backend.stop()?;
    busy.lender.stop()?;
    all_is_well(host)
}

const FAULTS: &str = "dmesg | grep 'DMAR: .DMA' | wc -l";

pub fn a_worker_that_is_killed_does_not_stop_its_function(host: &Host) -> Result<()> {
    let busy = Busy::new(host)?;
    goes_on_over(busy, FIND_WORKER)
}

pub fn a_backend_that_is_killed_does_not_stop_its_function(host: &Host) -> Result<()> {
    let busy = Busy::with(host, "--keeper")?;
    goes_on_over(busy, FIND_BACKEND)
}

pub fn a_function_goes_on_without_lender_and_worker(host: &Host) -> Result<()> {
    let mut busy = Busy::new(host)?;
    for _ in 0..3 {
        busy.lender.kill()?;
        host.exec_ok(&format!("kill -KILL {WORKER}"), SHORT)?;
        busy.lender = host.lend(HERE, &format!("--vfio disk0={DRIVE}"))?;
        host.wait_for(&format!("[ -n \"{WORKER}\" ]"))?;
        goes_on(host)?;
    }
    busy.vmm.kill()?;
    host.wait_free()?;
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
    busy.backend.stop()?;
    busy.lender.stop()?;
    all_is_well(host)
}

/// A function of a worker that is gone, and that its backend does not ask for.
fn kept<'a>(host: &'a Host) -> Result<Busy<'a>> {
    let busy = Busy::new(host)?;
    host.exec_ok("kill -STOP $(cat /run/backend-a.pid)", SHORT)?;
    host.exec_ok(&format!("kill -KILL {WORKER}"), SHORT)?;
    busy.lender.wait_log("kept for its VM")?;
    ensure!(mapped(host)? > 0, "nothing is mapped for the device");
    Ok(busy)
}

pub fn a_kept_function_is_stopped_when_its_backend_goes(host: &Host) -> Result<()> {
    let busy = kept(host)?;
    // The VMM holds a descriptor of the device, and with it the domain.
    busy.backend.kill()?;
    host.wait_free()?;
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
    busy.vmm.kill()?;
    busy.lender.stop()?;
    all_is_well(host)
}

pub fn a_kept_function_is_stopped_by_a_revocation(host: &Host) -> Result<()> {
    let busy = kept(host)?;
    host.exec_ok("farside revoke disk0 --limit 0", SHORT)?;
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
    busy.vmm.kill()?;
    busy.backend.kill()?;
    busy.lender.stop()?;
    all_is_well(host)
}

pub fn a_kept_function_is_stopped_when_its_lender_stops(host: &Host) -> Result<()> {
    let busy = kept(host)?;
    busy.lender.signal("TERM")?;
    // The VMM holds a descriptor of the device, and the lender waits for that a little.
    busy.lender.wait_log("has not released it yet")?;
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
    busy.vmm.kill()?;
    busy.backend.kill()?;
    busy.lender.ended()?;
    all_is_well(host)
}

/// The function does not go on in place of a worker that was to end the lease.
pub fn a_revocation_stops_a_function_whose_worker_hangs(host: &Host) -> Result<()> {
    let busy = Busy::new(host)?;
    host.exec_ok(&format!("kill -STOP {WORKER}"), SHORT)?;
    host.exec_ok("farside revoke disk0 --limit 0", SHORT)?;
    ensure!(mapped(host)? == 0, "mappings are left in the IOMMU");
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
