//! Registers of PCI functions, through sysfs.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use farside_guest_agent::{BarAddress, Width};

use crate::mapping::Mapping;

/// Maps the whole BAR, whatever the offset.
pub fn map_bar(at: &BarAddress) -> Result<Mapping> {
    let path = format!("/sys/bus/pci/devices/{}/resource{}", at.bdf, at.bar);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| format!("opening {path}"))?;
    let len = file
        .metadata()
        .with_context(|| format!("asking for the size of {path}"))?
        .len();
    Mapping::of_file(&file, 0, len as usize).with_context(|| format!("mapping {path}"))
}

/// One read from a BAR.
pub fn mmio_read(at: &BarAddress, width: Width) -> Result<u64> {
    map_bar(at)?.read(at.offset as usize, width)
}

/// Writes the value to `count` consecutive locations of a BAR.
pub fn mmio_fill(at: &BarAddress, width: Width, value: u64, count: u64) -> Result<()> {
    let bar = map_bar(at)?;
    for i in 0..count {
        bar.write((at.offset + i * width.bytes()) as usize, width, value)?;
    }
    Ok(())
}

fn config_path(bdf: &str) -> String {
    format!("/sys/bus/pci/devices/{bdf}/config")
}

/// One read from configuration space.
pub fn config_read(bdf: &str, offset: u64, width: Width) -> Result<u64> {
    ensure!(
        width != Width::U64,
        "configuration space has no 8-byte access"
    );
    let path = config_path(bdf);
    let mut bytes = [0; 8];
    OpenOptions::new()
        .read(true)
        .open(&path)
        .and_then(|file| file.read_exact_at(&mut bytes[..width.bytes() as usize], offset))
        .with_context(|| format!("reading {path} at {offset:#x}"))?;
    Ok(u64::from_le_bytes(bytes))
}

/// One write to configuration space.
pub fn config_write(bdf: &str, offset: u64, width: Width, value: u64) -> Result<()> {
    ensure!(
        width != Width::U64,
        "configuration space has no 8-byte access"
    );
    let path = config_path(bdf);
    OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|file| file.write_all_at(&value.to_le_bytes()[..width.bytes() as usize], offset))
        .with_context(|| format!("writing {path} at {offset:#x}"))
}
