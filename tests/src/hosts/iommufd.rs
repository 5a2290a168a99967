//! One host whose kernel has iommufd: the same borrow through VFIO's newer interface. The
//! guest is the scripted VMM: the backend, which QEMU would talk to, is the same as with the
//! older interface.

use std::{fs::File, io::Read, time::Instant};

use anyhow::{Context, Result, ensure};
use farside_testbed::{IommufdModules, kernel_view::LiveMappings};
use serde_json::Value;

use super::{
    Set,
    facts::seconds,
    host::{Host, socket},
    play::{DEVICE, DRIVE, VM},
    scripted::Scripted,
    stage,
};
use crate::{BOOT, MIB, SHORT, sha256};

/// Kills three workers of the device, each as soon as it is there. The expression does not match this command.
const KILL_WORKERS: &str = "for n in 1 2 3; do
    until w=$(grep -l leas[e]-worker /proc/[0-9]*/cmdline | cut -d/ -f3) && [ \"$w\" ] && [ \"$w\" != \"$last\" ]; do
        sleep 0.05
    done
    kill -KILL $w || exit 1
    last=$w
done";

/// Two functions of a conventional PCI bus, and so of one group: VM, id, address.
const GROUPED: [(&str, &str, &str); 2] = [
    ("first", "one", "0000:01:01.0"),
    ("second", "two", "0000:01:02.0"),
];

/// Bytes that the guest writes and reads.
const IO: u64 = 8 * MIB;

/// Recorded facts. Unless stated otherwise, they come from the host's kernel.
#[derive(Clone, Debug, Default)]
pub struct IommufdFacts {
    /// Whether the lender reports that it uses iommufd, and the kernel has it.
    pub iommufd: bool,
    /// Whether the guest read back what it had written, and the image on the outermost
    /// machine contains it.
    pub checksum_ok: bool,
    /// Mappings in the device's domain before bus-master enable.
    pub mappings_before_bme: u64,
    /// Bytes mapped in the domain after bus-master enable.
    pub bytes_mapped_after_bme: u64,
    /// Guest RAM, as reported by the scripted VMM.
    pub guest_ram_bytes: u64,
    /// Bytes mapped in the domain after three workers were killed while the device wrote.
    pub bytes_mapped_after_kills: u64,
    /// Mappings after the guest's driver was unbound.
    pub mappings_after_unbind: u64,
    /// DMA of the device that the IOMMU refused.
    pub rogue_dma_faults: u64,
    /// The faults that `farside status` reports.
    pub rogue_faults_in_status: u64,
    /// Bytes of guest RAM changed by these accesses, as reported by the scripted VMM.
    pub rogue_bytes_written: u64,
    /// Interrupts that the device raised.
    pub msix_device: u64,
    /// Interrupts that the scripted VMM counted.
    pub msix_guest: u64,
    /// Resets of a bus for two VMs, which had a function each of a group that cannot be reset alone.
    pub bus_resets: u64,
    /// Total duration, seconds.
    pub wall_s: f64,
}

impl IommufdFacts {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let ram = self.guest_ram_bytes;
        let check = |what: &str, holds| (what.to_owned(), holds);
        vec![
            check("the lender used iommufd", self.iommufd),
            check(
                "the guest read what it wrote, and the image has it",
                self.checksum_ok,
            ),
            check(
                "nothing was mapped before bus-master enable",
                self.mappings_before_bme == 0,
            ),
            check(
                "then exactly guest RAM was",
                ram > 0 && self.bytes_mapped_after_bme == ram,
            ),
            check(
                "it was after workers were killed",
                self.bytes_mapped_after_kills == ram,
            ),
            check(
                "nothing was mapped after the driver let go",
                self.mappings_after_unbind == 0,
            ),
            check("DMA to a hole met the IOMMU", self.rogue_dma_faults > 0),
            check(
                "farside status shows it",
                self.rogue_faults_in_status >= self.rogue_dma_faults,
            ),
            check("it changed nothing", self.rogue_bytes_written == 0),
            check(
                "functions that cannot be reset alone were reset for each VM",
                self.bus_resets == 2,
            ),
            check(
                "the guest got each of the device's interrupts",
                self.msix_guest > 0 && self.msix_device == self.msix_guest,
            ),
        ]
    }
}

/// Lender, backend and a scripted guest on one host with these modules.
pub fn iommufd(set: &Set<'_>, modules: &IommufdModules) -> Result<IommufdFacts> {
    let started = Instant::now();
    let mut facts = IommufdFacts::default();
    let image = stage::image(set, "iommufd.img")?;
    (set.tell)("booting a host with iommufd");
    let builder = set.testbed.host_vm("iommufd").nested_guests(0);
    let builder = builder.iommufd(modules).args(stage::drive(&image)).args([
        "-device",
        "pcie-pci-bridge,id=conventional,addr=7",
        "-device",
        "edu,bus=conventional,addr=1",
        "-device",
        "edu,bus=conventional,addr=2",
    ]);
    let host = Host::launch(builder, set.programs)?;
    let played = (|| {
        let lender = host.lend(&format!("--name rack1 --vfio {DEVICE}={DRIVE}"))?;
        let log = host.exec_ok("ls /dev/iommu && cat /tmp/lender.log", SHORT)?;
        facts.iommufd = log.contains("through VFIO iommufd");
        let backend = host.serve(VM, DEVICE, "")?;
        let written = play(&host, set, &mut facts)?;
        let mut bytes = vec![0; IO as usize];
        File::open(&image)
            .and_then(|mut file| file.read_exact(&mut bytes))
            .with_context(|| format!("reading {}", image.display()))?;
        facts.checksum_ok &= written == sha256(&bytes);
        backend.stop()?;
        lender.stop()?;
        facts.bus_resets = share_a_group(&host, set)?;
        Ok(())
    })();
    played.map_err(|error: anyhow::Error| error.context(host.story()))?;
    host.shutdown()?;
    facts.wall_s = seconds(started.elapsed());
    Ok(facts)
}

/// Runs the scripted guest; returns the checksum of the data that it wrote.
fn play(host: &Host, set: &Set<'_>, facts: &mut IommufdFacts) -> Result<String> {
    host.trace_iommu()?;
    let mapped = || anyhow::Ok(LiveMappings::after(&host.iommu_trace()?));
    // Two windows: also RAM above 4 GiB.
    let mut vmm = Scripted::start(host, &socket(VM, DEVICE), "--ram 64M --low 32M")?;
    vmm.step("place")?;
    vmm.step("before-bme")?;
    facts.mappings_before_bme = mapped()?.count();
    (set.tell)("a scripted guest uses the device");
    vmm.step("bme")?;
    facts.bytes_mapped_after_bme = mapped()?.bytes();
    let io = vmm.step(&format!("io {}M", IO / MIB))?["io"].clone();
    facts.checksum_ok = io["checksum_ok"] == true;
    facts.msix_guest = number(&vmm.step("irqs")?["interrupts"]["sum"])?;
    facts.msix_device = interrupts(host)?;
    (set.tell)("the device's workers are killed while it writes");
    let killer = host.exec_start(KILL_WORKERS, BOOT)?;
    let io = vmm.step(&format!("io {}M", IO / MIB))?["io"].clone();
    facts.checksum_ok &= io["checksum_ok"] == true;
    let killed = killer.wait_for(BOOT)?;
    ensure!(killed.success(), "the workers were not killed: {killed}");
    let io = vmm.step(&format!("io {}M", IO / MIB))?["io"].clone();
    facts.checksum_ok &= io["checksum_ok"] == true;
    facts.bytes_mapped_after_kills = mapped()?.bytes();
    (set.tell)("a scripted guest points the device outside of its RAM");
    vmm.step("rogue hole")?;
    facts.rogue_dma_faults = host.wait_dmar_faults(DRIVE, 1)?;
    facts.rogue_faults_in_status = host.wait_faults_in_status(DEVICE, facts.rogue_dma_faults)?;
    vmm.step("unbind")?;
    facts.mappings_after_unbind = mapped()?.count();
    let report = vmm.quit()?;
    facts.guest_ram_bytes = number(&report["guest_ram_bytes"])?;
    facts.rogue_bytes_written = number(&report["rogue_bytes_written"])?;
    host.wait_returned(DEVICE)?;
    let written = io["sha256_pattern"].as_str();
    Ok(written.context("no sha256_pattern")?.to_owned())
}

/// Lends two functions of a group to one VM after the other. Returns how often their bus was reset.
fn share_a_group(host: &Host, set: &Set<'_>) -> Result<u64> {
    (set.tell)("two scripted guests use a function each of a group");
    let vfio = GROUPED.map(|(_, device, at)| format!("--vfio {device}={at}"));
    let lender = host.lend(&format!("--name rack1 {}", vfio.join(" ")))?;
    for (vm, device, _) in GROUPED {
        let backend = host.serve(vm, device, "")?;
        let mut vmm = Scripted::start(host, &socket(vm, device), "--ram 64M --low 32M")?;
        vmm.step("reset")?;
        let lent = host.lent(device)?;
        ensure!(lent.borrowed_by.as_deref() == Some(vm), "{lent:?}");
        vmm.quit()?;
        host.wait_returned(device)?;
        backend.stop()?;
    }
    let log = host.exec_ok("cat /tmp/lender.log", SHORT)?;
    lender.stop()?;
    Ok(log.matches("all functions on the bus of").count() as u64)
}

/// Interrupts of the device, as counted by the host.
fn interrupts(host: &Host) -> Result<u64> {
    let of_drive = format!("({DRIVE})");
    let interrupts = host.interrupts()?;
    let counts = interrupts
        .iter()
        .filter(|interrupt| interrupt.what.contains("vfio-msi"))
        .filter(|interrupt| interrupt.what.ends_with(&of_drive))
        .map(|interrupt| interrupt.count);
    Ok(counts.sum())
}

fn number(value: &Value) -> Result<u64> {
    value
        .as_u64()
        .with_context(|| format!("{value} is no number"))
}
