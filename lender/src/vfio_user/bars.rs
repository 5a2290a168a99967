//! Addresses of a device's BARs at its server.
//!
//! The guest's are known to its VMM alone, and the server needs none of them: an access names its BAR. But a server may find it by
//! the addresses in its device's configuration space, as QEMU does, which does not decode a BAR at address 0.

use farside_pci::{Bar, BarKind, regs::BASE_ADDRESS_0};

/// The first address, and the end, for BARs of I/O, of 32-bit and of 64-bit memory: where VMs have no RAM, since a device may
/// refuse to transfer data to an address in its own BAR, as QEMU's NVMe controller does.
const IO: (u64, u64) = (0x1000, 1 << 16);
const MEMORY_32: (u64, u64) = (0xe000_0000, 0xfec0_0000);
const MEMORY_64: (u64, u64) = (1 << 45, 1 << 46);

/// What to write to which doubleword of configuration space, so that each BAR has a place of its own. One for which
/// there is no room has none.
pub(super) fn places(bars: &[Option<Bar>; 6]) -> Vec<(u64, u32)> {
    let (mut io, mut memory_32, mut memory_64) = (IO, MEMORY_32, MEMORY_64);
    let mut writes = Vec::new();
    for (register, bar) in (BASE_ADDRESS_0 as u64..).step_by(4).zip(bars) {
        let Some(bar) = bar else { continue };
        let (next, end) = match bar.kind {
            BarKind::Io => &mut io,
            BarKind::Memory32 { .. } => &mut memory_32,
            BarKind::Memory64 { .. } => &mut memory_64,
        };
        let at = next.checked_next_multiple_of(bar.size);
        let Some(at) = at.filter(|at| bar.size <= end.saturating_sub(*at)) else {
            continue;
        };
        *next = at + bar.size;
        writes.push((register, at as u32));
        if let BarKind::Memory64 { .. } = bar.kind {
            writes.push((register + 4, (at >> 32) as u32));
        }
    }
    writes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bar_has_a_place_of_its_own() {
        let prefetchable = false;
        let small = BarKind::Memory32 { prefetchable };
        let large = BarKind::Memory64 { prefetchable };
        let bars = [
            Some(Bar::new(0x4000, large)),
            None,
            Some(Bar::new(0x1000, small)),
            Some(Bar::new(0x10_0000, small)),
            Some(Bar::new(0x20, BarKind::Io)),
            Some(Bar::new(1 << 32, small)),
        ];
        let writes = places(&bars);
        let expected = [
            (0x10, 0),
            (0x14, 0x2000),
            (0x18, 0xe000_0000),
            (0x1c, 0xe010_0000),
            (0x20, 0x1000),
        ];
        assert_eq!(writes, expected, "and none for one without room");
    }
}
