//! The scene: a guest uses the NVMe device, then a scripted VMM misuses it.

use std::{
    fs::File,
    io::Read,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::{Guest, Width, kernel_view::LiveMappings};
use serde_json::json;

use super::{
    ROGUES, Set,
    facts::{Facts, seconds},
    host::{Host, socket},
    scripted::Scripted,
};
use crate::{BOOT, MIB, SHORT, sha256, shared_ram};

/// Name of the borrowed device.
pub(super) const DEVICE: &str = "disk0";
/// Name of the guest.
pub(super) const VM: &str = "g";
/// Address of the NVMe device in the lending host.
pub(super) const DRIVE: &str = "0000:00:04.0";
/// Address of each host's NTB endpoint.
pub(super) const NTB: &str = "0000:00:10.0";
/// The endpoint's window BAR.
const NTB_WINDOW: usize = 2;
/// Guest RAM, bytes.
pub(super) const GUEST_RAM: u64 = 256 * MIB;
/// Bytes that the guest writes and reads. Through an NTB, the emulated NVMe device of the lending
/// host accesses them by eight bytes at a time, at some thirty microseconds each.
pub(super) const IO: u64 = 2 * MIB;
/// Timeout of transfers of megabytes in an emulated nested guest.
pub(super) const LONG: Duration = Duration::from_secs(600);
/// Bus-master enable in the command register.
pub(super) const BME: u64 = 1 << 2;

/// Kills the workers of a host's lender. The expression does not match this command.
pub(super) const KILL_WORKERS: &str =
    "kill -KILL $(grep -l leas[e]-worker /proc/[0-9]*/cmdline | cut -d/ -f3)";

/// Kills the backend of a VM, a child of its keeper.
pub(super) fn kill_backend(vm: &str) -> String {
    format!(
        "kill -KILL $(
            for p in $(cat /proc/$(cat /run/backend-{vm}.pid)/task/*/children); do
                [ $(cat /proc/$p/comm) != farside ] || echo $p
            done)"
    )
}

/// The hosts of a scene.
pub(super) struct Stage<'a> {
    pub(super) borrower: &'a Host,
    pub(super) lender: &'a Host,
    /// Whether an NTB joins them; otherwise both are one host.
    pub(super) ntb: bool,
    /// Whether guest RAM uses huge pages, which the borrower has reserved.
    pub(super) huge_pages: bool,
    /// The device's image, outside all VMs.
    pub(super) image: &'a Path,
}

impl Stage<'_> {
    fn trace(&self) -> Result<()> {
        self.lender.trace_iommu()?;
        if self.ntb {
            self.borrower.trace_iommu()?;
        }
        Ok(())
    }

    /// Mappings in the device's domain, and of guest RAM at the borrower.
    fn mapped(&self) -> Result<(LiveMappings, LiveMappings)> {
        let lender = LiveMappings::after(&self.lender.iommu_trace()?);
        if !self.ntb {
            return Ok((lender.clone(), lender));
        }
        // The lender's endpoint has a domain too, which maps the device's BARs.
        let window = self.lender.bar(NTB, NTB_WINDOW)?;
        let drive = lender.leading(|paddr| window.contains(&paddr));
        let borrower = LiveMappings::after(&self.borrower.iommu_trace()?);
        Ok((drive, borrower))
    }

    fn mappings(&self) -> Result<u64> {
        let (drive, ram) = self.mapped()?;
        Ok(match self.ntb {
            true => drive.count() + ram.count(),
            false => drive.count(),
        })
    }

    /// Interrupts of the device, as counted by the lending host.
    fn interrupts(&self) -> Result<u64> {
        let handler = format!("({DRIVE})");
        let interrupts = self.lender.interrupts()?;
        let of_drive = interrupts
            .iter()
            .filter(|interrupt| interrupt.what.contains("vfio-msi"))
            .filter(|interrupt| interrupt.what.ends_with(&handler));
        Ok(of_drive.map(|interrupt| interrupt.count).sum())
    }
}

/// A guest boots, finds the device, writes and reads, unbinds its driver, and powers off.
pub(super) fn guest_uses_drive(stage: &Stage<'_>, set: &Set<'_>, facts: &mut Facts) -> Result<()> {
    stage.trace()?;
    (set.tell)("starting a guest in the borrower");
    let started = Instant::now();
    let mut guest = stage
        .borrower
        .guest(VM)
        .memory(GUEST_RAM)
        .vfio_user(&socket(VM, DEVICE))
        .args(["-S"]);
    if stage.huge_pages {
        guest = guest.huge_pages();
    }
    let guest = guest
        .launch()
        .map_err(|error| anyhow::anyhow!("{error:#}{}", stage.borrower.story()))?;
    // QEMU has mapped all guest RAM, and the guest has not started.
    facts.dmar_mappings_before_bme = stage.mappings()?;
    guest.qmp().execute("cont", json!({}))?;
    guest.wait_agent(BOOT)?;
    facts.nested_boot_s = seconds(started.elapsed());

    let drive = find_drive(&guest)?;
    let command = guest.config_read(&drive, 4, Width::U16)?;
    if command & BME == 0 {
        // Firmware and kernel have sized and placed the BARs.
        facts.dmar_mappings_before_bme += stage.mappings()?;
    }
    (set.tell)("loading the guest's NVMe driver");
    guest.exec_ok("modprobe nvme", LONG)?;
    guest
        .wait_path("/dev/nvme0n1", LONG)
        .map_err(|error| anyhow::anyhow!("{error:#}{}", stage.borrower.story()))?;
    look_at_mappings(stage, &shared_ram(guest.qmp())?, facts)?;
    facts.bme_to_ready_us = stage.borrower.borrow(VM, DEVICE)?.bme_to_ready_us;

    (set.tell)("the guest writes and reads 2 MiB");
    let before = (stage.interrupts()?, guest_interrupts(&guest)?);
    let started = Instant::now();
    let read = write_and_read(&guest)?;
    facts.nested_io_s = seconds(started.elapsed());
    let after = (stage.interrupts()?, guest_interrupts(&guest)?);
    facts.msix_device = after.0 - before.0;
    facts.msix_guest = after.1 - before.1;

    (set.tell)("the guest lets the device go");
    guest.exec_ok(
        &format!("echo {drive} >/sys/bus/pci/devices/{drive}/driver/unbind"),
        LONG,
    )?;
    facts.dmar_mappings_after_unbind = stage.mappings()?;
    let ended = guest.shutdown(SHORT)?;
    ensure!(ended.success(), "QEMU in the borrower: {ended}");
    stage.lender.wait_returned(DEVICE)?;

    let mut image = vec![0; IO as usize];
    File::open(stage.image)
        .and_then(|mut file| file.read_exact(&mut image))
        .with_context(|| format!("reading {}", stage.image.display()))?;
    facts.checksum_ok = read.written == read.back && read.written == sha256(&image);
    Ok(())
}

/// Address of the guest's only NVMe controller.
pub(super) fn find_drive(guest: &Guest) -> Result<String> {
    let found = guest.exec_ok(
        "for device in /sys/bus/pci/devices/*; do
            [ $(cat $device/class) != 0x010802 ] || basename $device
        done",
        SHORT,
    )?;
    let found = found.trim();
    ensure!(!found.is_empty(), "the guest finds no NVMe device");
    Ok(found.to_owned())
}

/// Compares the mappings with `ram`, the guest's RAM ranges as reported by its QEMU.
fn look_at_mappings(stage: &Stage<'_>, ram: &[(u64, u64)], facts: &mut Facts) -> Result<()> {
    let (drive, borrower) = stage.mapped()?;
    facts.guest_ram_bytes = ram.iter().map(|(_, len)| len).sum();
    facts.bytes_mapped_after_bme = drive.bytes();
    facts.borrower_bytes_mapped = borrower.bytes();
    let mut expected: Vec<std::ops::Range<u64>> = Vec::new();
    for (start, len) in ram {
        match expected.last_mut() {
            Some(last) if last.end == *start => last.end += len,
            _ => expected.push(*start..start + len),
        }
    }
    facts.ranges_equal = drive.ranges() == expected;
    Ok(())
}

/// Interrupts of the device, as counted by the guest.
fn guest_interrupts(guest: &Guest) -> Result<u64> {
    let text = guest.exec_ok("cat /proc/interrupts", SHORT)?;
    let interrupts = farside_testbed::kernel_view::interrupts(&text);
    let of_drive = interrupts
        .iter()
        .filter(|interrupt| interrupt.what.contains("nvme0q"));
    Ok(of_drive.map(|interrupt| interrupt.count).sum())
}

/// Checksums of the data that the guest wrote, and of the data that it read back.
pub(super) struct Sums {
    pub(super) written: String,
    pub(super) back: String,
}

pub(super) fn write_and_read(guest: &Guest) -> Result<Sums> {
    let script = format!(
        "set -e
        dd if=/dev/urandom of=/tmp/noise bs=1M count={count} 2>/dev/null
        sha256sum </tmp/noise
        dd if=/tmp/noise of=/dev/nvme0n1 bs=256k oflag=direct 2>/dev/null
        sync
        dd if=/dev/nvme0n1 bs=256k count={blocks} iflag=direct 2>/dev/null | sha256sum",
        count = IO / MIB,
        blocks = IO / (256 << 10),
    );
    let printed = guest.exec_ok(&script, LONG)?;
    let mut sums = printed
        .lines()
        .map(|line| line.trim_end_matches(['-', ' ']).to_owned());
    Ok(Sums {
        written: sums.next().context("no first checksum")?,
        back: sums.next().context("no second checksum")?,
    })
}

/// A guest that makes the device access addresses outside its RAM: the hole behind it, and
/// addresses at which the lending host has its own memory.
pub(super) fn rogue(stage: &Stage<'_>, set: &Set<'_>, facts: &mut Facts) -> Result<()> {
    (set.tell)("a scripted guest points the device outside of its RAM");
    stage.trace()?;
    let logged = stage.lender.wait_dmar_faults(DRIVE, 0)?;
    let reported = stage.lender.wait_faults_in_status(DEVICE, 0)?;
    let mut vmm = Scripted::start(stage.borrower, &socket(VM, DEVICE), "--ram 64M --low 32M")?;
    // Stricter than with QEMU: a command is submitted while bus-master enable is clear.
    vmm.step("place")?;
    vmm.step("before-bme")?;
    facts.dmar_mappings_before_bme += stage.mappings()?;
    vmm.step("bme")?;
    vmm.step("io 1M")?;
    vmm.step("rogue hole")?;
    vmm.step("rogue 0x30000000")?;
    // High RAM that was just unmapped.
    vmm.step("unmap high")?;
    vmm.step("rogue 0x100000000")?;
    let new = stage.lender.wait_dmar_faults(DRIVE, logged + ROGUES)? - logged;
    facts.rogue_dma_faults = new;
    facts.rogue_faults_in_status =
        stage.lender.wait_faults_in_status(DEVICE, reported + new)? - reported;
    vmm.step("unbind")?;
    facts.dmar_mappings_after_unbind += stage.mappings()?;
    let report = vmm.quit()?;
    facts.rogue_bytes_written = report["rogue_bytes_written"]
        .as_u64()
        .with_context(|| format!("no rogue_bytes_written in {report}"))?;
    stage.lender.wait_returned(DEVICE)
}
