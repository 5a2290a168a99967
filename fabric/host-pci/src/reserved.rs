//! IOVA ranges that a function's DMA cannot use.
//!
//! Source: Linux `Documentation/ABI/testing/sysfs-kernel-iommu_groups`,
//! `reserved_regions`.

use std::fmt;

use crate::error::PciError;
use crate::function::HostPci;
use farside_pci::Bdf;

/// The kernel reports a handful; firmware could describe more.
const MAX_REGIONS: usize = 1024;

/// The reason for a reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReservedKind {
    /// Firmware's own use of the device; must stay mapped one to one.
    Direct,
    /// As `Direct`, but the device's driver does not need it: VFIO ignores it.
    DirectRelaxable,
    /// Not translated: other devices' BARs where there is no ACS, or the like.
    Reserved,
    /// Interrupt messages; a write there is not a memory access.
    Msi,
    /// A kind newer than this code.
    Other(String),
}

/// A reserved range of IOVA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// The first IOVA, in bytes.
    pub start: u64,
    /// The last IOVA, in bytes: part of the range.
    pub end: u64,
    /// Why.
    pub kind: ReservedKind,
}

impl Reserved {
    /// Whether the range must not be mapped for a borrower's DMA.
    pub fn blocks_dma(&self) -> bool {
        self.kind != ReservedKind::DirectRelaxable
    }
}

impl fmt::Display for ReservedKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::DirectRelaxable => "direct-relaxable",
            Self::Reserved => "reserved",
            Self::Msi => "msi",
            Self::Other(word) => word,
        })
    }
}

impl fmt::Display for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x} ({})", self.start, self.end, self.kind)
    }
}

impl HostPci {
    /// The IOVA ranges that the function's group cannot use, in the kernel's order.
    ///
    /// # Errors
    /// As [`HostPci::group`]; [`PciError::Malformed`] for an unknown line, since DMA could write to
    /// an omitted range.
    pub fn reserved_regions(&self, bdf: &Bdf) -> Result<Vec<Reserved>, PciError> {
        self.must_exist(bdf)?;
        let id = self.require_group(bdf)?;
        let path = format!("sys/kernel/iommu_groups/{id}/reserved_regions");
        let text = self.tree.attribute(&path)?.unwrap_or_default();
        parse_reserved(&text).map_err(|line| {
            self.malformed(
                &path,
                line,
                "lines of first address, last address and kind were expected",
            )
        })
    }
}

/// Reads the text of a `reserved_regions` file, lines such as
/// `0x00000000fee00000 0x00000000feefffff msi`.
///
/// # Errors
/// The first malformed line.
pub fn parse_reserved(text: &str) -> Result<Vec<Reserved>, &str> {
    let mut regions = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        if regions.len() == MAX_REGIONS {
            return Err(line);
        }
        regions.push(parse_line(line).ok_or(line)?);
    }
    Ok(regions)
}

fn parse_line(line: &str) -> Option<Reserved> {
    let mut words = line.split_ascii_whitespace();
    let mut address = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    let (start, end) = (address()?, address()?);
    let kind = match words.next()? {
        "direct" => ReservedKind::Direct,
        "direct-relaxable" => ReservedKind::DirectRelaxable,
        "reserved" => ReservedKind::Reserved,
        "msi" => ReservedKind::Msi,
        other => ReservedKind::Other(other.chars().take(32).collect()),
    };
    (start <= end && words.next().is_none()).then_some(Reserved { start, end, kind })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_the_kernels_lines() {
        let text = "0x000000007d800000 0x000000007fffffff direct-relaxable\n\
                    0x00000000fee00000 0x00000000feefffff msi\n\
                    0x000000fd00000000 0x000000ffffffffff reserved\n";
        let regions = parse_reserved(text).unwrap();
        assert_eq!(
            regions[1],
            Reserved {
                start: 0xfee0_0000,
                end: 0xfeef_ffff,
                kind: ReservedKind::Msi
            }
        );
        let blocks: Vec<bool> = regions.iter().map(Reserved::blocks_dma).collect();
        assert_eq!(blocks, [false, true, true]);
        assert_eq!(parse_reserved(""), Ok(vec![]));
    }

    #[test]
    fn a_line_that_is_not_understood_is_not_skipped() {
        for line in [
            "fee00000 feefffff msi",
            "0x2 0x1 msi",
            "0x1 0x2",
            "0x1 0x2 msi extra",
            "0x10000000000000000 0x10000000000000001 msi",
        ] {
            let text = format!("0x1 0x2 msi\n{line}\n");
            assert_eq!(parse_reserved(&text), Err(line));
        }
        let many = "0x1 0x2 msi\n".repeat(MAX_REGIONS + 1);
        assert!(parse_reserved(&many).is_err());
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(start: u64, length in 0u64..1 << 40) {
            let end = start.saturating_add(length);
            let line = format!("{start:#018x} {end:#018x} msi");
            let expected = Reserved { start, end, kind: ReservedKind::Msi };
            prop_assert_eq!(parse_reserved(&line), Ok(vec![expected]));
        }

        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = parse_reserved(&text);
        }
    }
}
