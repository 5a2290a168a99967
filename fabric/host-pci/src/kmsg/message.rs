//! The lines with which IOMMU drivers report a refused DMA.
//!
//! Sources, in Linux: `drivers/iommu/intel/dmar.c` (`dmar_fault_do_one`; its
//! form changed in 5.7, 5.13 and later), `drivers/iommu/amd/iommu.c`
//! (`amd_iommu_report_page_fault`), `drivers/iommu/arm/arm-smmu-v3`
//! (`arm_smmu_dump_event`, since 6.15), `lib/ratelimit.c`.

use farside_pci::Bdf;

/// Longer lines are truncated: the parsed parts come first.
const MAX_LINE: usize = 1024;
/// AMD I/O virtualization 2.5.3: the event was a write.
const AMD_FLAG_WRITE: u64 = 0x20;

/// The kind of access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// To read memory.
    Read,
    /// To write memory.
    Write,
    /// Not in this line (Arm logs it in the next one).
    Unknown,
}

/// A DMA that an IOMMU refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelDmaFault {
    /// The function whose requester id the DMA had.
    pub bdf: Bdf,
    /// The address on the bus, in bytes; often rounded down to its page.
    pub iova: u64,
    /// The kind of access.
    pub access: Access,
    /// The reason, in the kernel's words.
    pub reason: String,
    /// The whole line.
    pub line: String,
}

/// A message-signalled interrupt that interrupt remapping refused: a write of
/// a device to the interrupt range (0xfeeX_XXXX) that the host did not set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockedInterrupt {
    /// The function whose requester id the write had.
    pub bdf: Bdf,
    /// The remapping table index in the write.
    pub index: u64,
    /// The reason, in the kernel's words.
    pub reason: String,
    /// The whole line.
    pub line: String,
}

/// DMA events in the kernel's log.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelEvent {
    /// An IOMMU refused a DMA.
    Fault(KernelDmaFault),
    /// Interrupt remapping refused an interrupt.
    BlockedInterrupt(BlockedInterrupt),
    /// The number of lines that an IOMMU driver suppressed since its last ones. An upper bound for
    /// the unlogged faults of all functions: VT-d also counts a line for each run of its handler.
    Suppressed(u64),
    /// The number of records of any kind that were overwritten before they were read.
    Lost(u64),
}

/// Reads the text of a record that the kernel wrote; `device` is the function in its metadata.
/// Returns `None` if it is not about DMA.
pub fn parse_message(text: &str, device: Option<Bdf>) -> Option<KernelEvent> {
    let line = cut(text);
    intel(line)
        .or_else(|| amd(line, device))
        .or_else(|| arm(line))
        .or_else(|| suppressed(line))
}

/// `DMAR: [DMA Write NO_PASID] Request device [0000:00:04.0] fault addr 0x1000
/// [fault reason 0x05] PTE Write access is not set`, and older forms.
fn intel(line: &str) -> Option<KernelEvent> {
    // Anchored: a line may quote a string of a device.
    let rest = line.strip_prefix("dmar: ").unwrap_or(line);
    let rest = rest.strip_prefix("DMAR:")?.trim_start();
    let (what, rest) = rest.strip_prefix('[')?.split_once(']')?;
    let rest = after(rest, "Request device [")?;
    let (device, rest) = rest.split_once(']')?;
    let bdf = device.parse().ok()?;
    // Everything after the address, or after the index, is the reason.
    let reason = |rest: &str| match rest.split_once('[') {
        Some((_, tail)) => format!("[{}", tail.trim_end()),
        None => String::new(),
    };
    let line = line.to_owned();
    if what == "INTR-REMAP" {
        let rest = after(rest, "fault index ")?;
        return Some(KernelEvent::BlockedInterrupt(BlockedInterrupt {
            bdf,
            index: leading_hex(rest)?,
            reason: reason(rest),
            line,
        }));
    }
    let mut words = what.strip_prefix("DMA ")?.split(' ');
    let access = match words.next()? {
        "Read" => Access::Read,
        "Write" => Access::Write,
        _ => Access::Unknown,
    };
    let rest = after(rest, "fault addr ")?;
    Some(KernelEvent::Fault(KernelDmaFault {
        bdf,
        iova: leading_hex(rest)?,
        access,
        reason: reason(rest),
        line,
    }))
}

/// `vfio-pci 0000:04:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0013
/// address=0x1000 flags=0x0020]`, or with `device=04:00.0` where the kernel has no
/// device to name.
fn amd(line: &str, marked: Option<Bdf>) -> Option<KernelEvent> {
    let (before, rest) = line.split_once("AMD-Vi: Event logged [")?;
    // Anchored: before it is nothing, or the driver and the address of a function or an IOMMU.
    let named = match before {
        "" => None,
        before => {
            let (_driver, named) = before.strip_suffix(": ")?.split_once(' ')?;
            let bdf = named.parse::<Bdf>().ok();
            if bdf.is_none() && !named.starts_with("ivhd") {
                return None;
            }
            bdf
        }
    };
    // Old kernels print the closing bracket on a separate line.
    let event = rest.split(']').next()?;
    let (name, fields) = event.split_once(' ')?;
    let field = |key: &str| {
        fields
            .split([' ', ','])
            .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    };
    let bdf = field("device")
        .and_then(|device| device.parse().ok())
        .or(named)
        .or(marked)?;
    let iova = leading_hex(field("address")?)?;
    let access = match field("flags").and_then(leading_hex) {
        Some(flags) if flags & AMD_FLAG_WRITE != 0 => Access::Write,
        Some(_) => Access::Read,
        None => Access::Unknown,
    };
    Some(KernelEvent::Fault(KernelDmaFault {
        bdf,
        iova,
        access,
        reason: name.to_owned(),
        line: line.to_owned(),
    }))
}

/// `arm-smmu-v3 arm-smmu-v3.0.auto: event: F_TRANSLATION client: 0000:04:00.0 sid:
/// 0x400 ssid: 0x0 iova: 0x1000 ipa: 0x0`. Older kernels dump numbers that name no
/// device.
fn arm(line: &str) -> Option<KernelEvent> {
    if !line.starts_with("arm-smmu-v3 ") {
        return None;
    }
    let (reason, rest) = after(line, ": event: ")?.split_once(" client: ")?;
    let (client, rest) = rest.split_once(' ')?;
    Some(KernelEvent::Fault(KernelDmaFault {
        bdf: client.parse().ok()?,
        iova: leading_hex(after(rest, "iova: ")?)?,
        access: Access::Unknown,
        reason: reason.to_owned(),
        line: line.to_owned(),
    }))
}

/// `dmar_fault: 29 callbacks suppressed`; other parts of the kernel log the same,
/// under their own functions' names.
fn suppressed(line: &str) -> Option<KernelEvent> {
    let (function, rest) = line.split_once(": ")?;
    let of_an_iommu = ["dmar_", "amd_iommu_", "arm_smmu_", "iommu_"]
        .iter()
        .any(|prefix| function.starts_with(prefix));
    let count = rest.strip_suffix(" callbacks suppressed")?;
    of_an_iommu
        .then(|| count.parse().ok().map(KernelEvent::Suppressed))
        .flatten()
}

fn after<'a>(text: &'a str, mark: &str) -> Option<&'a str> {
    text.split_once(mark).map(|(_, rest)| rest)
}

/// The hexadecimal number at the start, with or without `0x`.
fn leading_hex(text: &str) -> Option<u64> {
    let text = text.strip_prefix("0x").unwrap_or(text);
    let end = text
        .find(|c: char| !c.is_ascii_hexdigit())
        .unwrap_or(text.len());
    u64::from_str_radix(text.get(..end)?, 16).ok()
}

fn cut(text: &str) -> &str {
    if text.len() <= MAX_LINE {
        return text;
    }
    let mut end = MAX_LINE;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests;
