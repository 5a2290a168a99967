//! Device-specific quirks: functions with a mirror of their configuration space in a BAR.
//!
//! A driver that used the mirror of a borrowed function would see the lender's addresses, and reach bits that the
//! [policy](crate::policy) keeps from it. So the backend does not offer that part of the BAR for mapping, and serves it
//! from the guest's configuration space. QEMU does the same for `vfio-pci`, but not for `vfio-user-pci`.

use std::ops::Range;

use crate::{ConfigImage, forwarding, regs::*};

/// A kind of function with a mirror of its configuration space.
struct Quirk {
    /// Vendor id.
    vendor: u16,
    /// Base class and sub-class.
    class: u16,
    bar: u8,
    /// Bytes from the start of the BAR, a multiple of 4096.
    offset: u64,
    name: &'static str,
}

/// The kinds of functions with a mirror.
const QUIRKS: &[Quirk] = &[Quirk {
    vendor: 0x10de,
    class: 0x0300,
    bar: 0,
    offset: 0x8_8000,
    name: "NVIDIA's VGA controllers",
}];

/// Bytes of a mirror.
const SIZE: u64 = CFG_SPACE_EXP_SIZE as u64;

/// A mirror of a function's configuration space in one of its BARs.
///
/// ```
/// use farside_pci::{ConfigImage, ConfigMirror};
///
/// let gpu = ConfigImage::endpoint(0x10de, 0x1eb8, 0x03_00_00, &Default::default());
/// let mirror = ConfigMirror::of(&gpu).unwrap();
/// assert_eq!(mirror.read(0, 0x8_8004, 2), Some(4));
/// assert_eq!(mirror.read(0, 0x8_9000, 2), None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigMirror {
    bar: u8,
    offset: u64,
    /// The offset of the MSI capability.
    msi: Option<u64>,
    /// Registers outside capabilities, which only the device knows.
    private: Vec<Range<u64>>,
}

impl ConfigMirror {
    /// The mirror that a function with this configuration space has. `None` also for one that has neither 256 nor 4096 bytes.
    pub fn of(config: &ConfigImage) -> Option<Self> {
        if ![CFG_SPACE_SIZE, CFG_SPACE_EXP_SIZE].contains(&config.len()) {
            return None;
        }
        let class = (config.u32(CLASS_REVISION) >> 16) as u16;
        let vendor = config.u16(VENDOR_ID);
        let quirk = QUIRKS
            .iter()
            .find(|it| (it.vendor, it.class) == (vendor, class))?;
        let msi = config.find_capability(CAP_ID_MSI, MSI_FLAGS);
        Some(Self {
            bar: quirk.bar,
            offset: quirk.offset,
            msi: msi.map(|at| at as u64),
            private: forwarding::extended_gaps(config),
        })
    }

    /// The BAR of the mirror, and its bytes there.
    pub fn area(&self) -> (u8, Range<u64>) {
        (self.bar, self.offset..self.offset + SIZE)
    }

    /// The offset in configuration space from which a read of `len` bytes of a BAR is served. `None`: the read is the
    /// BAR's, since it is outside the mirror or of a register outside capabilities from 0x100 on, as a driver finds private
    /// registers of the device there.
    pub fn read(&self, bar: u8, offset: u64, len: usize) -> Option<u64> {
        let at = offset.checked_sub(self.offset)?;
        let end = at.checked_add(len as u64)?;
        let is_private = |gap: &Range<u64>| gap.start <= at && end <= gap.end;
        let is_mirrored = bar == self.bar && end <= SIZE && !self.private.iter().any(is_private);
        is_mirrored.then_some(at)
    }

    /// As [`read`](Self::read), for a write. A write to the id of the MSI capability, which is read-only in configuration
    /// space, is the BAR's, too: drivers of NVIDIA's older devices acknowledge an interrupt by it. Those of newer ones write to
    /// a private register.
    pub fn write(&self, bar: u8, offset: u64, len: usize) -> Option<u64> {
        let at = self.read(bar, offset, len)?;
        let acknowledges = |msi| msi <= at && at + len as u64 <= msi + MSI_FLAGS as u64;
        (!self.msi.is_some_and(acknowledges)).then_some(at)
    }
}

/// The table of the mirrors, in Markdown.
pub(crate) fn markdown() -> String {
    let rows = QUIRKS.iter().map(|it| {
        let Quirk {
            vendor,
            class,
            bar,
            offset,
            name,
        } = it;
        format!("| {name} (vendor {vendor:#06x}, class {class:#06x}) | {bar} | {offset:#x} |\n")
    });
    format!(
        "\n### Mirrors in BARs\n\n| functions | BAR | offset |\n| --- | --- | --- |\n{}",
        rows.collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSI: u64 = 0x68;
    /// In no capability.
    const REARM: u64 = 0x704;

    fn gpu() -> ConfigImage {
        let mut image = ConfigImage::endpoint(0x10de, 0x1eb8, 0x03_00_00, &Default::default());
        image
            .add_capability(MSI as usize, CAP_ID_MSI)
            .add_express(0x78, 1)
            // AER, and a hidden capability (data link feature), whose length is not known.
            .set_u32(0x100, 0x1 | 1 << 16 | 0x900 << 20)
            .set_u32(0x900, 0x25 | 1 << 16 | 0xb00 << 20)
            // Vendor-specific, of 16 bytes.
            .set_u32(0xb00, 0xb | 1 << 16)
            .set_u32(0xb04, 0x10 << 20);
        image
    }

    fn mirror() -> ConfigMirror {
        ConfigMirror::of(&gpu()).unwrap()
    }

    #[test]
    fn functions_of_the_table_have_one() {
        assert_eq!(mirror().area(), (0, 0x8_8000..0x8_9000));
        for (vendor, class) in [
            (0x10de, 0x03_02_00),
            (0x10de, 0x04_03_00),
            (0x8086, 0x03_00_00),
        ] {
            let other = ConfigImage::endpoint(vendor, 1, class, &Default::default());
            assert_eq!(ConfigMirror::of(&other), None, "{vendor:04x} {class:06x}");
        }
        for size in [0, 1, 255, 4095] {
            let short = ConfigImage::from(gpu()[..size].to_vec());
            assert_eq!(ConfigMirror::of(&short), None, "{size}");
        }
    }

    #[test]
    fn accesses_inside_are_of_configuration_space() {
        let mirror = mirror();
        for (at, len) in [(0, 8), (0xfc, 4), (0x100, 4), (0x900, 8), (0xb0c, 4)] {
            assert_eq!(mirror.read(0, 0x8_8000 + at, len), Some(at), "{at:#x}");
            assert_eq!(mirror.write(0, 0x8_8000 + at, len), Some(at), "{at:#x}");
        }
        for (bar, offset, len) in [
            (1, 0x8_8000, 4),
            (0, 0x8_7ffc, 8),
            (0, 0x8_8ffc, 8),
            (0, u64::MAX, 8),
        ] {
            assert_eq!(mirror.read(bar, offset, len), None, "{offset:#x}");
            assert_eq!(mirror.write(bar, offset, len), None, "{offset:#x}");
        }
    }

    #[test]
    fn registers_outside_capabilities_are_the_devices() {
        let mirror = mirror();
        for (at, len) in [(REARM, 1), (REARM, 4), (0x8fc, 4), (0xb10, 4), (0xffc, 4)] {
            assert_eq!(mirror.read(0, 0x8_8000 + at, len), None, "{at:#x}");
            assert_eq!(mirror.write(0, 0x8_8000 + at, len), None, "{at:#x}");
        }
        // They may be in the hidden capability, or are partly in the one after it.
        for (at, len) in [(0x910, 4), (0xafc, 4), (0xb0c, 8)] {
            assert_eq!(mirror.write(0, 0x8_8000 + at, len), Some(at), "{at:#x}");
        }
        let short = ConfigImage::from(gpu()[..256].to_vec());
        let mirror = ConfigMirror::of(&short).unwrap();
        assert_eq!(mirror.write(0, 0x8_8000 + 0xfc, 4), Some(0xfc));
        assert_eq!(mirror.write(0, 0x8_8000 + 0x100, 4), None);
    }

    #[test]
    fn an_interrupt_is_acknowledged_at_the_device() {
        let mirror = mirror();
        for (at, len, served) in [
            (MSI, 1, None),
            (MSI + 1, 1, None),
            (MSI, 2, None),
            (MSI - 1, 1, Some(MSI - 1)),
            (MSI, 4, Some(MSI)),
            (MSI + 1, 2, Some(MSI + 1)),
            (MSI + 2, 2, Some(MSI + 2)),
        ] {
            assert_eq!(mirror.write(0, 0x8_8000 + at, len), served, "{at:#x}");
            assert_eq!(mirror.read(0, 0x8_8000 + at, len), Some(at));
        }
    }
}
