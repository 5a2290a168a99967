//! The RAM layout of a VM, from its size and chipset.

use farside_lender_protocol::RamRange;
use farside_qemu_configs::{Machine, ram_split};

/// First address of RAM above the PCI hole.
const HIGH_RAM: u64 = 4 << 30;

/// The guest-physical ranges of `ram` bytes.
pub fn ram_ranges(machine: Machine, ram: u64) -> Vec<RamRange> {
    let (low, high) = ram_split(machine, ram);
    [(0, low), (HIGH_RAM, high)]
        .into_iter()
        .filter(|(_, len)| *len != 0)
        .map(|(start, len)| RamRange { start, len })
        .collect()
}
