//! Times a DMA test device: from the processor's write to a register until what
//! the device does has come back, by DMA or as an interrupt.
//!
//! The registers are those of `devices/src/dma_test`. A round asks for a DMA
//! write of 8 bytes to a page of ours; a write to the doorbell register starts
//! it. Waiting for it is
//!
//! - `poll`: reading the page until the bytes are there;
//! - `interrupt`: sleeping until the device's interrupt (INTx, which
//!   `uio_pci_generic` makes readable) wakes this process; the bytes have to be
//!   there by then.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
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
    pub const COMMAND: usize = 0x34;
}

/// Contents of the ID register.
const ID: u64 = u32::from_le_bytes(*b"FSDT") as u64;
/// Every bit of STATUS, to clear them.
const ALL_STATUS: u64 = u32::MAX as u64;
/// CONTROL: interrupt when a command is done.
const INTERRUPT_WHEN_DONE: u64 = 1;
/// COMMAND: 8 bytes of DATA to DST.
const WRITE: u64 = 6;
/// What is written.
const BALL: u64 = 0x0123_4567_89ab_cdef;

/// The command register in configuration space, and its bits.
const PCI_COMMAND: u64 = 4;
const MEMORY_AND_MASTER: u64 = 0b110;
const INTX_DISABLE: u64 = 1 << 10;

/// How often the clock is looked at while polling.
const LOOKS_PER_CLOCK: u32 = 4096;
/// How long a poll waits before it gives up.
const LOST: Duration = Duration::from_secs(10);

/// What to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Poll,
    Interrupt,
}

/// Plays `rounds` after `warm_up` unmeasured ones, and prints the nanoseconds
/// of each, one a line.
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
    let mut game = Game::new(bdf, pages.get(handle)?, gpa, wait)?;
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
    bdf: &'a str,
    registers: Mapping,
    page: &'a Mapping,
    /// The readable interrupt.
    uio: Option<File>,
}

impl<'a> Game<'a> {
    fn new(bdf: &'a str, page: &'a Mapping, gpa: u64, wait: Wait) -> Result<Self> {
        let uio = match wait {
            Wait::Poll => None,
            Wait::Interrupt => Some(open_uio(bdf)?),
        };
        set_command(bdf, MEMORY_AND_MASTER, 0)?;
        let registers = pci::map_bar(&BarAddress {
            bdf: bdf.to_owned(),
            bar: 0,
            offset: 0,
        })?;
        let id = registers.read(reg::ID, Width::U32)?;
        ensure!(id == ID, "{bdf} is no DMA test device: its ID is {id:#x}");
        let control = match wait {
            Wait::Poll => 0,
            Wait::Interrupt => INTERRUPT_WHEN_DONE,
        };
        registers.write(reg::CONTROL, Width::U32, control)?;
        registers.write(reg::DST, Width::U64, gpa)?;
        registers.write(reg::LENGTH, Width::U32, 8)?;
        registers.write(reg::DATA, Width::U64, BALL)?;
        Ok(Self {
            bdf,
            registers,
            page,
            uio,
        })
    }

    /// From the doorbell to the ball's return.
    fn round(&mut self) -> Result<Duration> {
        self.page.write(0, Width::U64, 0)?;
        self.registers.write(reg::STATUS, Width::U32, ALL_STATUS)?;
        if self.uio.is_some() {
            // The kernel's handler disabled it: a level stays until somebody
            // who knows the device has seen to it.
            set_command(self.bdf, 0, INTX_DISABLE)?;
        }
        let start = Instant::now();
        self.registers.write(reg::COMMAND, Width::U32, WRITE)?;
        match &mut self.uio {
            None => self.poll(start)?,
            Some(uio) => {
                uio.read_exact(&mut [0; 4])
                    .context("waiting for the interrupt")?;
            }
        }
        let time = start.elapsed();
        let ball = self.page.read(0, Width::U64)?;
        ensure!(
            ball == BALL,
            "the page holds {ball:#x}: the DMA did not come"
        );
        Ok(time)
    }

    fn poll(&self, start: Instant) -> Result<()> {
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if self.page.read(0, Width::U64)? != 0 {
                    return Ok(());
                }
            }
            let status = || self.registers.read(reg::STATUS, Width::U32);
            ensure!(
                start.elapsed() < LOST,
                "no DMA within {LOST:?}; status {:#x}",
                status()?
            );
        }
    }
}

fn set_command(bdf: &str, set: u64, clear: u64) -> Result<()> {
    let before = pci::config_read(bdf, PCI_COMMAND, Width::U16)?;
    pci::config_write(bdf, PCI_COMMAND, Width::U16, (before | set) & !clear)
}

/// Binds the function to `uio_pci_generic` where it is not yet, and opens what
/// that makes of it.
fn open_uio(bdf: &str) -> Result<File> {
    let function = Path::new("/sys/bus/pci/devices").join(bdf);
    if !function.join("uio").exists() {
        let write = |path: &Path, text: &str| {
            fs::write(path, text).with_context(|| format!("writing {text} to {}", path.display()))
        };
        write(&function.join("driver_override"), "uio_pci_generic")?;
        write(Path::new("/sys/bus/pci/drivers_probe"), bdf)?;
    }
    let folder = function.join("uio");
    let mut entries = fs::read_dir(&folder).with_context(|| {
        format!(
            "listing {}: has uio_pci_generic taken it?",
            folder.display()
        )
    })?;
    let name = entries.next().context("no uio device")??.file_name();
    let path = Path::new("/dev").join(name);
    OpenOptions::new()
        .read(true)
        .open(&path)
        .with_context(|| format!("opening {}", path.display()))
}
