//! Workloads for an NVMe device: data written and read back, and interrupts.

use std::time::Instant;

use anyhow::{Result, bail, ensure};

use crate::machine::Machine;
use crate::nvme::{Controller, DRIVER_RAM, Opcode, Transfer};
use crate::pattern::{Checksum, GUARD, Pattern};
use crate::ram::{HIGH, Layout, PAGE};
use crate::report::Io;
use crate::timing::micros;

/// A part of the data, and its location.
struct Chunk {
    /// Offset in the namespace, bytes.
    offset: u64,
    bytes: u64,
    /// Source GPA.
    source: u64,
    /// Destination GPA.
    target: u64,
}

/// Writes `bytes` of the pattern of `seed` to the namespace, and reads them back to other
/// memory. Sources and targets alternate between low and high RAM, and extend to the last
/// byte of both.
///
/// # Errors
/// If a command fails, or RAM or the namespace is too small. A data mismatch is not an
/// error: the checksums show it.
pub fn io(
    machine: &mut Machine,
    drive: &mut Controller,
    bytes: u64,
    offset: u64,
    seed: u64,
) -> Result<Io> {
    ensure!(
        bytes > 0 && bytes.is_multiple_of(PAGE),
        "{bytes:#x} bytes of data are no whole pages of {PAGE:#x}"
    );
    let most = drive.identity().transfer_bytes;
    let chunks = chunks(machine.ram.layout(), bytes, offset, most)?;

    let (mut pattern, mut of_pattern) = (Pattern::new(seed), Checksum::default());
    let mut guard = Pattern::new(GUARD);
    for chunk in &chunks {
        let mut data = vec![0; chunk.bytes as usize];
        pattern.fill(&mut data);
        of_pattern.update(&data);
        machine.ram.write(chunk.source, &data)?;
        let target = chunk.target..chunk.target + chunk.bytes;
        machine.ram.fill(target, &mut guard)?;
    }

    let start = Instant::now();
    for chunk in &chunks {
        let write = chunk.transfer(Opcode::Write, chunk.source);
        drive.transfer(machine, &write)?;
    }
    drive.flush(machine)?;
    let write_us = micros(start.elapsed());

    let start = Instant::now();
    for chunk in &chunks {
        let read = chunk.transfer(Opcode::Read, chunk.target);
        drive.transfer(machine, &read)?;
    }
    let read_us = micros(start.elapsed());

    let (mut of_source, mut of_read) = (Checksum::default(), Checksum::default());
    for chunk in &chunks {
        let range = |from: u64| from..from + chunk.bytes;
        machine.ram.sum(range(chunk.source), &mut of_source)?;
        machine.ram.sum(range(chunk.target), &mut of_read)?;
    }
    let sha256_pattern = of_pattern.finish();
    let (sha256_source, sha256_read) = (of_source.finish(), of_read.finish());
    Ok(Io {
        checksum_ok: sha256_source == sha256_pattern && sha256_read == sha256_pattern,
        bytes,
        offset,
        seed,
        sha256_pattern,
        sha256_source,
        sha256_read,
        write_us,
        read_us,
    })
}

impl Chunk {
    fn transfer(&self, opcode: Opcode, address: u64) -> Transfer {
        Transfer {
            opcode,
            offset: self.offset,
            bytes: self.bytes,
            address,
        }
    }
}

fn chunks(layout: Layout, bytes: u64, offset: u64, most: u64) -> Result<Vec<Chunk>> {
    let (first, second) = if layout.high > 0 {
        (
            layout.low.checked_sub(bytes),
            (HIGH + layout.high).checked_sub(bytes),
        )
    } else {
        let second = layout.low.checked_sub(bytes);
        (second.and_then(|second| second.checked_sub(bytes)), second)
    };
    let fits = |gpa: Option<u64>, from: u64| gpa.filter(|gpa| *gpa >= from);
    let from = if layout.high > 0 { HIGH } else { 0 };
    let (Some(first), Some(second)) = (fits(first, DRIVER_RAM.end), fits(second, from)) else {
        bail!(
            "{bytes:#x} bytes to write and as many to read do not fit {:#x} bytes of low RAM, of \
             which the driver has {:#x}, and {:#x} of high",
            layout.low,
            DRIVER_RAM.end,
            layout.high
        );
    };
    let pieces = (0..bytes).step_by(most as usize).enumerate();
    Ok(pieces
        .map(|(n, at)| {
            let (source, target) = if n % 2 == 0 {
                (first, second)
            } else {
                (second, first)
            };
            Chunk {
                offset: offset + at,
                bytes: most.min(bytes - at),
                source: source + at,
                target: target + at,
            }
        })
        .collect())
}

/// Reads one block `count` times, on the queues in turn.
///
/// # Errors
/// If a command fails, or completes without an interrupt.
pub fn interrupts(machine: &mut Machine, drive: &mut Controller, count: u64) -> Result<()> {
    for _ in 0..count {
        let read = Transfer {
            opcode: Opcode::Read,
            offset: 0,
            bytes: drive.identity().block_bytes,
            address: drive.spare_page(),
        };
        drive.transfer(machine, &read)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn chunks_reach_the_ends_of_ram_and_cross_it_both_ways() {
        let layout = Layout::new(32 * MIB, Some(16 * MIB), false).unwrap();
        let chunks = chunks(layout, 3 * MIB + PAGE, MIB, MIB).unwrap();
        let places: Vec<_> = chunks
            .iter()
            .map(|chunk| (chunk.offset, chunk.bytes, chunk.source, chunk.target))
            .collect();
        let (low, high) = (13 * MIB - PAGE, HIGH + 13 * MIB - PAGE);
        assert_eq!(
            places,
            [
                (MIB, MIB, low, high),
                (2 * MIB, MIB, high + MIB, low + MIB),
                (3 * MIB, MIB, low + 2 * MIB, high + 2 * MIB),
                (4 * MIB, PAGE, high + 3 * MIB, low + 3 * MIB),
            ]
        );
    }

    #[test]
    fn data_never_lies_where_the_driver_is() {
        let low_only = Layout::new(10 * MIB, None, false).unwrap();
        let fitting = chunks(low_only, 4 * MIB, 0, MIB).unwrap();
        let places = fitting
            .iter()
            .flat_map(|chunk| [chunk.source, chunk.target]);
        assert_eq!(places.min(), Some(2 * MIB));
        assert!(chunks(low_only, 4 * MIB + PAGE, 0, MIB).is_err());
        let little_high = Layout::new(10 * MIB, Some(9 * MIB), false).unwrap();
        assert!(chunks(little_high, MIB, 0, MIB).is_ok());
        assert!(chunks(little_high, 2 * MIB, 0, MIB).is_err());
    }
}
