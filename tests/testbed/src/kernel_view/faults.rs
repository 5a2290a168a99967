//! DMA faults, as Intel's IOMMU driver reports them in the kernel log.

/// One DMA fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DmarFault {
    /// Whether it was a write; otherwise a read.
    pub write: bool,
    /// The requesting function, as `0000:00:04.0`.
    pub device: String,
    /// The faulting IOVA.
    pub iova: u64,
    /// The fault reason as logged.
    pub reason: String,
}

/// The faults in a kernel log. The kernel rate-limits them: there may have been more.
pub fn dmar_faults(log: &str) -> Vec<DmarFault> {
    log.lines().filter_map(fault).collect()
}

/// Parses `… DMAR: [DMA Write NO_PASID] Request device [0000:00:04.0] fault addr
/// 0x200010000 [fault reason 0x05] PTE Write access is not set`; older kernels omit the
/// PASID.
fn fault(line: &str) -> Option<DmarFault> {
    let (_, fault) = line.split_once("DMAR: [DMA ")?;
    let (kind, rest) = fault.split_once("] Request device [")?;
    let (device, rest) = rest.split_once("] fault addr 0x")?;
    let (iova, rest) = rest.split_once(' ')?;
    let (_, reason) = rest.split_once("] ")?;
    Some(DmarFault {
        write: kind.starts_with("Write"),
        device: match device.matches(':').count() {
            1 => format!("0000:{device}"),
            _ => device.to_owned(),
        },
        iova: u64::from_str_radix(iova, 16).ok()?,
        reason: reason.trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_found_among_other_lines() {
        let log = "\
[    1.458682] DMAR: dmar0: Using Queued invalidation
[    9.1] DMAR: DRHD: handling fault status reg 2
[    9.2] DMAR: [DMA Write NO_PASID] Request device [0000:00:04.0] fault addr 0x200010000 [fault reason 0x05] PTE Write access is not set
[    9.3] DMAR: [DMA Read NO_PASID] Request device [00:05.0] fault addr 0x1000 [fault reason 0x06] PTE Read access is not set
";
        let faults = dmar_faults(log);
        assert_eq!(faults.len(), 2);
        assert_eq!(
            faults[0],
            DmarFault {
                write: true,
                device: "0000:00:04.0".to_owned(),
                iova: 0x2_0001_0000,
                reason: "PTE Write access is not set".to_owned(),
            }
        );
        assert!(!faults[1].write && faults[1].device == "0000:00:05.0");
    }
}
