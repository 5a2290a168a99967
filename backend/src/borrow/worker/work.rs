//! The work itself: each step of the state machine, and how it is undone.

use std::{
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farside_control::{BarOwner, CallError, Client, Described, Epoch, Fences, IrqUpdate, RamRange};
use farside_fabric::pin::{self, PinOptions, PinProgress};
use farside_guest_layout::{PlanRules, ProbeLimits, plan, probe};
use farside_irq_relay::SetIrqs;
use farside_ntb::BarWindow;
use farside_vfio_user::RateLimit;

use super::{Job, LayoutReport, MemoryChange, NewLease, Outcome, Run, Settings, WorkError};
use crate::{
    borrow::{State, Step, bars::LeasedBars, error::PathError, far::FarSide, path::OpenPath},
    dma_table::{Blocked, DmaTable, Mapping},
};

/// How long a job may take that pins nothing. Below a VMM's message timeout of
/// 5 s.
const CALLS_TIMEOUT: Duration = Duration::from_secs(4);

/// What calls to the lender may take when pinning has used up its time.
const CALLS_MARGIN: Duration = Duration::from_millis(300);

/// How long a lender may take to stop a device whose lease is broken off.
const HANG_UP_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a lender may take to notice that a backend of this VM, which was
/// here before, is gone.
const SUCCESSION_TIMEOUT: Duration = Duration::from_secs(2);

/// How often to look whether it has.
const SUCCESSION_STEP: Duration = Duration::from_millis(10);

/// The thread's state.
pub(super) struct Borrow {
    settings: Settings,
    described: Described,
    client: Option<Client>,
    path: OpenPath,
    /// The VM's way to the device's BARs, where that leads through an NTB.
    bar_window: Option<BarWindow>,
    /// When pinning for the current job must be done; calls to the lender
    /// have [`CALLS_MARGIN`] more.
    deadline: Instant,
    cancel: Arc<AtomicBool>,
}

impl Borrow {
    pub(super) fn new(settings: Settings, described: Described, cancel: Arc<AtomicBool>) -> Self {
        Self {
            path: OpenPath::new(FarSide::new(described.bars, settings.ntb.as_ref())),
            settings,
            described,
            client: None,
            bar_window: None,
            deadline: Instant::now(),
            cancel,
        }
    }

    /// At the end of the thread: gives the device back.
    pub(super) fn finish(&mut self) {
        self.set_deadline(CALLS_TIMEOUT);
        self.give_back();
    }

    /// Does a job.
    pub(super) fn work(&mut self, job: Job) -> Outcome {
        self.set_deadline(match &job {
            Job::Run(run) if run.pins() => self.settings.open_timeout,
            _ => CALLS_TIMEOUT,
        });
        let result = match job {
            Job::Run(run) => return self.run(*run),
            Job::Check => self.check(),
            Job::SetIrqs(request) => self.set_irqs(&request),
            Job::SetIntxDisable(disabled) => self.lease(|client| client.set_intx_disable(disabled)),
        };
        let error = result.err();
        let lost = error.as_ref().is_some_and(WorkError::is_lost);
        if lost && self.client.is_some() {
            self.drop_lease();
            return Outcome {
                state: Some(State::Lost),
                error,
                ..Outcome::default()
            };
        }
        Outcome {
            error,
            ..Outcome::default()
        }
    }

    fn set_deadline(&mut self, timeout: Duration) {
        self.deadline = Instant::now() + timeout;
        let deadline = self.calls_deadline();
        if let Some(client) = &mut self.client {
            client.set_deadline(deadline);
        }
    }

    fn calls_deadline(&self) -> Option<Instant> {
        Some(self.deadline + CALLS_MARGIN)
    }

    fn run(&mut self, run: Run) -> Outcome {
        let mut outcome = Outcome::default();
        let mut state = run.state;
        for step in run.steps {
            match self.step(*step, &run, &mut outcome) {
                Ok(()) => state = state.after(*step),
                Err(error) => {
                    state = self.clean_up(*step, state, &error);
                    outcome.error = Some(error);
                    break;
                }
            }
        }
        outcome.state = Some(state);
        outcome
    }

    fn step(&mut self, step: Step, run: &Run, outcome: &mut Outcome) -> Result<(), WorkError> {
        match step {
            Step::Borrow => self.borrow_device(run, outcome),
            Step::Open => self.open(run, outcome),
            Step::Close => {
                let path = &mut self.path;
                with_lease(&mut self.client, |client| path.close(client))?;
                self.log("stopped DMA; windows closed, guest RAM unpinned");
                Ok(())
            }
            Step::Reset => {
                self.lease(|client| client.reset())?;
                self.path.forget();
                self.log("reset");
                Ok(())
            }
            Step::Remap => {
                self.remap(run.change.as_ref())?;
                outcome.opened = Some(self.path.report());
                Ok(())
            }
            Step::Return => {
                self.give_back();
                Ok(())
            }
            Step::Abandon => {
                self.drop_lease();
                Ok(())
            }
        }
    }

    /// After a step that failed: no window stays open, no page pinned.
    fn clean_up(&mut self, step: Step, state: State, error: &WorkError) -> State {
        if error.is_lost() {
            self.drop_lease();
            return match step {
                // Nothing was lost that we had.
                Step::Borrow => state,
                _ => State::Lost,
            };
        }
        match step {
            Step::Borrow | Step::Return | Step::Abandon => self.drop_lease(),
            Step::Open | Step::Remap => {
                let path = &mut self.path;
                if let Err(error) = with_lease(&mut self.client, |client| path.close(client)) {
                    self.give_up(&error);
                    return State::Lost;
                }
            }
            // Asking again would only take longer.
            Step::Close | Step::Reset => self.give_up(error),
        }
        state.after_refusal(step)
    }

    /// The lender does not stop the device when it is told to. Closing the
    /// connection makes it do so before it does anything else with it.
    fn give_up(&mut self, error: &WorkError) {
        log::error!(
            "{}: cannot stop DMA ({error}): giving the device up",
            self.name()
        );
        self.drop_lease();
    }

    fn check(&mut self) -> Result<(), WorkError> {
        let Settings {
            vm, device, lender, ..
        } = &self.settings;
        let mut client = Client::connect_by(lender, Some(vm), self.calls_deadline())?;
        if client.describe(device)? != self.described {
            return Err(WorkError::Changed(device.clone()));
        }
        let shown = self.fence()?;
        let patience = Instant::now() + SUCCESSION_TIMEOUT;
        loop {
            let entry = client.status(device)?.entry;
            if let Some(fence) = entry.fence(vm)
                && shown.unwrap_or_default() < fence.epoch
            {
                return Err(CallError::from(fence.refusal(device, shown)).into());
            }
            match entry.borrowed_by {
                None => return Ok(()),
                // A backend that was here before us, was killed, and whose
                // lease the lender is taking back.
                Some(holder) if holder.vm == *vm && Instant::now() < patience => {
                    std::thread::sleep(SUCCESSION_STEP);
                }
                Some(holder) => return Err(CallError::from(holder.refusal(device)).into()),
            }
        }
    }

    /// What this host has of a handover. Read each time: the VM may move to and
    /// fro while its backend runs.
    fn fence(&self) -> Result<Option<Epoch>, WorkError> {
        let Some(path) = &self.settings.fences else {
            return Ok(None);
        };
        let device = &self.settings.device;
        let fences = Fences::load(path).map_err(|source| WorkError::Fences {
            device: device.clone(),
            source,
        })?;
        Ok(fences.of(device))
    }

    fn borrow_device(&mut self, run: &Run, outcome: &mut Outcome) -> Result<(), WorkError> {
        let Settings {
            vm, device, lender, ..
        } = &self.settings;
        let mut client = Client::connect_by(lender, Some(vm), self.calls_deadline())?;
        if client.describe(device)? != self.described {
            return Err(WorkError::Changed(device.clone()));
        }
        if self.described.bars == BarOwner::Lender {
            // The client has not booted yet, and can still be told.
            let ram = guest_ram(run.memory.as_ref())?;
            client.check(device, self.settings.route, ram)?;
        }
        client.set_fence(self.fence()?);
        let files: Vec<_> = run.bar_files.iter().map(|file| file.as_fd()).collect();
        let lease = client.borrow_device(device, self.settings.route, &files)?;
        let epoch = client.epoch();
        self.log(&format!(
            "borrowed from lender {} (epoch {epoch})",
            client.lender()
        ));
        self.client = Some(client);
        self.lease(|client| client.set_intx_disable(run.intx_disable))?;
        for request in &run.irqs {
            self.set_irqs(request)?;
        }
        let description = &self.described.description;
        let ntb = self.settings.ntb.as_ref();
        let bars =
            LeasedBars::new(description, ntb, &lease.bars, lease.files).map_err(PathError::from)?;
        self.bar_window = bars.window;
        outcome.lease = Some(NewLease {
            epoch,
            bars: bars.files,
            registers: lease.registers,
        });
        Ok(())
    }

    fn open(&mut self, run: &Run, outcome: &mut Outcome) -> Result<(), WorkError> {
        let started = Instant::now();
        let before = self.path.report().bytes_pinned;
        let table = run.memory.as_ref().expect("Open comes with the table");
        if let Some(blocked) = table.blocked() {
            return Err(blocked.into());
        }
        let layout = probe(&mut table.oracle(), &ProbeLimits::default())?;
        let plan = plan(&layout, &PlanRules::default());
        let mappings: Vec<Mapping> = table.iter().cloned().collect();
        let memory: Vec<_> = mappings.iter().filter_map(Mapping::memory).collect();
        pin::check(&memory, self.settings.pin_policy).map_err(PathError::from)?;
        let progress = Progress::new(self.name());
        let show = |at| progress.show(at);
        let cancel = Arc::clone(&self.cancel);
        let pinning = PinOptions {
            progress: Some(&show),
            ..self.pinning(&cancel)
        };
        let path = &mut self.path;
        let client = leased(&mut self.client)?;
        path.open(client, &plan, &mappings, &pinning)?;
        client.enable_bus_master()?;
        let report = path.report();
        let open_us = started.elapsed().as_micros() as u64;
        outcome.opened = Some(report);
        outcome.layout = Some(LayoutReport {
            guest_ram_bytes: layout.ram_bytes(),
            layout_probes: layout.probes,
            bme_to_ready_us: open_us,
            bytes_pinned_before_bme: before,
        });
        self.log(&format!(
            "DMA-ready {open_us} µs after bus-master enable: {} MiB pinned, {} windows, {} LUT entries",
            report.bytes_pinned >> 20,
            report.dma_windows,
            report.lut_entries
        ));
        Ok(())
    }

    fn remap(&mut self, change: Option<&MemoryChange>) -> Result<(), WorkError> {
        let cancel = Arc::clone(&self.cancel);
        let pinning = self.pinning(&cancel);
        let client = leased(&mut self.client)?;
        match change {
            Some(MemoryChange::Map(mapping)) if mapping.is_private_ram() => {
                return Err(Blocked::private_ram(mapping).into());
            }
            Some(MemoryChange::Map(mapping)) => self.path.map(client, mapping, &pinning)?,
            Some(MemoryChange::Refused(error)) => return Err(Blocked::Refused(*error).into()),
            Some(MemoryChange::Unmap(mappings)) => {
                for mapping in mappings {
                    self.path.unmap(client, mapping)?;
                }
            }
            None => {}
        }
        Ok(())
    }

    fn pinning<'a>(&self, cancel: &'a AtomicBool) -> PinOptions<'a> {
        PinOptions {
            deadline: Some(self.deadline),
            cancel: Some(cancel),
            ..PinOptions::new(self.settings.pin_policy)
        }
    }

    fn set_irqs(&mut self, request: &SetIrqs) -> Result<(), WorkError> {
        let (update, fds) = IrqUpdate::new(request, self.settings.relay_interrupts);
        self.lease(|client| client.set_irqs(update, &fds))
    }

    fn lease(
        &mut self,
        call: impl FnOnce(&mut Client) -> Result<(), CallError>,
    ) -> Result<(), WorkError> {
        with_lease(&mut self.client, call)
    }

    /// Whatever the lender says to it, the lease is over afterwards.
    fn give_back(&mut self) {
        if self.client.is_some() {
            match self.lease(|client| client.return_device()) {
                Ok(()) => self.log("returned"),
                Err(error) => log::error!("{}: cannot return it: {error}", self.name()),
            }
            self.drop_lease();
        }
    }

    /// Closing the connection is what ends the lease when all else fails: the
    /// lender stops the device before it does anything else. Waits until it
    /// has, so that a `DMA_UNMAP` is not answered before; a lender that is
    /// alive but does not get to it cannot be waited for for ever.
    fn drop_lease(&mut self) {
        if let Some(client) = self.client.take()
            && !client.hang_up(HANG_UP_TIMEOUT)
        {
            log::error!(
                "{}: the lender has not confirmed within {HANG_UP_TIMEOUT:?} that the device does no DMA any more",
                self.name()
            );
        }
        self.path.forget();
        self.bar_window = None;
    }

    fn name(&self) -> String {
        format!("device {} (VM {})", self.settings.device, self.settings.vm)
    }

    /// For what a guest or client can cause as often as it likes.
    fn log(&self, what: &str) {
        static LINES: RateLimit = RateLimit::new();
        if let Some(held_back) = LINES.allow() {
            log::info!("{}: {what}{held_back}", self.name());
        }
    }
}

/// Where the guest's RAM is, for a lender to look at.
fn guest_ram(table: Option<&DmaTable>) -> Result<Vec<RamRange>, WorkError> {
    let Some(table) = table else {
        return Ok(Vec::new());
    };
    let layout = probe(&mut table.oracle(), &ProbeLimits::default())?;
    let windows = plan(&layout, &PlanRules::default()).windows;
    let ram = windows.iter().map(|window| RamRange {
        start: window.range.start().get(),
        len: window.range.len(),
    });
    Ok(ram.collect())
}

fn leased(client: &mut Option<Client>) -> Result<&mut Client, WorkError> {
    client
        .as_mut()
        .ok_or_else(|| CallError::Lost(farside_control::ChannelError::Closed).into())
}

fn with_lease(
    client: &mut Option<Client>,
    call: impl FnOnce(&mut Client) -> Result<(), CallError>,
) -> Result<(), WorkError> {
    Ok(call(leased(client)?)?)
}

/// Says how far pinning is, every second of it.
struct Progress {
    name: String,
    started: Instant,
    said: AtomicU64,
}

impl Progress {
    fn new(name: String) -> Self {
        Self {
            name,
            started: Instant::now(),
            said: AtomicU64::new(0),
        }
    }

    fn show(&self, at: PinProgress) {
        let second = self.started.elapsed().as_secs();
        if self.said.fetch_max(second, Ordering::Relaxed) < second {
            let PinProgress { done, total } = at;
            log::info!(
                "{}: pinning guest RAM, {} of {} MiB",
                self.name,
                done >> 20,
                total >> 20
            );
        }
    }
}
