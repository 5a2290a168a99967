//! Measures the latency of a DMA test device: from the CPU's write to a register until the
//! device's response has arrived, by DMA or as an interrupt.
//!
//! The registers are those of `lender/devices/src/dma_test`. A round requests a DMA write
//! of 8 bytes to a page; a write to the doorbell register starts it. The response is
//! awaited by
//!
//! - `poll`: polling the page until the bytes are there;
//! - `interrupt`: polling it until the interrupt's message is there. MSI is enabled with an
//!   address in that page, so the interrupt's message data is written there, instead of to an
//!   interrupt controller. The 8 bytes must have arrived by then.
//!
//! So no driver is needed, and the guest's kernel has no influence on the figures. It works
//! where QEMU delivers MSI messages itself: not with KVM, which delivers them to interrupt
//! controllers only.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use farside_guest_agent::{Answer, BarAddress, Width};

use crate::{mapping::Mapping, pages::Pages, pci};

/// Registers in BAR 0.
mod reg {
    pub const ID: usize = 0x00;
    pub const STATUS: usize = 0x08;
    pub const CONTROL: usize = 0x0c;
    pub const DST: usize = 0x18;
    pub const LENGTH: usize = 0x20;
    pub const DATA: usize = 0x28;
    pub const VECTOR: usize = 0x30;
    pub const COMMAND: usize = 0x34;
}

/// Contents of the ID register.
const ID: u64 = u32::from_le_bytes(*b"FSDT") as u64;
/// Every bit of STATUS, to clear all of them.
const ALL_STATUS: u64 = u32::MAX as u64;
/// CONTROL: interrupt on completion of a command.
const INTERRUPT_WHEN_DONE: u64 = 1;
/// COMMAND: write 8 bytes of DATA to DST.
const WRITE: u64 = 6;
/// The data written.
const BALL: u64 = 0x0123_4567_89ab_cdef;

/// Offset of the interrupt's message in the page.
const MESSAGE_AT: usize = 64;
/// The message data. Its upper half is always 0.
const MESSAGE: u64 = 0x5f49;

// Own constants, not `farside-pci`'s: a test must not share the product's errors.

/// The command register in configuration space, and its bits.
const PCI_COMMAND: u64 = 4;
const MEMORY_AND_MASTER: u64 = 0b110;
const INTX_DISABLE: u64 = 1 << 10;

/// The pointer to the first capability.
const CAPABILITIES: u64 = 0x34;
/// MSI's capability id, and offsets in it, with 64-bit addresses.
const MSI: u64 = 0x05;
const MSI_CONTROL: u64 = 2;
const MSI_ADDRESS: u64 = 4;
const MSI_ADDRESS_HIGH: u64 = 8;
const MSI_DATA: u64 = 12;
/// MSI's control register: enabled, with one vector.
const MSI_ENABLE: u64 = 1;
const MSI_64_BIT: u64 = 1 << 7;

/// Polls between two reads of the clock.
const LOOKS_PER_CLOCK: u32 = 4096;
/// Timeout of a poll.
const LOST: Duration = Duration::from_secs(10);

/// The response to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Poll,
    Interrupt,
}

/// Plays `rounds` after `warm_up` unmeasured ones, and prints the nanoseconds of each, one
/// per line.
pub fn run(bdf: &str, wait: &str, warm_up: u64, rounds: u64) -> Result<()> {
    let wait = match wait {
        "poll" => Wait::Poll,
        "interrupt" => Wait::Interrupt,
        other => bail!("wait for `poll` or `interrupt`, not for `{other}`"),
    };
    let mut pages = Pages::default();
    let Answer::Page { handle, gpa, .. } = pages.alloc(8)? else {
        bail!("no page");
    };
    let game = Game::new(bdf, pages.get(handle)?, gpa, wait)?;
    for _ in 0..warm_up {
        game.round()?;
    }
    let mut text = String::new();
    for _ in 0..rounds {
        let time = game.round()?;
        text += &format!("{}\n", time.as_nanos());
    }
    print!("{text}");
    Ok(())
}

struct Game<'a> {
    registers: Mapping,
    page: &'a Mapping,
    wait: Wait,
}

impl<'a> Game<'a> {
    fn new(bdf: &str, page: &'a Mapping, gpa: u64, wait: Wait) -> Result<Self> {
        let command = pci::config_read(bdf, PCI_COMMAND, Width::U16)?;
        let command = command | MEMORY_AND_MASTER | INTX_DISABLE;
        pci::config_write(bdf, PCI_COMMAND, Width::U16, command)?;
        let registers = pci::map_bar(&BarAddress {
            bdf: bdf.to_owned(),
            bar: 0,
            offset: 0,
        })?;
        let id = registers.read(reg::ID, Width::U32)?;
        ensure!(id == ID, "{bdf} is no DMA test device: its ID is {id:#x}");
        let control = match wait {
            Wait::Poll => 0,
            Wait::Interrupt => {
                send_messages_to(bdf, gpa + MESSAGE_AT as u64)?;
                INTERRUPT_WHEN_DONE
            }
        };
        registers.write(reg::CONTROL, Width::U32, control)?;
        registers.write(reg::VECTOR, Width::U32, 0)?;
        registers.write(reg::DST, Width::U64, gpa)?;
        registers.write(reg::LENGTH, Width::U32, 8)?;
        registers.write(reg::DATA, Width::U64, BALL)?;
        Ok(Self {
            registers,
            page,
            wait,
        })
    }

    /// From the doorbell to the response.
    fn round(&self) -> Result<Duration> {
        self.page.write(0, Width::U64, 0)?;
        self.page.write(MESSAGE_AT, Width::U64, 0)?;
        self.registers.write(reg::STATUS, Width::U32, ALL_STATUS)?;
        let (place, expected) = match self.wait {
            Wait::Poll => (0, BALL),
            Wait::Interrupt => (MESSAGE_AT, MESSAGE),
        };
        let start = Instant::now();
        self.registers.write(reg::COMMAND, Width::U32, WRITE)?;
        let found = self.poll(place, start)?;
        let time = start.elapsed();
        ensure!(
            found == expected,
            "the page holds {found:#x} at {place}, not {expected:#x}"
        );
        let ball = self.page.read(0, Width::U64)?;
        ensure!(
            ball == BALL,
            "the page holds {ball:#x}: the DMA did not come"
        );
        Ok(time)
    }

    /// Polls until the value at `place` is not zero.
    fn poll(&self, place: usize, start: Instant) -> Result<u64> {
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                let found = self.page.read(place, Width::U64)?;
                if found != 0 {
                    return Ok(found);
                }
            }
            let status = || self.registers.read(reg::STATUS, Width::U32);
            ensure!(
                start.elapsed() < LOST,
                "nothing came within {LOST:?}, by {:?}; status {:#x}",
                self.wait,
                status()?
            );
        }
    }
}

/// Enables the device's MSI with [`MESSAGE`] and that address.
fn send_messages_to(bdf: &str, gpa: u64) -> Result<()> {
    let msi = find_capability(bdf, MSI)?;
    let control = pci::config_read(bdf, msi + MSI_CONTROL, Width::U16)?;
    ensure!(
        control & MSI_64_BIT != 0,
        "{bdf}: its MSI has 32-bit addresses"
    );
    let write = |at, width, value| pci::config_write(bdf, msi + at, width, value);
    write(MSI_CONTROL, Width::U16, 0)?;
    write(MSI_ADDRESS, Width::U32, gpa & u64::from(u32::MAX))?;
    write(MSI_ADDRESS_HIGH, Width::U32, gpa >> 32)?;
    write(MSI_DATA, Width::U16, MESSAGE)?;
    write(MSI_CONTROL, Width::U16, MSI_ENABLE)
}

/// The offset of a capability in configuration space.
fn find_capability(bdf: &str, id: u64) -> Result<u64> {
    let next = |at| -> Result<u64> { Ok(pci::config_read(bdf, at, Width::U8)? & !3) };
    let mut at = next(CAPABILITIES)?;
    // A circular list exceeds the number of capabilities that fit.
    for _ in 0..64 {
        if at == 0 {
            break;
        }
        if pci::config_read(bdf, at, Width::U8)? == id {
            return Ok(at);
        }
        at = next(at + 1)?;
    }
    bail!("{bdf} has no capability {id:#x}")
}
