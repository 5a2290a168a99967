//! Driver for the DMA test device, through its registers in a guest.

use std::time::Instant;

use anyhow::{Result, ensure};
use farside_devices::dma_test::{self, Command, reg, status};
use farside_testbed::{BarAddress, Width};

use crate::{FunctionId, Guest, SHORT};

// Own constants, not `farside-pci`'s: a test must not share the product's errors.

/// Offset of the command register in configuration space.
const COMMAND: u64 = 4;
/// Its bits.
const MEMORY: u64 = 1 << 1;
const BUS_MASTER: u64 = 1 << 2;
const INTX_DISABLE: u64 = 1 << 10;
/// Offset of the status register.
const STATUS: u64 = 6;
/// Its bit.
const INTERRUPT_STATUS: u64 = 1 << 3;

/// A DMA test device in a guest.
pub struct DmaTester<'a> {
    guest: &'a Guest<'a>,
    /// Its address in the guest.
    pub bdf: String,
}

/// The result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether the device reports a refused access.
    pub faulted: bool,
    /// Bytes moved.
    pub moved: u64,
    /// The RESULT register, for CHECKSUM.
    pub result: u64,
    /// The DATA register, for READ.
    pub data: u64,
    /// The first address of the refused access.
    pub fault_iova: u64,
}

impl<'a> DmaTester<'a> {
    /// Finds the device, which has no driver, and enables memory space.
    pub fn new(guest: &'a Guest<'a>) -> Result<Self> {
        let bdf = guest.find(FunctionId::Device {
            vendor: dma_test::VENDOR_ID,
            device: dma_test::DEVICE_ID,
        })?;
        let tester = Self { guest, bdf };
        tester.set_command(MEMORY, 0)?;
        let found = tester.read(reg::ID, Width::U32)?;
        ensure!(found == u64::from(dma_test::ID), "its ID is {found:#x}");
        Ok(tester)
    }

    /// Sets or clears bus-master enable.
    pub fn set_bus_master(&self, on: bool) -> Result<()> {
        match on {
            true => self.set_command(BUS_MASTER, 0),
            false => self.set_command(0, BUS_MASTER),
        }
    }

    /// Whether bus-master enable reads as set.
    pub fn bus_master(&self) -> Result<bool> {
        let command = self.guest.config_read(&self.bdf, COMMAND, Width::U16)?;
        Ok(command & BUS_MASTER != 0)
    }

    /// The ID register.
    pub fn answer(&self) -> Result<u64> {
        self.read(reg::ID, Width::U32)
    }

    /// Asserts INTx, or sends MSI-X vector 0. Does not read any register back: after a
    /// register access QEMU has the line sampled anew.
    pub fn raise(&self) -> Result<()> {
        self.write(reg::COMMAND, Width::U32, Command::Raise as u64)
    }

    /// Deasserts INTx.
    pub fn acknowledge(&self) -> Result<()> {
        self.write(reg::STATUS, Width::U32, status::INTERRUPT.into())
    }

    /// Whether Interrupt Status reads as set.
    pub fn interrupt_status(&self) -> Result<bool> {
        let status = self.guest.config_read(&self.bdf, STATUS, Width::U16)?;
        Ok(status & INTERRUPT_STATUS != 0)
    }

    /// Sets or clears INTx disable.
    pub fn set_intx_disable(&self, on: bool) -> Result<()> {
        match on {
            true => self.set_command(INTX_DISABLE, 0),
            false => self.set_command(0, INTX_DISABLE),
        }
    }

    /// Whether INTx disable reads as set.
    pub fn intx_disable(&self) -> Result<bool> {
        let command = self.guest.config_read(&self.bdf, COMMAND, Width::U16)?;
        Ok(command & INTX_DISABLE != 0)
    }

    /// Sets the PATTERN register; a reset clears it.
    pub fn set_pattern(&self, pattern: u32) -> Result<()> {
        self.write(reg::PATTERN, Width::U32, pattern.into())
    }

    /// The PATTERN register.
    pub fn pattern(&self) -> Result<u64> {
        self.read(reg::PATTERN, Width::U32)
    }

    /// Fills `len` bytes at `dst` with `pattern`.
    pub fn fill(&self, dst: u64, len: u64, pattern: u32) -> Result<Answer> {
        self.set_pattern(pattern)?;
        self.command(Command::Fill, 0, dst, len)
    }

    /// Copies `len` bytes from `src` to `dst`.
    pub fn copy(&self, src: u64, dst: u64, len: u64) -> Result<Answer> {
        self.command(Command::Copy, src, dst, len)
    }

    /// CRC-32C of `len` bytes at `src`.
    pub fn checksum(&self, src: u64, len: u64) -> Result<Answer> {
        self.command(Command::Checksum, src, 0, len)
    }

    /// Reads 8 bytes at `src`.
    pub fn read8(&self, src: u64) -> Result<Answer> {
        self.command(Command::Read, src, 0, 8)
    }

    /// Writes 8 bytes to `dst`.
    pub fn write8(&self, dst: u64, data: u64) -> Result<Answer> {
        self.write(reg::DATA, Width::U64, data)?;
        self.command(Command::Write, 0, dst, 8)
    }

    fn command(&self, command: Command, src: u64, dst: u64, len: u64) -> Result<Answer> {
        self.write(reg::CONTROL, Width::U32, 0)?;
        self.write(reg::STATUS, Width::U32, u32::MAX.into())?;
        self.write(reg::SRC, Width::U64, src)?;
        self.write(reg::DST, Width::U64, dst)?;
        self.write(reg::LENGTH, Width::U32, len)?;
        self.write(reg::COMMAND, Width::U32, command as u64)?;
        let deadline = Instant::now() + SHORT;
        let status = loop {
            let status = self.read(reg::STATUS, Width::U32)? as u32;
            if status & status::BUSY == 0 {
                break status;
            }
            ensure!(Instant::now() < deadline, "{command:?} is busy for ever");
        };
        ensure!(
            status & (status::DONE | status::REJECTED) == status::DONE,
            "{command:?} of {len:#x} bytes, {src:#x} to {dst:#x}: status {status:#x}"
        );
        Ok(Answer {
            faulted: status & status::FAULT != 0,
            moved: self.read(reg::MOVED, Width::U32)?,
            result: self.read(reg::RESULT, Width::U32)?,
            data: self.read(reg::DATA, Width::U64)?,
            fault_iova: self.read(reg::FAULT_IOVA, Width::U64)?,
        })
    }

    fn set_command(&self, set: u64, clear: u64) -> Result<()> {
        let before = self.guest.config_read(&self.bdf, COMMAND, Width::U16)?;
        let after = (before | set) & !clear;
        self.guest
            .config_write(&self.bdf, COMMAND, Width::U16, after)
    }

    fn at(&self, offset: u64) -> BarAddress {
        BarAddress {
            bdf: self.bdf.clone(),
            bar: 0,
            offset,
        }
    }

    fn read(&self, offset: u64, width: Width) -> Result<u64> {
        self.guest.mmio_read(&self.at(offset), width)
    }

    fn write(&self, offset: u64, width: Width, value: u64) -> Result<()> {
        self.guest.mmio_write(&self.at(offset), width, value)
    }
}
