//! Device-specific quirks: functions that show their configuration space in a BAR.
//!
//! A driver that used it there would see the lender's addresses, and reach bits that the [policy](crate::policy) keeps
//! from it. So that part of the BAR is not mapped into the guest, and the backend serves it from the guest's
//! configuration space. QEMU does the same for `vfio-pci`, but not for `vfio-user-pci`.

use crate::{ConfigImage, regs::*};

/// A part of a BAR that shows the function's configuration space.
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

/// All that are known.
const QUIRKS: &[Quirk] = &[Quirk {
    vendor: 0x10de,
    class: 0x0300,
    bar: 0,
    offset: 0x8_8000,
    name: "NVIDIA graphics adapters",
}];

/// The part of a function's BAR that shows its configuration space.
///
/// ```
/// use farside_pci::{ConfigImage, ConfigMirror};
///
/// let gpu = ConfigImage::endpoint(0x10de, 0x1eb8, 0x03_00_00, &Default::default());
/// let mirror = ConfigMirror::of(&gpu).unwrap();
/// assert_eq!(mirror.read(0, 0x8_8004, 2), Some(4));
/// assert_eq!(mirror.read(0, 0x8_9000, 2), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigMirror {
    bar: u8,
    offset: u64,
    /// Where the MSI capability is.
    msi: Option<u64>,
}

impl ConfigMirror {
    /// That of the function with this configuration space, if it has one.
    pub fn of(config: &ConfigImage) -> Option<Self> {
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
        })
    }

    /// Its BAR, offset there and length, both in bytes.
    pub fn area(&self) -> (u8, u64, u64) {
        (self.bar, self.offset, CFG_SPACE_EXP_SIZE as u64)
    }

    /// Where in configuration space a read of `len` bytes of a BAR is served. `None`: from the BAR.
    pub fn read(&self, bar: u8, offset: u64, len: usize) -> Option<u64> {
        let at = offset.checked_sub(self.offset)?;
        let end = at.checked_add(len as u64)?;
        (bar == self.bar && end <= CFG_SPACE_EXP_SIZE as u64).then_some(at)
    }

    /// As [`read`](Self::read), for a write. One of the id of the MSI capability, which is read-only in configuration
    /// space, is the device's: NVIDIA's drivers acknowledge an interrupt by it.
    pub fn write(&self, bar: u8, offset: u64, len: usize) -> Option<u64> {
        let at = self.read(bar, offset, len)?;
        let acknowledges = |msi| msi <= at && at + len as u64 <= msi + MSI_FLAGS as u64;
        (!self.msi.is_some_and(acknowledges)).then_some(at)
    }
}

/// The table of them, in Markdown.
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
        "\n### Configuration space in BARs\n\n| functions | BAR | offset |\n| --- | --- | --- |\n{}",
        rows.collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu() -> ConfigImage {
        let mut image = ConfigImage::endpoint(0x10de, 0x1eb8, 0x03_00_00, &Default::default());
        image.add_capability(0x68, CAP_ID_MSI);
        image
    }

    #[test]
    fn functions_of_the_table_have_one() {
        assert_eq!(
            ConfigMirror::of(&gpu()).unwrap().area(),
            (0, 0x8_8000, 4096)
        );
        for (vendor, class) in [
            (0x10de, 0x03_02_00),
            (0x10de, 0x04_03_00),
            (0x8086, 0x03_00_00),
        ] {
            let other = ConfigImage::endpoint(vendor, 1, class, &Default::default());
            assert_eq!(ConfigMirror::of(&other), None, "{vendor:04x} {class:06x}");
        }
    }

    #[test]
    fn accesses_inside_are_of_configuration_space() {
        let mirror = ConfigMirror::of(&gpu()).unwrap();
        assert_eq!(mirror.read(0, 0x8_8000, 8), Some(0));
        assert_eq!(mirror.write(0, 0x8_8ffc, 4), Some(0xffc));
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
    fn an_interrupt_is_acknowledged_at_the_device() {
        let mirror = ConfigMirror::of(&gpu()).unwrap();
        for (at, len, shown) in [
            (0x68, 1, None),
            (0x69, 1, None),
            (0x68, 2, None),
            (0x67, 1, Some(0x67)),
            (0x68, 4, Some(0x68)),
            (0x69, 2, Some(0x69)),
            (0x6a, 2, Some(0x6a)),
        ] {
            assert_eq!(mirror.write(0, 0x8_8000 + at, len), shown, "{at:#x}");
            assert_eq!(mirror.read(0, 0x8_8000 + at, len), Some(at));
        }
    }
}
