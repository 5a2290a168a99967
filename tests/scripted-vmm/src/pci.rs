//! Configuration space, as firmware and a Linux driver use it (PCI 3.0, 6).

use anyhow::{Context, Result, bail, ensure};

use crate::device::{CONFIG, Device};

// Own constants, not `farside-pci`'s: a test must not share the product's errors.

/// I/O space enable.
pub const IO: u16 = 1 << 0;
/// Memory space enable.
pub const MEMORY: u16 = 1 << 1;
/// Bus-master enable.
pub const BUS_MASTER: u16 = 1 << 2;
/// INTx disable.
pub const INTX_DISABLE: u16 = 1 << 10;

const COMMAND: u64 = 0x04;
const STATUS: u64 = 0x06;
const BAR: u64 = 0x10;
const CAPABILITIES: u64 = 0x34;
const CLASS: u64 = 0x08;
const HAS_CAPABILITIES: u16 = 1 << 4;
const MSIX: u8 = 0x11;
const MSIX_ENABLE: u16 = 1 << 15;
const BARS: u32 = 6;

/// Address range for BARs of up to [`LARGE`] bytes.
const BELOW_4G: u64 = 0xe000_0000;
/// Address range for larger BARs: above all RAM.
const ABOVE: u64 = 1 << 40;
const LARGE: u64 = 128 << 20;

/// A memory BAR and its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedBar {
    /// 0 to 5.
    pub bar: u32,
    /// Guest-physical address.
    pub gpa: u64,
    /// Bytes.
    pub size: u64,
}

/// The command register.
///
/// # Errors
/// When the connection is lost.
pub fn command(device: &mut Device) -> Result<u16> {
    read_u16(device, COMMAND)
}

/// Writes the command register.
///
/// # Errors
/// When the connection is lost.
pub fn set_command(device: &mut Device, command: u16) -> Result<()> {
    device.write(CONFIG, COMMAND, &command.to_le_bytes())
}

/// Class, subclass and programming interface.
///
/// # Errors
/// When the connection is lost.
pub fn class(device: &mut Device) -> Result<u32> {
    Ok(read_u32(device, CLASS)? >> 8)
}

/// Sizes the memory BARs and assigns their addresses, with memory space disabled.
///
/// # Errors
/// If the connection is lost, or a BAR does not retain its address.
pub fn place_bars(device: &mut Device) -> Result<Vec<PlacedBar>> {
    set_command(device, 0)?;
    let mut placed = Vec::new();
    let (mut below, mut above) = (BELOW_4G, ABOVE);
    let mut bar = 0;
    while bar < BARS {
        let at = BAR + 4 * u64::from(bar);
        let Some(found) = size_bar(device, at)? else {
            bar += 1;
            continue;
        };
        let next = if found.wide && found.size > LARGE {
            &mut above
        } else {
            &mut below
        };
        let gpa = next.next_multiple_of(found.size);
        *next = gpa + found.size;
        ensure!(
            found.wide || gpa + found.size <= 1 << 32,
            "BAR {bar} of {:#x} bytes does not fit below 4 GiB",
            found.size
        );
        write_u32(device, at, gpa as u32)?;
        let mut kept = u64::from(read_u32(device, at)? & !0xf);
        if found.wide {
            write_u32(device, at + 4, (gpa >> 32) as u32)?;
            kept |= u64::from(read_u32(device, at + 4)?) << 32;
        }
        ensure!(
            kept == gpa,
            "BAR {bar} was put at {gpa:#x} and is at {kept:#x}"
        );
        placed.push(PlacedBar {
            bar,
            gpa,
            size: found.size,
        });
        bar += if found.wide { 2 } else { 1 };
    }
    Ok(placed)
}

struct Sized {
    size: u64,
    wide: bool,
}

/// A memory BAR's size; `None` if it is unimplemented or I/O space.
fn size_bar(device: &mut Device, at: u64) -> Result<Option<Sized>> {
    write_u32(device, at, !0)?;
    let low = read_u32(device, at)?;
    if low == 0 || low & 1 == 1 {
        write_u32(device, at, 0)?;
        return Ok(None);
    }
    let wide = low & 0b110 == 0b100;
    let mut mask = u64::from(low & !0xf) | 0xffff_ffff << 32;
    if wide {
        write_u32(device, at + 4, !0)?;
        mask = mask & 0xffff_ffff | u64::from(read_u32(device, at + 4)?) << 32;
    }
    let size = mask.wrapping_neg();
    ensure!(
        size.is_power_of_two(),
        "the BAR register at {at:#x} has the mask {mask:#x}"
    );
    Ok(Some(Sized { size, wide }))
}

/// Sets or clears MSI-X enable. Returns the size of the MSI-X table.
///
/// # Errors
/// If the connection is lost, or the function has no MSI-X.
pub fn enable_msix(device: &mut Device, enable: bool) -> Result<u32> {
    let at = capability(device, MSIX)?.context("the function has no MSI-X capability")? + 2;
    let mut control = read_u16(device, at)?;
    let vectors = u32::from(control & 0x7ff) + 1;
    if enable {
        control |= MSIX_ENABLE;
    } else {
        control &= !MSIX_ENABLE;
    }
    device.write(CONFIG, at, &control.to_le_bytes())?;
    Ok(vectors)
}

/// The offset of a capability.
fn capability(device: &mut Device, id: u8) -> Result<Option<u64>> {
    for at in capabilities(device)? {
        if read_u16(device, at)? as u8 == id {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// The offsets of all capabilities.
///
/// # Errors
/// If the connection is lost, or their list has no end.
pub fn capabilities(device: &mut Device) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    if read_u16(device, STATUS)? & HAS_CAPABILITIES == 0 {
        return Ok(found);
    }
    let mut at = u64::from(read_u16(device, CAPABILITIES)? & 0xfc);
    // Configuration space has room for no more.
    for _ in 0..48 {
        if at == 0 {
            return Ok(found);
        }
        found.push(at);
        at = u64::from(read_u16(device, at)? >> 8 & 0xfc);
    }
    bail!("the list of capabilities has no end");
}

fn read_u16(device: &mut Device, at: u64) -> Result<u16> {
    let mut data = [0; 2];
    device.read(CONFIG, at, &mut data)?;
    Ok(u16::from_le_bytes(data))
}

fn read_u32(device: &mut Device, at: u64) -> Result<u32> {
    let mut data = [0; 4];
    device.read(CONFIG, at, &mut data)?;
    Ok(u32::from_le_bytes(data))
}

fn write_u32(device: &mut Device, at: u64, value: u32) -> Result<()> {
    device.write(CONFIG, at, &value.to_le_bytes())
}
