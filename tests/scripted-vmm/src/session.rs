//! Performs steps in order, and records their results.
//!
//! ```text
//!   Connected --reset--> Reset --place--> Placed --bme--> BusMaster
//!       ^                 ^  ^                                |
//!       +--- reconnect    |  +------------- unbind -----------+
//!                         +---------------- reset ------------+
//! ```
//!
//! A step that requires a later stage first performs the steps that lead to it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::checks;
use crate::device::{Accesses, Device};
use crate::machine::Machine;
use crate::nvme::Controller;
use crate::pci;
use crate::ram::{Block, Layout, Ram};
use crate::report::{Answer, Drive, Found, Interrupts, Placed, Report, RoundTrips, Unbound};
use crate::step::{Part, Step};
use crate::timing::{micros, round_trips};
use crate::vectors::Vectors;
use crate::workload;

/// Configuration of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The backend's device socket.
    pub socket: PathBuf,
    /// Guest RAM.
    pub layout: Layout,
    /// MSI-X vectors to set up; all by default.
    pub vectors: Option<u32>,
    /// I/O queues of the driver.
    pub queues: u16,
    /// Namespace identifier.
    pub namespace: u32,
    /// The seed of the first pattern; each `io` increments it.
    pub seed: u64,
    /// How long to wait until the socket is served.
    pub patience: Duration,
    /// Timeout of a command or a change of state.
    pub timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Connected,
    Reset,
    Placed,
    BusMaster,
}

/// A connected VMM.
pub struct Session {
    options: Options,
    machine: Machine,
    stage: Stage,
    /// None before the first `map`.
    mapped: Option<Vec<Block>>,
    drive: Option<Controller>,
    /// The eventfd of INTx.
    line: Option<Vectors>,
    /// Whether RAM is filled with the guard pattern.
    guarded: bool,
    next_seed: u64,
    /// Of former connections.
    past: Accesses,
    report: Report,
}

/// Whether the step succeeded, and its result.
type Outcome = (bool, Option<Found>);

impl Session {
    /// Connects.
    ///
    /// # Errors
    /// If there is no device, or RAM cannot be allocated.
    pub fn connect(options: Options) -> Result<Self> {
        let ram = Ram::new(options.layout)?;
        let device = Device::connect(&options.socket, options.patience)?;
        let vectors = options.vectors.unwrap_or(device.vectors());
        ensure!(
            vectors <= device.vectors(),
            "{vectors} vectors to set up: the device has {}",
            device.vectors()
        );
        let report = Report {
            socket: options.socket.display().to_string(),
            guest_ram_bytes: options.layout.total(),
            low_ram_bytes: options.layout.low,
            high_ram_bytes: options.layout.high,
            page_bytes: options.layout.page,
            areas: device.areas(),
            ..Report::default()
        };
        Ok(Self {
            machine: Machine {
                ram,
                device,
                vectors: Vectors::new(vectors)?,
                timeout: options.timeout,
                early_interrupts: 0,
            },
            stage: Stage::Connected,
            mapped: None,
            drive: None,
            line: None,
            guarded: false,
            next_seed: options.seed,
            past: Accesses::default(),
            report,
            options,
        })
    }

    /// Performs a step, given as a line of a script.
    pub fn run(&mut self, line: &str) -> Answer {
        self.answer(line, false)
    }

    /// The results of all steps.
    ///
    /// # Errors
    /// If interrupts cannot be counted.
    pub fn finish(mut self) -> Result<Report> {
        let interrupts = self.count_interrupts()?;
        let mut report = self.report;
        report.msix_guest = interrupts;
        report.early_interrupts = self.machine.early_interrupts;
        let now = self.machine.device.accesses();
        report.mapped_accesses = self.past.mapped + now.mapped;
        report.trapped_accesses = self.past.trapped + now.trapped;
        report.ok = report.steps.iter().all(|step| step.ok);
        Ok(report)
    }

    fn answer(&mut self, line: &str, implied: bool) -> Answer {
        let start = Instant::now();
        let outcome = line.parse().and_then(|step| self.perform(&step));
        let mut answer = Answer {
            step: line.trim().to_owned(),
            ok: false,
            implied,
            us: micros(start.elapsed()),
            error: None,
            found: None,
        };
        match outcome {
            Ok((ok, found)) => (answer.ok, answer.found) = (ok, found),
            Err(error) => answer.error = Some(format!("{error:#}")),
        }
        self.report.steps.push(answer.clone());
        answer
    }

    /// Performs the steps that lead to `stage`.
    fn need(&mut self, stage: Stage) -> Result<()> {
        if self.mapped.is_none() {
            self.imply("map")?;
        }
        for (reached, step) in [
            (Stage::Reset, "reset"),
            (Stage::Placed, "place"),
            (Stage::BusMaster, "bme"),
        ] {
            if stage >= reached && self.stage < reached {
                self.imply(step)?;
            }
        }
        Ok(())
    }

    fn imply(&mut self, step: &str) -> Result<()> {
        let answer = self.answer(step, true);
        match answer.error {
            Some(error) => bail!("{step}: {error}"),
            None => Ok(()),
        }
    }

    /// The machine and its enabled controller; enables it if necessary.
    ///
    /// # Errors
    /// If the controller does not become ready.
    pub fn drive(&mut self) -> Result<(&mut Machine, &mut Controller)> {
        if self.drive.is_none() {
            self.imply("driver")?;
        }
        let drive = self.drive.as_mut().context("no driver")?;
        Ok((&mut self.machine, drive))
    }

    fn perform(&mut self, step: &Step) -> Result<Outcome> {
        let found = match *step {
            Step::Map => Some(self.map()?),
            Step::Unmap(part) => Some(self.unmap(part)?),
            Step::Reset => self.reset()?,
            Step::Place => Some(self.place()?),
            Step::Bme => Some(self.enable_bus_master()?),
            Step::Driver => Some(self.bring_up()?),
            Step::BeforeBme { ms } => return self.before_bme(ms),
            Step::Io { bytes, offset } => return self.io(bytes, offset),
            Step::Interrupts(count) => return self.interrupts(count),
            Step::Rogue { to, bytes } => return self.rogue(to, bytes),
            Step::Irqs => Some(Found::Interrupts(self.count_interrupts()?)),
            Step::Intx => self.enable_intx()?,
            Step::Peek { region, offset } => {
                let mut data = [0; 4];
                self.machine.device.read(region, offset, &mut data)?;
                Some(Found::Value(u32::from_le_bytes(data)))
            }
            Step::Poke {
                region,
                offset,
                value,
            } => {
                let data = value.to_le_bytes();
                self.machine.device.write(region, offset, &data)?;
                None
            }
            Step::Latency(count) => Some(self.latency(count)?),
            Step::Unbind => Some(self.unbind()?),
            Step::Reconnect => self.reconnect()?,
            // Handled by the script's reader.
            Step::Hold(_) | Step::Quit => None,
        };
        Ok((true, found))
    }

    fn map(&mut self) -> Result<Found> {
        let mapped = self.mapped.get_or_insert_default();
        for block in self.options.layout.blocks() {
            if !mapped.contains(&block) {
                self.machine.device.map(&self.machine.ram, block)?;
                mapped.push(block);
            }
        }
        Ok(mapped_bytes(mapped))
    }

    fn unmap(&mut self, part: Part) -> Result<Found> {
        let mapped = self.mapped.get_or_insert_default();
        let (gone, left) = mapped.iter().partition(|block: &&Block| match part {
            Part::Low => block.gpa == 0,
            Part::High => block.gpa != 0,
            Part::All => true,
        });
        let gone: Vec<Block> = gone;
        *mapped = left;
        for block in gone {
            self.machine.device.unmap(block)?;
        }
        Ok(mapped_bytes(mapped))
    }

    fn reset(&mut self) -> Result<Option<Found>> {
        self.need(Stage::Connected)?;
        self.drive = None;
        self.machine.device.disable_vectors()?;
        self.machine.device.reset()?;
        self.stage = Stage::Reset;
        Ok(None)
    }

    fn place(&mut self) -> Result<Found> {
        self.need(Stage::Reset)?;
        self.drive = None;
        self.stage = Stage::Reset;
        let device = &mut self.machine.device;
        let bars = pci::place_bars(device)?;
        device.enable_vectors(&self.machine.vectors)?;
        let vectors = pci::enable_msix(device, true)?;
        pci::set_command(device, pci::MEMORY | pci::INTX_DISABLE)?;
        self.stage = Stage::Placed;
        Ok(Found::Placed(Placed {
            bars: bars
                .iter()
                .map(|bar| (bar.bar, bar.gpa, bar.size))
                .collect(),
            vectors,
            vectors_used: self.machine.vectors.len(),
        }))
    }

    fn enable_bus_master(&mut self) -> Result<Found> {
        self.need(Stage::Placed)?;
        let device = &mut self.machine.device;
        let command = pci::command(device)? | pci::BUS_MASTER;
        let start = Instant::now();
        pci::set_command(device, command)?;
        let us = micros(start.elapsed());
        ensure!(
            pci::command(device)? & pci::BUS_MASTER != 0,
            "bus-master enable was refused after {us} us: the backend's status and log say why"
        );
        self.stage = Stage::BusMaster;
        self.report.bme_us.get_or_insert(us);
        Ok(Found::BmeUs(us))
    }

    fn bring_up(&mut self) -> Result<Found> {
        self.need(Stage::BusMaster)?;
        const NVM_EXPRESS: u32 = 0x01_08_02;
        let class = pci::class(&mut self.machine.device)?;
        ensure!(
            class == NVM_EXPRESS,
            "the function is of class {class:#08x}: the driver is for NVMe devices, {NVM_EXPRESS:#08x}"
        );
        self.drive = None;
        let (queues, namespace) = (self.options.queues, self.options.namespace);
        let drive = Controller::bring_up(&mut self.machine, queues, namespace)?;
        let identity = drive.identity();
        let found = Found::Drive(Drive {
            serial: identity.serial.clone(),
            model: identity.model.clone(),
            bytes: identity.bytes(),
            block_bytes: identity.block_bytes,
            transfer_bytes: identity.transfer_bytes,
            queues: drive.queues(),
        });
        self.drive = Some(drive);
        Ok(found)
    }

    fn before_bme(&mut self, ms: u64) -> Result<Outcome> {
        self.need(Stage::Placed)?;
        ensure!(
            self.stage == Stage::Placed,
            "bus-master enable is set: `reset` first"
        );
        let found = checks::before_bme(&mut self.machine, Duration::from_millis(ms))?;
        self.report.before_bme = Some(found.clone());
        let ok = found.completions == 0 && found.interrupts == 0 && found.ram_bytes_changed == 0;
        Ok((ok, Some(Found::BeforeBme(found))))
    }

    fn io(&mut self, bytes: u64, offset: u64) -> Result<Outcome> {
        let seed = self.next_seed;
        let (machine, drive) = self.drive()?;
        let found = workload::io(machine, drive, bytes, offset, seed)?;
        self.next_seed = seed.wrapping_add(1);
        self.guarded = false;
        let ok = found.checksum_ok;
        let so_far = self.report.checksum_ok.unwrap_or(true);
        self.report.checksum_ok = Some(so_far && ok);
        Ok((ok, Some(Found::Io(found))))
    }

    fn interrupts(&mut self, count: u64) -> Result<Outcome> {
        let (machine, drive) = self.drive()?;
        let before = sum(&machine.vectors);
        workload::interrupts(machine, drive, count)?;
        let found = self.count_interrupts()?;
        Ok((found.sum == before + count, Some(Found::Interrupts(found))))
    }

    fn rogue(&mut self, to: crate::step::Target, bytes: u64) -> Result<Outcome> {
        self.drive()?;
        let mapped = self.mapped.as_deref().unwrap_or_default();
        let address = checks::rogue_address(self.options.layout, mapped, to, bytes)?;
        if !self.guarded {
            checks::guard(&self.machine.ram)?;
            self.guarded = true;
        }
        let (machine, drive) = self.drive()?;
        let found = checks::rogue(machine, drive, address, bytes)?;
        if !found.completed {
            // Its queue is out of sync; the next step that needs the controller enables it
            // anew.
            self.drive = None;
        }
        let ok = found.ram_bytes_changed == 0;
        *self.report.rogue_bytes_written.get_or_insert(0) += found.ram_bytes_changed;
        self.report.rogue.push(found.clone());
        Ok((ok, Some(Found::Rogue(found))))
    }

    fn count_interrupts(&mut self) -> Result<Interrupts> {
        self.machine.vectors.drain()?;
        let vectors = self.machine.vectors.counts();
        Ok(Interrupts {
            sum: vectors.values().sum(),
            vectors,
        })
    }

    fn enable_intx(&mut self) -> Result<Option<Found>> {
        self.need(Stage::Reset)?;
        let line = Vectors::new(1)?;
        self.machine.device.disable_vectors()?;
        self.machine.device.enable_intx(&line)?;
        // No thread waits on it: the registers show the state.
        self.line = Some(line);
        Ok(None)
    }

    fn latency(&mut self, count: u64) -> Result<Found> {
        self.need(Stage::Placed)?;
        let device = &mut self.machine.device;
        let mut data = [0; 4];
        let config_read = round_trips(count, || device.read(crate::device::CONFIG, 0, &mut data))?;
        let bar_read = round_trips(count, || device.read(0, 0, &mut data))?;
        let areas = device.areas();
        let mapped_read = match areas.iter().find(|area| area.mapped) {
            Some(area) => Some(round_trips(count, || {
                device.load(area.bar, area.offset).map(|_| ())
            })?),
            None => None,
        };
        let found = RoundTrips {
            config_read,
            bar_read,
            mapped_read,
        };
        self.report.round_trips = Some(found.clone());
        Ok(Found::RoundTrips(found))
    }

    fn unbind(&mut self) -> Result<Found> {
        let shut_down = match self.drive.take() {
            Some(drive) => Some(drive.shut_down(&mut self.machine)?),
            None => None,
        };
        let device = &mut self.machine.device;
        pci::enable_msix(device, false)?;
        device.disable_vectors()?;
        let start = Instant::now();
        pci::set_command(device, pci::MEMORY)?;
        let bme_off_us = micros(start.elapsed());
        ensure!(
            pci::command(device)? & pci::BUS_MASTER == 0,
            "bus-master enable is still set"
        );
        self.stage = self.stage.min(Stage::Reset);
        Ok(Found::Unbound(Unbound {
            shut_down,
            bme_off_us,
        }))
    }

    fn reconnect(&mut self) -> Result<Option<Found>> {
        let old = &mut self.machine.device;
        self.past.mapped += old.accesses().mapped;
        self.past.trapped += old.accesses().trapped;
        old.close();
        self.drive = None;
        self.mapped = None;
        self.stage = Stage::Connected;
        self.machine.device = Device::connect(&self.options.socket, Duration::ZERO)?;
        self.report.areas = self.machine.device.areas();
        Ok(None)
    }
}

fn mapped_bytes(mapped: &[Block]) -> Found {
    Found::Mapped(mapped.iter().map(|block| block.len).sum())
}

fn sum(vectors: &Vectors) -> u64 {
    vectors.counts().values().sum()
}
