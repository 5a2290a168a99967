//! Checks for forbidden DMA: before bus-master enable, and outside RAM.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::machine::Machine;
use crate::nvme::{self, Command, Controller, DRIVER_RAM, Opcode, Transfer};
use crate::pattern::{GUARD, Pattern};
use crate::ram::{Block, HIGH, Layout, PAGE, Ram};
use crate::report::{BeforeBme, Rogue};
use crate::step::Target;

/// Sets up the NVMe controller and submits a command while bus-master enable is clear; then
/// watches for effects for `wait`.
///
/// # Errors
/// If the connection is lost, or the controller cannot be disabled afterwards.
pub fn before_bme(machine: &mut Machine, wait: Duration) -> Result<BeforeBme> {
    machine.vectors.drain()?;
    let mut admin = nvme::start(machine)?;
    let ring_by = Instant::now() + wait;
    while !nvme::is_ready(machine)? && Instant::now() < ring_by {
        std::thread::yield_now();
    }
    let mut identify = Command::new(Opcode::Identify, 0);
    identify.prp[0] = admin.page();
    identify.words[0] = 1;
    admin.put(machine, &identify)?;
    let before = [machine.ram.snapshot(DRIVER_RAM)?];
    admin.ring(machine)?;
    let start = Instant::now();
    let interrupts = machine.vectors.wait_any(start + wait)?;
    // An interrupt ends the wait early; the completion it announces may still follow.
    while interrupts > 0 && start.elapsed() < wait {
        std::thread::yield_now();
    }
    let found = BeforeBme {
        waited_ms: start.elapsed().as_millis() as u64,
        completions: u64::from(admin.is_complete(machine)?),
        interrupts,
        ram_bytes_changed: machine.ram.changed_since(&before, &(0..0))?,
        csts: nvme::status(machine)?,
    };
    nvme::stop(machine)?;
    Ok(found)
}

/// Resolves a target to an address.
///
/// # Errors
/// If the address is mapped RAM, or an NVMe data pointer cannot hold it.
pub fn rogue_address(layout: Layout, mapped: &[Block], target: Target, bytes: u64) -> Result<u64> {
    let address = match target {
        Target::Hole => layout.low,
        Target::Above => HIGH + layout.high,
        Target::Address(address) => address,
    };
    let end = address.checked_add(bytes);
    let end = end.with_context(|| format!("{address:#x} is too high for {bytes:#x} bytes"))?;
    ensure!(
        address.is_multiple_of(PAGE),
        "{address:#x} is no page's beginning"
    );
    for block in mapped {
        let gpas = block.gpas();
        ensure!(
            end <= gpas.start || gpas.end <= address,
            "{address:#x} to {end:#x} is not outside RAM: {gpas:#x?} is mapped"
        );
    }
    Ok(address)
}

/// Fills all RAM except the driver's with the guard pattern.
///
/// # Errors
/// None expected.
pub fn guard(ram: &Ram) -> Result<()> {
    let mut pattern = Pattern::new(GUARD);
    for block in ram.layout().blocks() {
        let gpas = block.gpas();
        ram.fill(gpas.start..gpas.end.min(DRIVER_RAM.start), &mut pattern)?;
        ram.fill(gpas.start.max(DRIVER_RAM.end)..gpas.end, &mut pattern)?;
    }
    Ok(())
}

/// Issues a read of the first blocks to `address`, and compares all RAM with its former
/// contents.
///
/// # Errors
/// If the connection is lost, or the controller does not support such a command.
pub fn rogue(
    machine: &mut Machine,
    drive: &mut Controller,
    address: u64,
    bytes: u64,
) -> Result<Rogue> {
    let transfer = Transfer {
        opcode: Opcode::Read,
        offset: 0,
        bytes,
        address,
    };
    let (done, (before, completion)) = drive.try_transfer(machine, &transfer, |machine, own| {
        Ok((machine.ram.snapshot_all()?, own))
    })?;
    Ok(Rogue {
        address,
        bytes,
        completed: done.is_some(),
        status: done.map(|done| done.status),
        ram_bytes_changed: machine.ram.changed_since(&before, &completion)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn only_what_is_outside_ram_is_rogue() {
        let layout = Layout::new(64 * MIB, Some(32 * MIB), false).unwrap();
        let blocks = layout.blocks();
        let address = |target, bytes| rogue_address(layout, &blocks, target, bytes);
        assert_eq!(address(Target::Hole, PAGE).unwrap(), 32 * MIB);
        assert_eq!(address(Target::Above, PAGE).unwrap(), HIGH + 32 * MIB);
        for (inside, bytes) in [
            (0, PAGE),
            (32 * MIB - PAGE, 2 * PAGE),
            (HIGH - PAGE, 2 * PAGE),
            (32 * MIB + 1, PAGE),
            (!0xfff, PAGE),
        ] {
            assert!(
                address(Target::Address(inside), bytes).is_err(),
                "{inside:#x}"
            );
        }
        // Unmapped high RAM counts as outside.
        assert!(rogue_address(layout, &blocks[..1], Target::Address(HIGH), PAGE).is_ok());
    }

    #[test]
    fn all_ram_but_the_drivers_is_guarded() {
        let ram = Ram::new(Layout::new(4 * MIB, Some(3 * MIB), false).unwrap()).unwrap();
        guard(&ram).unwrap();
        for (gpa, guarded) in [
            (0, true),
            (DRIVER_RAM.start - 8, true),
            (DRIVER_RAM.start, false),
            (DRIVER_RAM.end - 8, false),
            (DRIVER_RAM.end, true),
            (3 * MIB - 8, true),
            (HIGH, true),
            (HIGH + MIB - 8, true),
        ] {
            let mut word = [0; 8];
            ram.read(gpa, &mut word).unwrap();
            assert_eq!(word != [0; 8], guarded, "{gpa:#x}");
        }
    }
}
