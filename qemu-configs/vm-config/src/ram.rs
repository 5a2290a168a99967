//! The RAM layout of a VM, from its size and chipset.

use farside_fabric::Iova;
use farside_lender_protocol::RamRange;
use farside_qemu_configs::{Machine, ram_split};

/// First address of RAM above the PCI hole.
const HIGH_RAM: Iova = Iova::new(4 << 30);

/// The ranges of `ram` bytes, at the IOVAs where windows map them.
pub fn ram_ranges(machine: Machine, ram: u64) -> Vec<RamRange> {
    let (low, high) = ram_split(machine, ram);
    [(Iova::new(0), low), (HIGH_RAM, high)]
        .into_iter()
        .filter(|(_, len)| *len != 0)
        .map(|(start, len)| RamRange { start, len })
        .collect()
}
