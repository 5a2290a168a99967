//! Interrupt counts of functions bound to VFIO, from the kernel.
//!
//! vfio-pci names its handlers `vfio-msix[3](0000:00:04.0)`, `vfio-msi[0](...)` and
//! `vfio-intx(...)`; `/proc/interrupts` has a column for each CPU. A count is lost when its vector
//! is freed.

use crate::error::PciError;
use crate::function::HostPci;
use farside_pci::Bdf;

/// MSI-X has at most 2,048 vectors (PCI 3.0, 6.8.2); a shared INTx line adds one.
const MAX_COUNTS: usize = 4096;

/// The type of an interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IrqKind {
    /// The interrupt pin.
    Intx,
    /// A message, from the MSI capability.
    Msi,
    /// A message, from the MSI-X table.
    Msix,
}

/// The interrupt count of one vector, over all CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct InterruptCount {
    /// Its type.
    pub kind: IrqKind,
    /// The vector; 0 for INTx.
    pub vector: u32,
    /// The count since the vector was set up. A shared INTx line counts every device on it.
    pub count: u64,
}

impl HostPci {
    /// The interrupt count of each vector of the function that VFIO has set up, by kind and vector.
    ///
    /// # Errors
    /// `/proc/interrupts` cannot be read.
    pub fn interrupt_counts(&self, bdf: &Bdf) -> Result<Vec<InterruptCount>, PciError> {
        let table = self.tree.table("proc/interrupts")?.unwrap_or_default();
        Ok(parse_interrupts(&table, bdf))
    }
}

/// The counts of one function in the text of `/proc/interrupts`. Skips other lines, which do not
/// concern VFIO.
pub fn parse_interrupts(table: &str, bdf: &Bdf) -> Vec<InterruptCount> {
    let mut lines = table.lines();
    let cpus = lines
        .next()
        .map_or(0, |header| header.split_ascii_whitespace().count());
    let wanted = format!("({bdf})");
    let mut counts: Vec<InterruptCount> = lines
        .filter(|line| line.contains(&wanted))
        .filter_map(|line| parse_line(line, cpus, &wanted))
        .take(MAX_COUNTS)
        .collect();
    counts.sort();
    counts
}

fn parse_line(line: &str, cpus: usize, wanted: &str) -> Option<InterruptCount> {
    let (_number, rest) = line.split_once(':')?;
    // Some lines have fewer counts than CPUs; the first word that is no number
    // is the interrupt controller's name.
    let count = rest
        .split_ascii_whitespace()
        .take(cpus)
        .map_while(|word| word.parse::<u64>().ok())
        .fold(0u64, u64::saturating_add);
    let (kind, vector) = rest
        // Handlers that share a line are separated by commas.
        .split([' ', '\t', ','])
        .filter_map(|word| word.strip_suffix(wanted))
        .find_map(handler)?;
    Some(InterruptCount {
        kind,
        vector,
        count,
    })
}

/// `vfio-msix[3]` as kind and vector.
fn handler(name: &str) -> Option<(IrqKind, u32)> {
    if name == "vfio-intx" {
        return Some((IrqKind::Intx, 0));
    }
    let (kind, vector) = name.strip_suffix(']')?.split_once('[')?;
    let kind = match kind {
        "vfio-msix" => IrqKind::Msix,
        "vfio-msi" => IrqKind::Msi,
        _ => return None,
    };
    Some((kind, vector.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TABLE: &str = "            CPU0       CPU1
   0:         35          0  IR-IO-APIC    2-edge      timer
  16:          3          4  IR-IO-APIC   16-fasteoi   ehci_hcd:usb1, vfio-intx(0000:00:04.0)
  25:          7         11  IR-PCI-MSIX-0000:00:04.0    1-edge      vfio-msix[1](0000:00:04.0)
  24:          1          0  IR-PCI-MSIX-0000:00:04.0    0-edge      vfio-msix[0](0000:00:04.0)
  26:        500          0  IR-PCI-MSIX-0000:00:05.0    0-edge      vfio-msix[0](0000:00:05.0)
  27:          9          9  IR-PCI-MSI-0000:00:04.0    0-edge      vfio-msi[0](0000:00:04.0)
  28:          2          2  IR-PCI-MSI-0000:00:04.0    0-edge      nvme0q0
 NMI:          0          0   Non-maskable interrupts
 ERR:          0
";

    fn bdf() -> Bdf {
        "0000:00:04.0".parse().unwrap()
    }

    fn count(kind: IrqKind, vector: u32, count: u64) -> InterruptCount {
        InterruptCount {
            kind,
            vector,
            count,
        }
    }

    #[test]
    fn sums_the_cpus_of_each_vector_of_the_function() {
        assert_eq!(
            parse_interrupts(TABLE, &bdf()),
            [
                count(IrqKind::Intx, 0, 7),
                count(IrqKind::Msi, 0, 18),
                count(IrqKind::Msix, 0, 1),
                count(IrqKind::Msix, 1, 18),
            ]
        );
        assert_eq!(parse_interrupts("", &bdf()), []);
    }

    #[test]
    fn a_hardware_number_is_not_taken_for_a_count() {
        let one_cpu = "  CPU0\n  24:  5  9 1-edge  vfio-msix[0](0000:00:04.0)\n";
        assert_eq!(
            parse_interrupts(one_cpu, &bdf()),
            [count(IrqKind::Msix, 0, 5)]
        );
    }

    #[test]
    fn odd_lines_are_skipped() {
        for name in [
            "vfio-msix[](0000:00:04.0)",
            "vfio-msix[-1](0000:00:04.0)",
            "vfio-msix[99999999999](0000:00:04.0)",
            "vfio-msix](0000:00:04.0)",
            "other[0](0000:00:04.0)",
        ] {
            let table = format!("CPU0\n 1: 5 x {name}\n");
            assert_eq!(parse_interrupts(&table, &bdf()), [], "{name}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = parse_interrupts(&text, &bdf());
            let _ = parse_interrupts(&format!("CPU0\n{text}(0000:00:04.0)\n"), &bdf());
        }
    }
}
