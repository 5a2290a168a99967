//! Reads and builds configuration spaces with their capability lists.

use std::ops::{Deref, DerefMut};

use crate::Bar;
use crate::regs::*;

/// Id and version of an extended capability, in its header (PCIe 7.6.3).
const EXTENDED_ID: u32 = 0x000f_ffff;

/// The registers of a configuration space of 256 or 4096 bytes: their values, or
/// a mask of their bits. Registers are little-endian (PCIe 7.5); offsets are in
/// bytes from the start of the space.
///
/// # Panics
///
/// Every access panics if the register is outside the space.
///
/// ```
/// use farside_pci::{ConfigImage, regs::*};
///
/// let mut image = ConfigImage::endpoint(0x1af4, 0x10f0, 0x01_08_02, &Default::default());
/// image.add_power_management(0x40).add_express(0x50, 4);
/// assert_eq!(image.find_capability(CAP_ID_PM, PM_SIZEOF), Some(0x40));
/// assert_eq!(image.u16(0x50 + EXP_LNKSTA), 4 << 4 | 3);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigImage(Vec<u8>);

impl ConfigImage {
    /// An endpoint's space of 4096 bytes with a type 0 header (PCIe 7.5.1):
    /// revision 1, subsystem IDs equal to the IDs, type bits of `bars`. `class` is
    /// the class code: base class in bits 23:16, sub-class in 15:8, programming
    /// interface in 7:0.
    pub fn endpoint(vendor: u16, device: u16, class: u32, bars: &[Option<Bar>; 6]) -> Self {
        let mut image = Self(vec![0; CFG_SPACE_EXP_SIZE]);
        image
            .set_u16(VENDOR_ID, vendor)
            .set_u16(DEVICE_ID, device)
            .set_u32(CLASS_REVISION, class << 8 | 1)
            .set_u16(SUBSYSTEM_VENDOR_ID, vendor)
            .set_u16(SUBSYSTEM_ID, device);
        for (index, bar) in bars.iter().enumerate() {
            if let Some(bar) = bar {
                image.set_u32(BASE_ADDRESS_0 + 4 * index, bar.kind.register_bits());
            }
        }
        image
    }

    /// The 8-bit register at `at`.
    pub fn u8(&self, at: usize) -> u8 {
        self.0[at]
    }

    /// The 16-bit register at `at`.
    pub fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.0[at], self.0[at + 1]])
    }

    /// The 32-bit register at `at`.
    pub fn u32(&self, at: usize) -> u32 {
        u32::from(self.u16(at)) | u32::from(self.u16(at + 2)) << 16
    }

    /// Sets the 8-bit register at `at`.
    pub fn set_u8(&mut self, at: usize, value: u8) -> &mut Self {
        self.0[at] = value;
        self
    }

    /// Sets the 16-bit register at `at`.
    pub fn set_u16(&mut self, at: usize, value: u16) -> &mut Self {
        self.0[at..at + 2].copy_from_slice(&value.to_le_bytes());
        self
    }

    /// Sets the 32-bit register at `at`.
    pub fn set_u32(&mut self, at: usize, value: u32) -> &mut Self {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self
    }

    /// Sets bits of the 32-bit register at `at`.
    pub fn or_u32(&mut self, at: usize, bits: u32) -> &mut Self {
        self.set_u32(at, self.u32(at) | bits)
    }

    /// Offset of the first capability with this ID (PCIe 7.5.1.1.11), if all its
    /// `length` bytes are inside the space. Terminates on a list that loops.
    pub fn find_capability(&self, id: u8, length: usize) -> Option<usize> {
        if self.u16(STATUS) & STATUS_CAP_LIST == 0 {
            return None;
        }
        let next = |at| usize::from(self.u8(at) & !0b11);
        let mut at = next(CAPABILITY_LIST);
        // No more than 48 fit.
        for _ in 0..48 {
            if at < STD_HEADER_SIZEOF {
                return None;
            }
            if self.u8(at) == id {
                return (at + length <= self.0.len()).then_some(at);
            }
            at = next(at + CAP_LIST_NEXT);
        }
        None
    }

    /// Table and pending bit array of the MSI-X capability at `at` (PCIe 7.7.2):
    /// BAR number, offset in the BAR and length, both in bytes.
    pub fn msix_areas(&self, at: usize) -> [(u8, u64, u64); 2] {
        let vectors = u64::from(self.u16(at + MSIX_FLAGS) & MSIX_FLAGS_QSIZE) + 1;
        let area = |register: u32, len| {
            let offset = u64::from(register & !MSIX_BIR);
            ((register & MSIX_BIR) as u8, offset, len)
        };
        [
            area(self.u32(at + MSIX_TABLE), vectors * MSIX_ENTRY_SIZE),
            area(self.u32(at + MSIX_PBA), vectors.div_ceil(64) * 8),
        ]
    }

    /// Starts a capability at `at` and appends it to the list.
    pub fn add_capability(&mut self, at: usize, id: u8) -> &mut Self {
        self.set_u8(at, id).link_capability(at)
    }

    /// Appends the capability at `at` to the list (PCIe 7.5.1.1.11).
    pub fn link_capability(&mut self, at: usize) -> &mut Self {
        let mut link = CAPABILITY_LIST;
        while self.u8(link) != 0 {
            link = usize::from(self.u8(link)) + CAP_LIST_NEXT;
        }
        let status = self.u16(STATUS) | STATUS_CAP_LIST;
        // Below 256, so it fits.
        self.set_u8(link, at as u8)
            .set_u8(at + CAP_LIST_NEXT, 0)
            .set_u16(STATUS, status)
    }

    /// Starts an extended capability of version 1 at `at` and appends it to the
    /// list.
    pub fn add_extended_capability(&mut self, at: usize, id: u16) -> &mut Self {
        self.set_u32(at, u32::from(id) | 1 << 16)
            .link_extended_capability(at)
    }

    /// Appends the extended capability at `at` to the list (PCIe 7.6.3). The list
    /// starts at 0x100, with the null capability (ID 0) if no other is there.
    pub fn link_extended_capability(&mut self, at: usize) -> &mut Self {
        let mut last = CFG_SPACE_SIZE;
        self.set_u32(at, self.u32(at) & EXTENDED_ID);
        while self.u32(last) & !EXTENDED_ID != 0 {
            last = (self.u32(last) >> 20) as usize;
        }
        if last != at {
            // Below 4096, so it fits in 12 bits.
            self.or_u32(last, (at as u32) << 20);
        }
        self
    }

    /// Appends power management (PCIe 7.5.2): version 3, D0 and D3hot,
    /// No_Soft_Reset, no PME.
    pub fn add_power_management(&mut self, at: usize) -> &mut Self {
        self.add_capability(at, CAP_ID_PM)
            .set_u16(at + PM_PMC, 3)
            .set_u16(at + PM_CTRL, PM_CTRL_NO_SOFT_RESET)
    }

    /// Appends PCI Express (PCIe 7.5.3): version 2, endpoint, function-level reset,
    /// a link of `lanes` lanes at 8 GT/s.
    pub fn add_express(&mut self, at: usize, lanes: u16) -> &mut Self {
        const SPEED_8GT: u16 = 3;
        let link = lanes << 4 | SPEED_8GT;
        self.add_capability(at, CAP_ID_EXP)
            .set_u16(at + EXP_FLAGS, 2)
            .set_u32(at + EXP_DEVCAP, EXP_DEVCAP_RBER | EXP_DEVCAP_FLR)
            .set_u16(at + EXP_DEVCTL, EXP_DEVCTL_DEFAULT)
            .set_u32(at + EXP_LNKCAP, link.into())
            .set_u16(at + EXP_LNKSTA, link)
            // Supported speeds: 2.5, 5 and 8 GT/s.
            .set_u32(at + EXP_LNKCAP2, 0b111 << 1)
            .set_u16(at + EXP_LNKCTL2, SPEED_8GT)
    }

    /// Appends MSI-X (PCIe 7.7.2) with 1 to 2048 vectors. `table` and `pba` are
    /// offsets in BAR `bar`, in bytes: multiples of 8 below 4 GiB.
    pub fn add_msix(
        &mut self,
        at: usize,
        vectors: u16,
        bar: u8,
        table: u64,
        pba: u64,
    ) -> &mut Self {
        self.add_capability(at, CAP_ID_MSIX)
            .set_u16(at + MSIX_FLAGS, vectors - 1)
            .set_u32(at + MSIX_TABLE, table as u32 | u32::from(bar))
            .set_u32(at + MSIX_PBA, pba as u32 | u32::from(bar))
    }
}

impl From<Vec<u8>> for ConfigImage {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl Deref for ConfigImage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for ConfigImage {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bare() -> ConfigImage {
        ConfigImage::from(vec![0; CFG_SPACE_EXP_SIZE])
    }

    #[test]
    fn capabilities_are_listed_in_the_order_they_were_added() {
        let mut image = bare();
        assert_eq!(image.find_capability(CAP_ID_PM, 0), None);
        image.add_power_management(0x60).add_express(0x70, 1);
        image.add_msix(0x40, 2048, 4, 0, 0x8000);
        assert_eq!(image.u16(STATUS), STATUS_CAP_LIST);
        assert_eq!(
            [0x34, 0x61, 0x71, 0x41].map(|at| image.u8(at)),
            [0x60, 0x70, 0x40, 0]
        );
        assert_eq!(image.find_capability(CAP_ID_MSIX, 12), Some(0x40));
        assert_eq!(image.u32(0x40), 0x07ff_0011);
        assert_eq!((image.u32(0x44), image.u32(0x48)), (4, 0x8004));
    }

    #[test]
    fn the_extended_list_begins_at_0x100_whatever_is_there() {
        let mut image = bare();
        image.add_extended_capability(0x140, 0x0b);
        image.add_extended_capability(0x120, 0x03);
        assert_eq!(image.u32(0x100), 0x1400_0000);
        assert_eq!(image.u32(0x140), 0x1201_000b);
        assert_eq!(image.u32(0x120), 0x0001_0003);
        let mut image = bare();
        image.add_extended_capability(0x100, 0x01);
        image.add_extended_capability(0x140, 0x0b);
        assert_eq!(image.u32(0x100), 0x1401_0001);
        assert_eq!(image.u32(0x140), 0x0001_000b);
    }

    #[test]
    fn a_list_that_loops_ends() {
        let mut image = bare();
        image.add_capability(0x40, 0x05).add_capability(0x80, 0x11);
        image.set_u8(0x81, 0x40);
        assert_eq!(image.find_capability(0x11, 12), Some(0x80));
        assert_eq!(image.find_capability(0x10, 0), None);
    }

    #[test]
    fn only_a_whole_capability_of_a_listed_chain_is_found() {
        let mut image = ConfigImage::from(vec![0; CFG_SPACE_SIZE]);
        image.add_capability(0xf8, CAP_ID_PM);
        assert_eq!(image.find_capability(CAP_ID_PM, 8), Some(0xf8));
        assert_eq!(image.find_capability(CAP_ID_PM, 9), None);
        // Without the status bit there is no list, regardless of the pointer.
        image.set_u16(STATUS, 0);
        assert_eq!(image.find_capability(CAP_ID_PM, 8), None);
    }
}
