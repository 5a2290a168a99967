//! Where QEMU puts guest RAM.

use crate::Machine;

const GIB: u64 = 1 << 30;

/// Bytes of low memory (below 4 GiB) and of high memory (from 4 GiB) that a
/// machine gives a guest with `ram` bytes. The firmware's holes below 1 MiB
/// are not subtracted.
///
/// From QEMU's `pc_q35.c` and `pc_piix.c`, for machine types since 2.1 or so:
/// as much as fits below the PCI hole stays low; once that overflows, the
/// split moves down to a whole GiB.
///
/// ```
/// use farside_qemu_configs::{Machine, ram_split};
/// assert_eq!(ram_split(Machine::Q35, 512 << 20), (512 << 20, 0));
/// assert_eq!(ram_split(Machine::Q35, 5 << 30), (2 << 30, 3 << 30));
/// assert_eq!(ram_split(Machine::I440fx, 5 << 30), (3 << 30, 2 << 30));
/// ```
pub fn ram_split(machine: Machine, ram: u64) -> (u64, u64) {
    let (most, split) = match machine {
        Machine::Q35 => (0xb000_0000, 2 * GIB),
        Machine::I440fx => (0xe000_0000, 3 * GIB),
    };
    let low = if ram < most { ram } else { split };
    (low, ram - low)
}
