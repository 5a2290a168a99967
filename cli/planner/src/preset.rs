//! Adapters by name, for planning without hardware.

use farside_fabric::{NtbLimits, VmShare};

/// An adapter, and where its numbers are from.
#[derive(Clone, Debug)]
pub struct Preset {
    /// The preset's name.
    pub name: &'static str,
    /// A one-line description.
    pub what: &'static str,
    /// Where the numbers are from, and which of them are our choice.
    pub source: &'static str,
    /// The numbers.
    pub limits: NtbLimits,
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A Dolphin PXH830 with an enlarged BAR; as [`NtbLimits::default`].
const PXH830: NtbLimits = NtbLimits {
    bar_size: 32 * GIB,
    lut_entries: 256,
    alignment: None,
    entries_per_window: None,
    requester_entries: 32,
    reserved_requesters: 2,
    per_vm: VmShare::ALL,
};

/// Two windows with a BAR and a translation register each.
const TWO_BARS: NtbLimits = NtbLimits {
    bar_size: 32 * GIB,
    lut_entries: 2,
    entries_per_window: Some(1),
    ..PXH830
};

/// The known adapters, the default first.
pub static PRESETS: [Preset; 6] = [
    Preset {
        name: "dolphin-pxh830",
        what: "Dolphin PXH830, its prefetchable BAR raised to 32 GiB",
        source: "32 requester entries, 2 of them the CPUs': Markussen et al., ACM TOCS 38, section \
                 8.6. 32 GiB where firmware decodes above 4 GiB: Dolphin's guide to the \
                 prefetchable memory size. 256 LUT entries are our choice",
        limits: PXH830,
    },
    Preset {
        name: "dolphin-as-delivered",
        what: "Dolphin PXH830 with its BAR of 256 MiB",
        source: "256 MiB from the factory: Dolphin's guide to the prefetchable memory size; raise \
                 it with `dis_config -spms`. Else as dolphin-pxh830",
        limits: NtbLimits {
            bar_size: 256 * MIB,
            ..PXH830
        },
    },
    Preset {
        name: "intel",
        what: "Intel Xeon: 2 windows of a BAR each, 16 GiB, aligned to it",
        source: "2 windows (3 with a split BAR, but those are 32-bit), the peer address a multiple \
                 of the BAR's size (of 4 KiB from Sapphire Rapids on): Linux, ntb_hw_gen1.c and \
                 ntb_hw_gen4.c. The BAR's size is set in firmware; 16 GiB is our choice. No requester \
                 table is known; windows are exhausted first",
        limits: TWO_BARS,
    },
    Preset {
        name: "amd",
        what: "AMD: 2 windows of a BAR each, 16 GiB, aligned to 4 KiB",
        source: "64-bit windows in BARs 2 and 4 (the first parts have a 32-bit one too), the peer \
                 address a multiple of 4 KiB: Linux, ntb_hw_amd.c. 16 GiB is our choice. No \
                 requester table is known; windows are exhausted first",
        limits: NtbLimits {
            alignment: Some(4096),
            ..TWO_BARS
        },
    },
    Preset {
        name: "switchtec",
        what: "Microchip Switchtec: BAR of 4 GiB, 512 LUT entries",
        source: "512 entries in the LUT and the requester table, of those 2 for root complex and \
                 host bridge; sizes are powers of two: Linux, switchtec.h and ntb_hw_switchtec.c. \
                 BARs are 4 GiB unless configured otherwise",
        limits: NtbLimits {
            bar_size: 4 * GIB,
            lut_entries: 512,
            requester_entries: 512,
            ..PXH830
        },
    },
    Preset {
        name: "switchtec-as-delivered",
        what: "Microchip Switchtec with the defaults of Linux's driver: windows of 2 MiB",
        source: "max_mw_size of ntb_hw_switchtec is 2 MiB unless raised. Else as switchtec",
        limits: NtbLimits {
            bar_size: 2 * MIB,
            lut_entries: 512,
            requester_entries: 512,
            ..PXH830
        },
    },
];

impl Preset {
    /// The adapter of that name.
    pub fn find(name: &str) -> Option<&'static Self> {
        PRESETS.iter().find(|preset| preset.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_can_be_and_the_first_is_the_default() {
        for preset in &PRESETS {
            assert_eq!(preset.limits.validate(), Ok(()), "{}", preset.name);
            assert_eq!(Preset::find(preset.name).unwrap().name, preset.name);
        }
        assert_eq!(PRESETS[0].limits, NtbLimits::default());
        assert!(Preset::find("nosuch").is_none());
    }
}
