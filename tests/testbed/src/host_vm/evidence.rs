//! Output of the kernel of a VM that plays a host, parsed with [`crate::kernel_view`].

use std::ops::Range;

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
