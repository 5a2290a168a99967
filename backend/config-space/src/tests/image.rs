//! Builds test images.

use farside_pci::{Bar, BarKind, Description};

/// Offsets in [`Image::nvme`].
pub const PM: u64 = 0x40;
pub const MSI: u64 = 0x50;
pub const VPD: u64 = 0x70;
pub const MSIX: u64 = 0xb0;
pub const PCIE: u64 = 0x80;
pub const VENDOR: u64 = 0xc0;
pub const AER: u64 = 0x140;
pub const SERIAL: u64 = 0x180;
pub const ARI: u64 = 0x1a0;

/// Builds a description.
#[derive(Clone)]
pub struct Image(pub Description);

impl Image {
    /// A header without capabilities.
    pub fn bare(size: usize) -> Self {
        let mut image = Self(Description {
            config: vec![0; size],
            bars: Default::default(),
            intx: false,
            msi_vectors: 0,
            msix_vectors: 0,
            summary: String::new(),
        });
        image.put_u32(0x00, 0x0010_1b36).put_u32(0x08, 0x0108_0202);
        image
    }

    /// An NVMe device with most capabilities.
    pub fn nvme() -> Self {
        let mut image = Self::bare(4096);
        image.0.bars[0] = Some(bar(
            0x4000,
            BarKind::Memory64 {
                prefetchable: false,
            },
        ));
        image.0.bars[2] = Some(bar(0x1000, BarKind::Memory32 { prefetchable: true }));
        image.0.bars[5] = Some(bar(0x20, BarKind::Io));
        image.0.intx = true;
        image.0.msi_vectors = 8;
        image.0.msix_vectors = 65;
        // Multi-function, pin A; every capability that a walk must link.
        image.put(0x0e, &[0x80]).put(0x3d, &[1]).put(0x3c, &[0xff]);
        image
            // Power management 1.2 with PME, D1 and D2, which are removed; state D3hot.
            .standard(PM, 0x01, VPD)
            .put_u32(PM as usize + 2, 0x0103_ffc3)
            // Hidden, in the middle of the list.
            .standard(VPD, 0x03, MSI)
            .put_u32(VPD as usize + 4, 0xdead_beef)
            // 64 bits, masks, 8 vectors, left enabled.
            .standard(MSI, 0x05, PCIE)
            .put(MSI as usize + 2, &0x01b7_u16.to_le_bytes())
            .put_u32(MSI as usize + 4, 0xfee0_0000)
            // Version 2 endpoint with FLR and extended tags.
            .standard(PCIE, 0x10, MSIX)
            .put(PCIE as usize + 2, &0x0002_u16.to_le_bytes())
            .put_u32(PCIE as usize + 4, 0x1000_8fe2)
            .put_u32(PCIE as usize + 8, 0x000f_2810)
            .put_u32(PCIE as usize + 0xc, 0x0040_0c43)
            .put_u32(PCIE as usize + 0x10, 0x1043_0000)
            .put_u32(PCIE as usize + 0x24, 0xffff_ffff)
            .link(0x34, PM);
        // The PCI Express structure ends at 0xbc: MSI-X is behind it.
        image.0.config[PCIE as usize + 1] = 0xd0;
        image
            .standard(0xd0, 0x11, VENDOR)
            .put(0xd2, &0xc040_u16.to_le_bytes())
            .put_u32(0xd4, 0x2000)
            .put_u32(0xd8, 0x3000)
            .standard(VENDOR, 0x09, 0)
            .put(VENDOR as usize + 2, &[8, 1, 2, 3, 4, 5]);
        image
            // SR-IOV first: the list's head is hidden.
            .extended(0x100, 0x10, AER)
            .put_u32(0x104, 0xffff_ffff)
            .extended(AER, 0x01, 0x200)
            .put_u32(AER as usize + 4, 0xffff_ffff)
            .extended(0x200, 0x18, SERIAL)
            .put_u32(0x204, 0x1003_1003)
            .extended(SERIAL, 0x03, ARI)
            .put_u32(SERIAL as usize + 4, 0x1234_5678)
            .extended(ARI, 0x0e, 0x300)
            .put_u32(ARI as usize + 4, 0xff03)
            .extended(0x300, 0x7777, 0);
        image
    }

    pub fn put(&mut self, at: usize, bytes: &[u8]) -> &mut Self {
        self.0.config[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    pub fn put_u32(&mut self, at: usize, value: u32) -> &mut Self {
        self.put(at, &value.to_le_bytes())
    }

    /// Sets a pointer to a standard capability; in the header, also its status bit.
    pub fn link(&mut self, at: usize, to: u64) -> &mut Self {
        self.0.config[6] |= 0x10;
        self.put(at, &[to as u8])
    }

    pub fn standard(&mut self, at: u64, id: u8, next: u64) -> &mut Self {
        self.put(at as usize, &[id, next as u8])
    }

    pub fn extended(&mut self, at: u64, id: u16, next: u64) -> &mut Self {
        self.put_u32(at as usize, u32::from(id) | 1 << 16 | (next as u32) << 20)
    }
}

pub fn bar(size: u64, kind: BarKind) -> Bar {
    Bar {
        size,
        kind,
        mappable: Vec::new(),
    }
}
