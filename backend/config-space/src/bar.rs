//! Base address registers (PCIe 7.5.1.2.1).
//!
//! The lowest n bits of a BAR of 2ⁿ bytes are read-only, which makes sizing (write all
//! ones, read back) work.

use farside_pci::regs::{BASE_ADDRESS_0, COMMAND_IO, COMMAND_MEMORY};
use farside_pci::{Bar, BarKind, ConfigImage};

use super::ConfigSpaceError;
use super::builder::Builder;

/// Largest I/O BAR, bytes: x86 has 64 KiB of I/O space in all.
const IO_LIMIT: u64 = 1 << 16;

/// A BAR's address in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GuestBarAddress {
    /// In memory space: a guest-physical address.
    Memory(u64),
    /// In I/O space.
    Io(u32),
}

/// An implemented BAR.
#[derive(Clone, Debug)]
pub struct BarRegister {
    kind: BarKind,
    size: u64,
}

impl BarRegister {
    /// Whether the command register enables its decoding.
    pub fn decoded(&self, command: u16) -> bool {
        match self.kind {
            BarKind::Io => command & COMMAND_IO != 0,
            BarKind::Memory32 { .. } | BarKind::Memory64 { .. } => command & COMMAND_MEMORY != 0,
        }
    }

    /// The address that it holds, as BAR number `index`.
    pub fn address(&self, index: usize, image: &ConfigImage) -> GuestBarAddress {
        let low = image.u32(offset(index)) & self.kind.address_mask();
        match self.kind {
            BarKind::Io => GuestBarAddress::Io(low),
            BarKind::Memory32 { .. } => GuestBarAddress::Memory(low.into()),
            BarKind::Memory64 { .. } => {
                let high = image.u32(offset(index + 1));
                GuestBarAddress::Memory(u64::from(high) << 32 | u64::from(low))
            }
        }
    }

    /// Whether it is a memory BAR that contains `[start, start + length)`.
    pub fn holds_memory(&self, start: u64, length: u64) -> bool {
        !matches!(self.kind, BarKind::Io)
            && start
                .checked_add(length)
                .is_some_and(|end| end <= self.size)
    }
}

fn offset(index: usize) -> usize {
    BASE_ADDRESS_0 + 4 * index
}

pub fn build(
    builder: &mut Builder,
    bars: &[Option<Bar>; 6],
) -> Result<[Option<BarRegister>; 6], ConfigSpaceError> {
    builder.image[BASE_ADDRESS_0..offset(bars.len())].fill(0);
    let mut registers = [const { None }; 6];
    for (index, bar) in bars.iter().enumerate() {
        let Some(bar) = bar else { continue };
        check(index, bar, bars).map_err(|problem| ConfigSpaceError::Bar {
            bar: index,
            problem,
        })?;
        let address_bits = !(bar.size - 1); // a power of two
        let at = offset(index);
        let low = address_bits as u32;
        builder.image.set_u32(at, bar.kind.register_bits());
        builder.writable.set_u32(at, low & bar.kind.address_mask());
        if let BarKind::Memory64 { .. } = bar.kind {
            let high = (address_bits >> 32) as u32;
            builder.writable.set_u32(at + 4, high);
        }
        registers[index] = Some(BarRegister {
            kind: bar.kind,
            size: bar.size,
        });
    }
    Ok(registers)
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
