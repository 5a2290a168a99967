//! Base address registers (PCIe 7.5.1.2.1).
//!
//! A BAR of 2ⁿ bytes has its lowest n bits read-only, so sizing (write all
//! ones, read back) needs no code of its own.

use farside_pci::{Bar, BarKind};

use super::builder::{Builder, get_u32};
use super::{COMMAND_IO, COMMAND_MEMORY, ConfigSpaceError};

const FIRST: usize = 0x10;

/// Address bits of a memory BAR's low register.
const MEMORY_BITS: u32 = !0xf;
/// Address bits of an I/O BAR.
const IO_BITS: u32 = !0x3;

const IO_SPACE: u32 = 1 << 0;
const MEMORY_64: u32 = 0b10 << 1;
const PREFETCHABLE: u32 = 1 << 3;

/// Largest I/O BAR, bytes: x86 has 64 KiB of I/O space in all.
const IO_LIMIT: u64 = 1 << 16;

/// An address that the guest gave a BAR, on the guest's side of the borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GuestBarAddress {
    /// In memory space: a guest-physical address.
    Memory(u64),
    /// In I/O space.
    Io(u32),
}

/// A BAR that exists.
#[derive(Clone, Debug)]
pub struct BarRegister {
    kind: BarKind,
    size: u64,
}

impl BarRegister {
    /// Whether the function decodes it under this command register.
    pub fn decoded(&self, command: u16) -> bool {
        match self.kind {
            BarKind::Io => command & COMMAND_IO != 0,
            BarKind::Memory32 { .. } | BarKind::Memory64 { .. } => command & COMMAND_MEMORY != 0,
        }
    }

    /// The address in it, being BAR number `index`.
    pub fn address(&self, index: usize, bytes: &[u8]) -> GuestBarAddress {
        let low = get_u32(bytes, offset(index));
        match self.kind {
            BarKind::Io => GuestBarAddress::Io(low & IO_BITS),
            BarKind::Memory32 { .. } => GuestBarAddress::Memory((low & MEMORY_BITS).into()),
            BarKind::Memory64 { .. } => {
                let high = get_u32(bytes, offset(index + 1));
                GuestBarAddress::Memory(u64::from(high) << 32 | u64::from(low & MEMORY_BITS))
            }
        }
    }

    /// Whether `[start, start + length)` is in it and it is in memory space.
    pub fn holds_memory(&self, start: u64, length: u64) -> bool {
        !matches!(self.kind, BarKind::Io)
            && start
                .checked_add(length)
                .is_some_and(|end| end <= self.size)
    }
}

fn offset(index: usize) -> usize {
    FIRST + 4 * index
}

pub fn build(
    builder: &mut Builder,
    bars: &[Option<Bar>; 6],
) -> Result<[Option<BarRegister>; 6], ConfigSpaceError> {
    builder.zero(FIRST..offset(bars.len()));
    let mut registers = [const { None }; 6];
    for (index, bar) in bars.iter().enumerate() {
        let Some(bar) = bar else { continue };
        check(index, bar, bars).map_err(|problem| ConfigSpaceError::Bar {
            bar: index,
            problem,
        })?;
        let address_bits = !(bar.size - 1); // a power of two
        let at = offset(index);
        // Truncation keeps the low half, which is what is meant.
        let low = address_bits as u32;
        match bar.kind {
            BarKind::Io => {
                builder
                    .set_u32(at, IO_SPACE)
                    .writable_u32(at, low & IO_BITS);
            }
            BarKind::Memory32 { prefetchable } => {
                builder
                    .set_u32(at, flag(prefetchable))
                    .writable_u32(at, low & MEMORY_BITS);
            }
            BarKind::Memory64 { prefetchable } => {
                builder
                    .set_u32(at, MEMORY_64 | flag(prefetchable))
                    .writable_u32(at, low & MEMORY_BITS)
                    .writable_u32(at + 4, (address_bits >> 32) as u32);
            }
        }
        registers[index] = Some(BarRegister {
            kind: bar.kind,
            size: bar.size,
        });
    }
    Ok(registers)
}

fn flag(prefetchable: bool) -> u32 {
    if prefetchable { PREFETCHABLE } else { 0 }
}

fn check(index: usize, bar: &Bar, bars: &[Option<Bar>; 6]) -> Result<(), &'static str> {
    if !bar.size.is_power_of_two() {
        return Err("its size is not a power of two");
    }
    match bar.kind {
        BarKind::Io if bar.size < 4 => Err("an I/O BAR has at least 4 bytes"),
        BarKind::Io if bar.size > IO_LIMIT => Err("an I/O BAR has at most 64 KiB"),
        BarKind::Io => Ok(()),
        _ if bar.size < 16 => Err("a memory BAR has at least 16 bytes"),
        BarKind::Memory32 { .. } if bar.size > 1 << 31 => Err("a 32-bit BAR has at most 2 GiB"),
        BarKind::Memory32 { .. } => Ok(()),
        BarKind::Memory64 { .. } => match bars.get(index + 1) {
            None => Err("a 64-bit BAR needs the register after it, and is the last"),
            Some(Some(_)) => Err("a 64-bit BAR needs the register after it, which is another BAR"),
            Some(None) => Ok(()),
        },
    }
}
