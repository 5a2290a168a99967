//! The DMA test device: performs DMA at given addresses and reports the result. For
//! tests of isolation, guest layout, interrupts and latency only.
//!
//! PCI ids: vendor [`VENDOR_ID`], device [`DEVICE_ID`] (not assigned by the
//! PCI-SIG), class 0xff. All registers are little-endian; accesses of 1, 2, 4
//! and 8 bytes work. Unlisted offsets read as zero and ignore writes.
//!
//! # BAR 0: registers, 4 KiB, 32-bit, trapped
//!
//! | offset | name | bits | access | meaning |
//! | --- | --- | --- | --- | --- |
//! | 0x00 | `ID` | 32 | RO | [`ID`], the letters "FSDT" |
//! | 0x04 | `VERSION` | 32 | RO | [`VERSION`] |
//! | 0x08 | `STATUS` | 32 | RW1C | bit 0 `BUSY` (read-only), 1 `DONE`, 2 `FAULT`, 3 `REJECTED`, 4 `INTERRUPT`: see [`status`] |
//! | 0x0c | `CONTROL` | 32 | RW | bit 0: interrupt when a command is done, 8: `SRC` is an offset in BAR 2, 9: so is `DST`: see [`control`] |
//! | 0x10 | `SRC` | 64 | RW | source: an IOVA |
//! | 0x18 | `DST` | 64 | RW | destination: an IOVA |
//! | 0x20 | `LENGTH` | 32 | RW | bytes, 1 to [`MAX_LENGTH`] |
//! | 0x24 | `PATTERN` | 32 | RW | pattern that FILL repeats, low byte first |
//! | 0x28 | `DATA` | 64 | RW | data of WRITE and READ |
//! | 0x30 | `VECTOR` | 32 | RW | MSI or MSI-X vector, below [`VECTORS`] |
//! | 0x34 | `COMMAND` | 32 | WO | doorbell: a [`Command`] |
//! | 0x38 | `RESULT` | 32 | RO | CRC-32C of the last CHECKSUM |
//! | 0x3c | `MOVED` | 32 | RO | bytes that the last command has read or written |
//! | 0x40 | `FAULT_IOVA` | 64 | RO | address of the last refused access |
//! | 0x48 | `FAULT_INFO` | 32 | RO | bits 7:0 its [reason](fault_code), bit 8: it was a write |
//! | 0x4c | `FAULTS` | 32 | RO | accesses refused |
//! | 0x50 | `COMMANDS` | 64 | RO | commands completed, with or without a fault |
//! | 0x58 | `BYTES_READ` | 64 | RO | by DMA |
//! | 0x60 | `BYTES_WRITTEN` | 64 | RO | by DMA |
//! | 0x68 | `INTERRUPTS` | 64 | RO | interrupts raised |
//! | 0x80 | `SCRATCH` | 128 bytes | RW | no effect |
//!
//! Commands:
//!
//! | number | name | does |
//! | --- | --- | --- |
//! | 1 | COPY | copies `LENGTH` bytes from `SRC` to `DST`, in ascending pieces; the result of overlapping ranges is undefined |
//! | 2 | FILL | fills `LENGTH` bytes at `DST` with `PATTERN` |
//! | 3 | CHECKSUM | `RESULT` = CRC-32C (Castagnoli, RFC 3720 B.4) of `LENGTH` bytes at `SRC` |
//! | 4 | RAISE | raises `VECTOR`, and INTx |
//! | 5 | READ | `DATA` = `LENGTH` (1, 2, 4 or 8) bytes at `SRC`; all ones on a fault |
//! | 6 | WRITE | `LENGTH` (1, 2, 4 or 8) bytes of `DATA` to `DST` |
//!
//! A command of up to [`CHUNK`] bytes is done when the doorbell write
//! completes; a longer one continues while `BUSY` reads 1. At its end
//! `DONE` is set. A refused access also sets `FAULT` and ends the command; earlier
//! accesses have taken effect. An invalid command
//! (number, length, vector, range beyond BAR 2 or beyond 2^64, another one
//! still busy) sets `REJECTED` and does nothing else. RAISE, and the end of any
//! command when `CONTROL` bit 0 is set, raise `VECTOR` and set `INTERRUPT`,
//! which asserts INTx until it is cleared.
//!
//! # BAR 2: memory, 64 KiB, 64-bit prefetchable, mappable
//!
//! Plain memory in the device, zero after a reset.
//!
//! # BAR 4: MSI-X, 64 KiB, 32-bit
//!
//! The table of [`VECTORS`] vectors at 0, the pending bits at 0x8000. The table
//! is storage: the borrower handles masks and messages.
//!
//! # Configuration space
//!
//! Power management, MSI with 32 maskable vectors, MSI-X, PCIe endpoint with
//! FLR, a vendor-specific capability; extended: serial number, *ATS*, a vendor-
//! specific one. ATS cannot work through farside: it is included, between two supported
//! capabilities, to test that it is hidden.

mod config_space;
mod job;
mod sram;
#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;

use farside_fabric::{Access, Fault, FaultReason, memory::HostSlice};

use farside_pci::{Bar, BarKind, Description, SparseMmapArea};

use crate::{Bus, Device};
use job::{Job, Step};
use sram::Sram;

/// PCI vendor id: unassigned.
pub const VENDOR_ID: u16 = 0xfa5d;
/// PCI device id.
pub const DEVICE_ID: u16 = 0xd3a7;
/// Contents of the `ID` register: "FSDT", first letter first.
pub const ID: u32 = u32::from_le_bytes(*b"FSDT");
/// Contents of the `VERSION` register.
pub const VERSION: u32 = 1;
/// Most bytes of one command.
pub const MAX_LENGTH: u32 = 16 << 20;
/// Most bytes that a command moves per poll.
pub const CHUNK: usize = 64 << 10;
/// MSI-X vectors: as many as a function can have.
pub const VECTORS: u16 = 2048;
/// Bytes of BAR 0.
pub const REGISTERS_SIZE: u64 = 4 << 10;
/// Bytes of BAR 2.
pub const SRAM_SIZE: u64 = 64 << 10;
/// Bytes of BAR 4.
pub const MSIX_SIZE: u64 = 64 << 10;

const TABLE_SIZE: u64 = VECTORS as u64 * 16;
const PBA: u64 = 0x8000;
const PBA_SIZE: u64 = VECTORS as u64 / 8;

/// Offsets in BAR 0.
#[allow(missing_docs, reason = "documented in the table above")]
pub mod reg {
    pub const ID: u64 = 0x00;
    pub const VERSION: u64 = 0x04;
    pub const STATUS: u64 = 0x08;
    pub const CONTROL: u64 = 0x0c;
    pub const SRC: u64 = 0x10;
    pub const DST: u64 = 0x18;
    pub const LENGTH: u64 = 0x20;
    pub const PATTERN: u64 = 0x24;
    pub const DATA: u64 = 0x28;
    pub const VECTOR: u64 = 0x30;
    pub const COMMAND: u64 = 0x34;
    pub const RESULT: u64 = 0x38;
    pub const MOVED: u64 = 0x3c;
    pub const FAULT_IOVA: u64 = 0x40;
    pub const FAULT_INFO: u64 = 0x48;
    pub const FAULTS: u64 = 0x4c;
    pub const COMMANDS: u64 = 0x50;
    pub const BYTES_READ: u64 = 0x58;
    pub const BYTES_WRITTEN: u64 = 0x60;
    pub const INTERRUPTS: u64 = 0x68;
    pub const SCRATCH: u64 = 0x80;
    /// First byte after the scratch area.
    pub const SCRATCH_END: u64 = 0x100;
}

/// Bits of `STATUS`. All but `BUSY` are cleared by writing 1.
pub mod status {
    /// A command is running.
    pub const BUSY: u32 = 1 << 0;
    /// A command has ended since this was cleared.
    pub const DONE: u32 = 1 << 1;
    /// An access was refused: see `FAULT_IOVA` and `FAULT_INFO`.
    pub const FAULT: u32 = 1 << 2;
    /// An invalid command was ignored.
    pub const REJECTED: u32 = 1 << 3;
    /// An interrupt was raised. INTx is asserted while this is set.
    pub const INTERRUPT: u32 = 1 << 4;
}

/// Bits of `CONTROL`.
pub mod control {
    /// Raise `VECTOR` when a command is done.
    pub const INTERRUPT_WHEN_DONE: u32 = 1 << 0;
    /// `SRC` is an offset in BAR 2.
    pub const SRC_IN_SRAM: u32 = 1 << 8;
    /// `DST` is an offset in BAR 2.
    pub const DST_IN_SRAM: u32 = 1 << 9;
    /// All bits that exist.
    pub(super) const ALL: u32 = INTERRUPT_WHEN_DONE | SRC_IN_SRAM | DST_IN_SRAM;
}

/// Values of `COMMAND`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Command {
    /// `SRC` to `DST`.
    Copy = 1,
    /// `PATTERN` to `DST`.
    Fill = 2,
    /// `SRC` into `RESULT`.
    Checksum = 3,
    /// Interrupt.
    Raise = 4,
    /// A word from `SRC` into `DATA`.
    Read = 5,
    /// A word from `DATA` to `DST`.
    Write = 6,
}

impl Command {
    fn from_number(number: u32) -> Option<Self> {
        [
            Self::Copy,
            Self::Fill,
            Self::Checksum,
            Self::Raise,
            Self::Read,
            Self::Write,
        ]
        .into_iter()
        .find(|command| *command as u32 == number)
    }
}

/// The reason as `FAULT_INFO` encodes it, where 0 means no fault.
pub fn fault_code(reason: FaultReason) -> u32 {
    match reason {
        FaultReason::BusMasterDisabled => 1,
        FaultReason::LenderDomain => 2,
        FaultReason::Window => 3,
        FaultReason::BorrowerDomain => 4,
        FaultReason::Permission => 5,
        FaultReason::MemoryGone => 6,
    }
}

/// The device.
pub struct DmaTest {
    description: Description,
    registers: Registers,
    /// Sums of the counters up to the last reset.
    past: Counters,
    sram: Sram,
    msix_table: Vec<u8>,
    job: Option<Job>,
    quiesced: bool,
    /// Bounce buffer.
    buffer: Vec<u8>,
}

/// Names and counts.
type Counters = [(&'static str, u64); 5];

/// The registers in BAR 0, all zero after a reset.
#[derive(Default)]
struct Registers {
    status: u32,
    control: u32,
    src: u64,
    dst: u64,
    length: u32,
    pattern: u32,
    data: u64,
    vector: u32,
    result: u32,
    moved: u32,
    fault_iova: u64,
    fault_info: u32,
    faults: u32,
    commands: u64,
    bytes_read: u64,
    bytes_written: u64,
    interrupts: u64,
    scratch: [u32; 32],
}

impl DmaTest {
    /// The device after power-on.
    pub fn new() -> Self {
        let mut device = Self {
            description: description(),
            registers: Registers::default(),
            past: Registers::default().counters(),
            sram: Sram::new(SRAM_SIZE as usize),
            msix_table: vec![0; TABLE_SIZE as usize],
            job: None,
            quiesced: false,
            buffer: vec![0; CHUNK],
        };
        device.reset();
        device
    }

    fn read_word(&self, offset: u64) -> u32 {
        let r = &self.registers;
        // The halves of 64-bit registers are at offset and offset + 4.
        let half = |value: u64| (value >> (8 * (offset & 4))) as u32;
        match offset {
            reg::ID => ID,
            reg::VERSION => VERSION,
            reg::STATUS => {
                let busy = if self.job.is_some() { status::BUSY } else { 0 };
                r.status | busy
            }
            reg::CONTROL => r.control,
            reg::LENGTH => r.length,
            reg::PATTERN => r.pattern,
            reg::VECTOR => r.vector,
            reg::RESULT => r.result,
            reg::MOVED => r.moved,
            reg::FAULT_INFO => r.fault_info,
            reg::FAULTS => r.faults,
            reg::SCRATCH..reg::SCRATCH_END => r.scratch[((offset - reg::SCRATCH) / 4) as usize],
            _ => match offset & !7 {
                reg::SRC => half(r.src),
                reg::DST => half(r.dst),
                reg::DATA => half(r.data),
                reg::FAULT_IOVA => half(r.fault_iova),
                reg::COMMANDS => half(r.commands),
                reg::BYTES_READ => half(r.bytes_read),
                reg::BYTES_WRITTEN => half(r.bytes_written),
                reg::INTERRUPTS => half(r.interrupts),
                _ => 0,
            },
        }
    }

    /// Writes the bytes of the word at `offset` that `mask` selects.
    fn write_word(&mut self, offset: u64, value: u32, mask: u32, bus: &mut Bus<'_>) {
        let r = &mut self.registers;
        let merge = |register: &mut u32| *register = *register & !mask | value & mask;
        let merge_half = |register: &mut u64| {
            let shift = 8 * (offset & 4);
            let (value, mask) = (u64::from(value) << shift, u64::from(mask) << shift);
            *register = *register & !mask | value & mask;
        };
        match offset {
            reg::STATUS => {
                r.status &= !(value & mask);
                bus.irq.set_intx(r.status & status::INTERRUPT != 0);
            }
            reg::CONTROL => {
                merge(&mut r.control);
                r.control &= control::ALL;
            }
            reg::LENGTH => merge(&mut r.length),
            reg::PATTERN => merge(&mut r.pattern),
            reg::VECTOR => merge(&mut r.vector),
            reg::COMMAND => self.command(value & mask, bus),
            reg::SCRATCH..reg::SCRATCH_END => {
                merge(&mut r.scratch[((offset - reg::SCRATCH) / 4) as usize]);
            }
            _ => match offset & !7 {
                reg::SRC => merge_half(&mut r.src),
                reg::DST => merge_half(&mut r.dst),
                reg::DATA => merge_half(&mut r.data),
                _ => {}
            },
        }
    }

    fn command(&mut self, number: u32, bus: &mut Bus<'_>) {
        let job = match Command::from_number(number) {
            Some(command) if self.job.is_none() => Job::new(command, &self.registers),
            _ => None,
        };
        match job {
            Some(job) => {
                self.registers.moved = 0;
                self.job = Some(job);
                self.advance(bus);
            }
            None => self.registers.status |= status::REJECTED,
        }
    }

    /// Executes the next piece of the command. Returns whether there was one.
    fn advance(&mut self, bus: &mut Bus<'_>) -> bool {
        if self.quiesced {
            return false;
        }
        let Some(job) = &mut self.job else {
            return false;
        };
        let step = job.step(&mut self.registers, &mut self.sram, &mut self.buffer, bus);
        match step {
            Ok(Step::More) => {}
            Ok(Step::Done { raise }) => self.finish(raise, bus),
            Err(fault) => {
                self.registers.note_fault(&fault);
                self.finish(false, bus);
            }
        }
        true
    }

    fn finish(&mut self, raise: bool, bus: &mut Bus<'_>) {
        let r = &mut self.registers;
        self.job = None;
        r.commands += 1;
        r.status |= status::DONE;
        if (raise || r.control & control::INTERRUPT_WHEN_DONE != 0)
            && let Some(vector) = r.vector()
        {
            r.interrupts += 1;
            r.status |= status::INTERRUPT;
            bus.irq.raise(vector);
            bus.irq.set_intx(true);
        }
    }

    fn msix_byte(&self, offset: u64, bus: &Bus<'_>) -> u8 {
        match offset {
            0..TABLE_SIZE => self.msix_table[offset as usize],
            PBA.. if offset < PBA + PBA_SIZE => {
                let first = ((offset - PBA) * 8) as u16;
                (0..8)
                    .filter(|bit| bus.irq.is_pending(first + bit))
                    .fold(0, |byte, bit| byte | 1 << bit)
            }
            _ => 0,
        }
    }
}

impl Registers {
    /// `VECTOR`, if it is a valid vector.
    fn vector(&self) -> Option<u16> {
        u16::try_from(self.vector).ok().filter(|v| *v < VECTORS)
    }

    fn counters(&self) -> Counters {
        [
            ("commands", self.commands),
            ("bytes_read", self.bytes_read),
            ("bytes_written", self.bytes_written),
            ("interrupts", self.interrupts),
            ("faults", self.faults.into()),
        ]
    }

    fn note_fault(&mut self, fault: &Fault) {
        self.status |= status::FAULT;
        self.fault_iova = fault.iova.get();
        let write = u32::from(fault.access == Access::Write) << 8;
        self.fault_info = fault_code(fault.reason) | write;
        self.faults = self.faults.wrapping_add(1);
    }
}

impl Default for DmaTest {
    fn default() -> Self {
        Self::new()
    }
}

impl Device for DmaTest {
    fn description(&self) -> &Description {
        &self.description
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8], bus: &mut Bus<'_>) {
        match bar {
            0 => {
                for (byte, at) in data.iter_mut().zip(offset..) {
                    *byte = self.read_word(at & !3).to_le_bytes()[(at & 3) as usize];
                }
            }
            2 => self.sram.read(offset, data),
            4 => {
                for (byte, at) in data.iter_mut().zip(offset..) {
                    *byte = self.msix_byte(at, bus);
                }
            }
            _ => data.fill(0xff),
        }
    }

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8], bus: &mut Bus<'_>) {
        match bar {
            0 => {
                // Naturally aligned: within one word, or whole words. The lower word is
                // written first, so that one write can set VECTOR and COMMAND.
                for (bytes, at) in data.chunks(4).zip((offset..).step_by(4)) {
                    let first = (at & 3) as usize;
                    let (mut value, mut mask) = ([0; 4], [0; 4]);
                    value[first..first + bytes.len()].copy_from_slice(bytes);
                    mask[first..first + bytes.len()].fill(0xff);
                    let (value, mask) = (u32::from_le_bytes(value), u32::from_le_bytes(mask));
                    self.write_word(at & !3, value, mask, bus);
                }
            }
            2 => self.sram.write(offset, data),
            4 => {
                for (byte, at) in data.iter().zip(offset..) {
                    if let Some(entry) = self.msix_table.get_mut(at as usize) {
                        *entry = *byte;
                    }
                }
            }
            _ => {}
        }
    }

    fn set_bar_memory(&mut self, bar: u8, area: usize, memory: Option<HostSlice>) {
        if (bar, area) == (2, 0) {
            self.sram.set_memory(memory);
        }
    }

    fn poll(&mut self, bus: &mut Bus<'_>) -> bool {
        self.advance(bus)
    }

    fn enable_notifications(&mut self, _bus: &mut Bus<'_>) -> bool {
        // All work is started by BAR accesses.
        self.quiesced || self.job.is_none()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn quiesce(&mut self, _bus: &mut Bus<'_>) -> bool {
        // DMA happens only within calls, so none is in flight between them.
        self.quiesced = true;
        true
    }

    fn resume(&mut self, _bus: &mut Bus<'_>) {
        self.quiesced = false;
    }

    fn stats(&self) -> Vec<(&'static str, u64)> {
        let now = self.registers.counters();
        let past = self.past.iter().map(|(_, count)| count);
        now.iter()
            .zip(past)
            .map(|((name, now), past)| (*name, now + past))
            .collect()
    }

    fn reset(&mut self) {
        for ((_, past), (_, now)) in self.past.iter_mut().zip(self.registers.counters()) {
            *past += now;
        }
        self.registers = Registers::default();
        self.sram.clear();
        self.job = None;
        self.quiesced = false;
        // Vectors are masked after a reset (PCIe 7.7.2.8): bit 0 of the last
        // word of each entry.
        for entry in self.msix_table.chunks_exact_mut(16) {
            entry.fill(0);
            entry[12] = 1;
        }
    }
}

fn description() -> Description {
    let prefetchable = false;
    let plain = |size| Some(Bar::new(size, BarKind::Memory32 { prefetchable }));
    let prefetchable = true;
    let mut sram = Bar::new(SRAM_SIZE, BarKind::Memory64 { prefetchable });
    sram.mappable.push(SparseMmapArea {
        offset: 0,
        len: SRAM_SIZE,
    });
    let bars = [
        plain(REGISTERS_SIZE),
        None,
        Some(sram),
        None,
        plain(MSIX_SIZE),
        None,
    ];
    Description {
        config: config_space::image(&bars).to_vec(),
        bars,
        intx: true,
        msi_vectors: config_space::MSI_VECTORS,
        msix_vectors: VECTORS,
        summary: "farside DMA test device".to_owned(),
    }
}
