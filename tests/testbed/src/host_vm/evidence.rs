//! Output of the kernel of a VM that plays a host, parsed with [`crate::kernel_view`].

use std::ops::{Range, RangeInclusive};

use anyhow::{Context, Result};

use super::{HostVm, SHORT};
use crate::kernel_view::{self, DmarFault, Interrupt, TraceEvent};

const TRACING: &str = "/sys/kernel/tracing";

impl HostVm {
    /// Enables tracing of all changes of IOMMU domains; clears the trace buffer.
    pub fn trace_iommu(&self) -> Result<()> {
        let script = format!(
            "set -e; cd {TRACING}
            echo 16384 >buffer_size_kb
            echo 1 >events/iommu/map/enable
            echo 1 >events/iommu/unmap/enable
            echo >trace"
        );
        self.exec_ok(&script, SHORT)
            .context("tracing the IOMMU")
            .map(drop)
    }

    /// The changes of IOMMU domains since [`HostVm::trace_iommu`].
    pub fn iommu_trace(&self) -> Result<Vec<TraceEvent>> {
        // A copy: the kernel could add entries between two partial reads.
        let copy = "/tmp/iommu-trace";
        self.exec_ok(&format!("cat {TRACING}/trace >{copy}"), SHORT)?;
        kernel_view::iommu_trace(&String::from_utf8_lossy(&self.read_file(copy)?))
    }

    /// Counts the accesses of guests to some guest-physical addresses that KVM emulates, from now on.
    pub fn count_mmio(&self, gpas: &[RangeInclusive<u64>]) -> Result<()> {
        let ranges = gpas.iter().map(|range| {
            let (first, last) = (range.start(), range.end());
            format!("(gpa >= {first:#x} && gpa <= {last:#x})")
        });
        let filter = ranges.collect::<Vec<_>>().join(" || ");
        let script = format!(
            "set -e; cd {TRACING}
            echo 0 >events/kvm/kvm_mmio/enable
            echo '{filter}' >events/kvm/kvm_mmio/filter
            echo 1 >events/kvm/kvm_mmio/enable
            echo >trace"
        );
        self.exec_ok(&script, SHORT)
            .context("tracing KVM")
            .map(drop)
    }

    /// The accesses since [`HostVm::count_mmio`]: at least one for each, and none if there was none.
    pub fn counted_mmio(&self) -> Result<u64> {
        // The trace's head has the number of entries written, of those that it has kept too.
        let script =
            format!("grep -o 'entries-in-buffer/entries-written: [0-9]*/[0-9]*' {TRACING}/trace");
        let head = self.exec_ok(&script, SHORT)?;
        let written = head.trim().rsplit('/').next().map(str::parse);
        written
            .and_then(Result::ok)
            .with_context(|| format!("the head of KVM's trace: {head}"))
    }

    /// The count of each interrupt.
    pub fn interrupts(&self) -> Result<Vec<Interrupt>> {
        let text = self.exec_ok("cat /proc/interrupts", SHORT)?;
        Ok(kernel_view::interrupts(&text))
    }

    /// The DMA faults of the IOMMU so far, as far as the kernel logged them.
    pub fn dmar_faults(&self) -> Result<Vec<DmarFault>> {
        Ok(kernel_view::dmar_faults(&self.exec_ok("dmesg", SHORT)?))
    }

    /// The host-physical address range of a PCI function's BAR.
    pub fn bar(&self, bdf: &str, bar: usize) -> Result<Range<u64>> {
        let path = format!("/sys/bus/pci/devices/{bdf}/resource");
        let text = self.exec_ok(&format!("cat {path}"), SHORT)?;
        let range = text.lines().nth(bar).and_then(|line| {
            let mut words = line
                .split_whitespace()
                .map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16));
            Some(words.next()?.ok()?..words.next()?.ok()?.checked_add(1)?)
        });
        range.with_context(|| format!("{path} in VM {} has no BAR {bar}: {text}", self.name()))
    }
}
