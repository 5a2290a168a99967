//! What was seen.

use std::time::Duration;

use serde::Serialize;

/// What was seen of one borrowed drive. Unless said otherwise, the words of the
/// lending host's kernel.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Facts {
    /// Whether the guest read what it had written, and the image on the
    /// outermost machine has it.
    pub checksum_ok: bool,
    /// Mappings in the drive's IOMMU domain, and of guest RAM at the borrower,
    /// before the guest first set bus-master enable.
    pub dmar_mappings_before_bme: u64,
    /// Bytes mapped in the drive's domain while the guest used it.
    pub bytes_mapped_after_bme: u64,
    /// Guest RAM, as the guest's QEMU tells it.
    pub guest_ram_bytes: u64,
    /// Whether the mapped ranges of IOVA were the guest's ranges of RAM.
    pub ranges_equal: bool,
    /// Bytes of guest RAM mapped in the borrower's domain of the NTB endpoint
    /// (on one host: as `bytes_mapped_after_bme`).
    pub borrower_bytes_mapped: u64,
    /// Mappings, on both sides, after the guest's driver let the drive go.
    pub dmar_mappings_after_unbind: u64,
    /// DMA that the IOMMU refused, when the drive was told to reach outside of
    /// guest RAM.
    pub rogue_dma_faults: u64,
    /// Those that `farside status` shows.
    pub rogue_faults_in_status: u64,
    /// Bytes of guest RAM that changed by it.
    pub rogue_bytes_written: u64,
    /// Interrupts that the drive sent while the guest did its I/O.
    pub msix_device: u64,
    /// Those that the guest counted meanwhile.
    pub msix_guest: u64,
    /// From bus-master enable to a drive that can reach guest RAM, as the
    /// backend measured it.
    pub bme_to_ready_us: u64,
    /// From the nested QEMU's start to its guest's agent, seconds.
    pub nested_boot_s: f64,
    /// The guest's writing and reading of 8 MiB, seconds.
    pub nested_io_s: f64,
    /// All of it, seconds.
    pub wall_s: f64,
}

/// What was seen of two virtual functions, lent to a guest each.
#[derive(Clone, Debug, Default, Serialize)]
pub struct VfFacts {
    /// How many functions were lent at the same time.
    pub vfs_lent: u64,
    /// Bytes mapped for each, while both were used.
    pub bytes_mapped: Vec<u64>,
    /// Guest RAM of each, as its QEMU tells it.
    pub guest_ram_bytes: Vec<u64>,
    /// Whether a guest's frames came to the other.
    pub frames_arrived: bool,
    /// All of it, seconds.
    pub wall_s: f64,
}

impl Facts {
    /// What has to be so, and whether it is.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let ram = self.guest_ram_bytes;
        let check = |what: &str, holds| (what.to_owned(), holds);
        vec![
            check(
                "the guest read what it wrote, and the image has it",
                self.checksum_ok,
            ),
            check(
                "nothing was mapped before bus-master enable",
                self.dmar_mappings_before_bme == 0,
            ),
            check(
                "then exactly guest RAM was mapped for the drive",
                ram > 0 && self.bytes_mapped_after_bme == ram && self.ranges_equal,
            ),
            check(
                "and exactly guest RAM at the borrower",
                ram > 0 && self.borrower_bytes_mapped == ram,
            ),
            check(
                "nothing was mapped after the driver let go",
                self.dmar_mappings_after_unbind == 0,
            ),
            check(
                "DMA outside of RAM met the IOMMU, each time",
                self.rogue_dma_faults >= super::ROGUES,
            ),
            check(
                "farside status shows it",
                self.rogue_faults_in_status >= super::ROGUES,
            ),
            check("it changed nothing", self.rogue_bytes_written == 0),
            check(
                "the guest got each of the drive's interrupts",
                self.msix_device > 0 && self.msix_device == self.msix_guest,
            ),
        ]
    }
}

impl VfFacts {
    /// What has to be so, and whether it is.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let check = |what: &str, holds| (what.to_owned(), holds);
        vec![
            check("two were lent at the same time", self.vfs_lent == 2),
            check(
                "each reached exactly its guest's RAM",
                !self.bytes_mapped.is_empty() && self.bytes_mapped == self.guest_ram_bytes,
            ),
            check("each guest's frames came to the other", self.frames_arrived),
        ]
    }
}

/// A length of time as these facts tell it, to the millisecond.
pub(super) fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1000.0).round() / 1000.0
}
