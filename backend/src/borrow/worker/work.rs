//! The work itself: each step of the state machine, and how it is undone.

use std::{
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use farside_daemon::StateLog;
use farside_error_chain::Chain;
use farside_fabric::pin::{self, PinOptions};
use farside_guest_layout::{PlanRules, ProbeLimits, plan, probe};
use farside_irq_relay::SetIrqs;
use farside_lender_protocol::{
    BarOwner, CallError, Client, Described, DeviceEntry, Epoch, Fences, IrqUpdate, RamRange,
};
use farside_ntb::BarWindow;

use super::{
    Job, LayoutReport, MemoryChange, NewLease, Outcome, Run, Settings, WorkError,
    progress::Progress,
};
use crate::{
    borrow::{
        State, Step, bars::LeasedBars, error::PathError, far::FarSide, page_pins::PagePins,
        path::OpenPath,
    },
    dma_table::{DmaTable, Mapping},
};

/// How long the lender may take for a job that pins nothing: longer than it
/// waits for a device's DMA to drain. With [`HANG_UP_TIMEOUT`], below a VMM's
/// message timeout of 5 s.
const CALLS_TIMEOUT: Duration = Duration::from_millis(3500);

/// What the lender has to itself when pinning has used up its time.
const CALLS_AFTER_PINNING: Duration = Duration::from_millis(500);

/// How long the lender may take at least to undo what failed.
const UNDO_TIMEOUT: Duration = Duration::from_millis(300);

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
    lines: StateLog,
    /// The VM's way to the device's BARs, where that leads through an NTB.
    bar_window: Option<BarWindow>,
    /// When pinning for the current job must be done.
    pin_by: Instant,
    /// When the lender must have answered.
    calls_by: Instant,
    /// The last borrow was not answered in time: its lease may yet be granted,
    /// to a connection that is closed.
    borrow_unanswered: bool,
    cancel: Arc<AtomicBool>,
}

impl Borrow {
    pub(super) fn new(settings: Settings, described: Described, cancel: Arc<AtomicBool>) -> Self {
        Self {
            lines: StateLog::new(|line| log::info!("{line}")),
            path: OpenPath::new(FarSide::new(described.bars, settings.ntb.as_ref())),
            settings,
            described,
            client: None,
            bar_window: None,
            pin_by: Instant::now(),
            calls_by: Instant::now(),
            borrow_unanswered: false,
            cancel,
        }
    }

    /// At the end of the thread: gives the device back.
    pub(super) fn finish(&mut self) {
        self.give_lender(CALLS_TIMEOUT);
        self.give_back();
    }

    /// Does a job.
    pub(super) fn work(&mut self, job: Job) -> Outcome {
        let limit = self.settings.open_limit();
        self.pin_by = Instant::now() + limit;
        self.give_lender(match &job {
            Job::Run(run) => time_for(run.steps, limit, self.path.is_behind_iommu()),
            _ => CALLS_TIMEOUT,
        });
        let result = match job {
            Job::Run(run) => return self.run(*run),
            Job::Check => self.check(),
            Job::SetIrqs(request) => self.set_irqs(&request),
            Job::SetIntxDisable(disabled) => self.lease(|client| client.set_intx_disable(disabled)),
        };
        let error = result.err();
        let lost = error.as_ref().is_some_and(WorkError::is_lost) && self.client.is_some();
        if lost {
            self.drop_lease();
        }
        Outcome {
            state: lost.then_some(State::Lost),
            opened: self.path.report(),
            error,
            ..Outcome::default()
        }
    }

    /// Gives the lender so long from now on for all that is asked of it.
    fn give_lender(&mut self, timeout: Duration) {
        self.calls_by = Instant::now() + timeout;
        if let Some(client) = &mut self.client {
            client.set_deadline(Some(self.calls_by));
        }
    }

    fn run(&mut self, run: Run) -> Outcome {
        let mut outcome = Outcome::default();
        let mut state = run.state;
        for step in run.steps {
            match self.step(*step, &run, &mut outcome) {
                Ok(()) => state = state.after(*step),
                Err(error) => {
                    state = self.clean_up(*step, state, &run, &error);
                    outcome.error = Some(error);
                    break;
                }
            }
        }
        outcome.state = Some(state);
        outcome.opened = self.path.report();
        let blocked = run.change.as_ref().and_then(MemoryChange::blocked);
        if outcome.error.is_none() {
            outcome.error = blocked.map(WorkError::from);
        }
        outcome
    }

    fn step(&mut self, step: Step, run: &Run, outcome: &mut Outcome) -> Result<(), WorkError> {
        match step {
            Step::Borrow => self.borrow_device(run, outcome),
            Step::Open => self.open(run, outcome),
            Step::Close | Step::Stop => {
                self.close()?;
                self.log("stopped", "stopped DMA; windows closed, guest RAM unpinned");
                Ok(())
            }
            Step::Reset => {
                self.lease(|client| client.reset())?;
                self.path.forget();
                self.log("reset", "reset");
                Ok(())
            }
            Step::Map => self.map(run),
            Step::Unmap => self.unmap(run),
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

    /// After a step that failed: undoes what it did. See [`crate::borrow`].
    fn clean_up(&mut self, step: Step, state: State, run: &Run, error: &WorkError) -> State {
        if error.is_lost() {
            self.drop_lease();
            return match step {
                // No lease was held, so the state is unchanged.
                Step::Borrow => state,
                _ => State::Lost,
            };
        }
        // What is left of the time, if that is more.
        let left = self.calls_by.saturating_duration_since(Instant::now());
        self.give_lender(left.max(UNDO_TIMEOUT));
        match step {
            Step::Borrow | Step::Return | Step::Abandon => {
                self.borrow_unanswered |= error.is_late();
                self.drop_lease();
                state.after_refusal(step)
            }
            Step::Map if !error.is_late() && self.undo_map(run) => state.after_refusal(step),
            Step::Open | Step::Map => match self.close() {
                Ok(()) => State::Leased,
                Err(error) => self.after_failed_close(step, state, &error),
            },
            // Answered, memory must be out of reach.
            Step::Unmap if !error.is_late() => match self.close() {
                Ok(()) => state.after_refusal(step),
                Err(error) => self.after_failed_close(step, state, &error),
            },
            // Asking again would only take longer.
            Step::Unmap | Step::Stop | Step::Close | Step::Reset => {
                self.after_failed_close(step, state, error)
            }
        }
    }

    /// Whether what failed of adding memory is undone, and nothing else.
    fn undo_map(&mut self, run: &Run) -> bool {
        let (Some(MemoryChange::Map(mapping)), Some(client)) = (&run.change, &mut self.client)
        else {
            return false;
        };
        match self.path.undo_map(client, mapping) {
            Ok(()) => {
                self.log(
                    "unreachable",
                    &format!(
                        "GPA {} is out of the device's reach: DMA to it is refused",
                        mapping.range
                    ),
                );
                true
            }
            Err(error) => {
                log::error!("{}: {}: stopping DMA", self.name(), Chain(&error));
                false
            }
        }
    }

    /// The lender has not answered that DMA is stopped, or that it is not.
    fn after_failed_close(&mut self, step: Step, state: State, error: &WorkError) -> State {
        let next = match error.is_late() {
            true => state.after_late(step),
            false => State::Lost,
        };
        if next == State::Lost {
            self.give_up(error);
        }
        next
    }

    /// The lender does not stop the device when it is told to. Closing the
    /// connection makes it do so before it does anything else with it.
    fn give_up(&mut self, error: &WorkError) {
        log::error!(
            "{}: cannot stop DMA ({error}): giving the device up",
            self.name(),
            error = Chain(error)
        );
        self.drop_lease();
    }

    fn check(&mut self) -> Result<(), WorkError> {
        let Settings {
            vm, device, lender, ..
        } = &self.settings;
        let mut client = Client::connect_by(lender, Some(vm), Some(self.calls_by))?;
        if client.describe(device)? != self.described {
            return Err(WorkError::Changed(device.clone()));
        }
        let shown = self.fence()?;
        let entry = self.when_left(&mut client)?;
        if let Some(fence) = entry.fence(vm)
            && shown.unwrap_or_default() < fence.epoch
        {
            return Err(CallError::from(fence.refusal(device, shown)).into());
        }
        match entry.borrowed_by {
            None => Ok(()),
            Some(holder) => Err(CallError::from(holder.refusal(device)).into()),
        }
    }

    /// The device's entry, when the lender has taken back a lease of this VM
    /// that nobody uses any more: of a backend that was here before and was
    /// killed, or of a borrow that was answered too late. Waits no longer than
    /// [`SUCCESSION_TIMEOUT`], and not when nobody waits for the job.
    fn when_left(&self, client: &mut Client) -> Result<DeviceEntry, CallError> {
        let Settings { vm, device, .. } = &self.settings;
        let patience = Instant::now() + SUCCESSION_TIMEOUT;
        loop {
            let entry = client.status(device)?.entry;
            let ours = entry
                .borrowed_by
                .as_ref()
                .is_some_and(|holder| holder.vm == *vm);
            let cancelled = self.cancel.load(Ordering::Relaxed);
            if !ours || cancelled || Instant::now() >= patience {
                return Ok(entry);
            }
            std::thread::sleep(SUCCESSION_STEP);
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
        let mut client = Client::connect_by(lender, Some(vm), Some(self.calls_by))?;
        if client.describe(device)? != self.described {
            return Err(WorkError::Changed(device.clone()));
        }
        if self.described.bars == BarOwner::Lender {
            // The client has not booted yet, and can still be told.
            let ram = guest_ram(run.memory.as_ref())?;
            client.check(device, self.settings.route, ram)?;
        }
        if self.borrow_unanswered {
            self.when_left(&mut client)?;
            self.borrow_unanswered = false;
        }
        client.set_fence(self.fence()?);
        let files: Vec<_> = run.bar_files.iter().map(|file| file.as_fd()).collect();
        let lease = client.borrow_device(device, self.settings.route, &files)?;
        let epoch = client.epoch();
        self.log(
            "borrowed",
            &format!("borrowed from lender {} (epoch {epoch})", client.lender()),
        );
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
        let progress = Progress::new(self.name(), &self.settings);
        let show = |at| progress.show(at);
        let watch = pin::RoomWatch::new(&memory);
        let room = || watch.check();
        let cancel = Arc::clone(&self.cancel);
        let pinning = PinOptions {
            progress: Some(&show),
            room: Some(&room),
            ..self.pinning(&cancel)
        };
        let path = &mut self.path;
        let client = leased(&mut self.client)?;
        path.open(client, &plan, &mappings, &pinning)?;
        client.enable_bus_master()?;
        let report = path.report();
        let open_us = started.elapsed().as_micros() as u64;
        outcome.layout = Some(LayoutReport {
            guest_ram_bytes: layout.ram_bytes(),
            layout_probes: layout.probes,
            bme_to_ready_us: open_us,
            bytes_pinned_before_bme: before,
        });
        self.log("ready", &format!(
            "DMA-ready {open_us} µs after bus-master enable: {} MiB pinned, {} windows, {} LUT entries",
            report.bytes_pinned >> 20,
            report.dma_windows,
            report.lut_entries
        ));
        Ok(())
    }

    fn map(&mut self, run: &Run) -> Result<(), WorkError> {
        let Some(MemoryChange::Map(mapping)) = &run.change else {
            return Ok(());
        };
        let cancel = Arc::clone(&self.cancel);
        let memory = mapping.memory();
        let room = || memory.as_ref().map_or(Ok(()), pin::check_room_for_more);
        // Pages behind a vIOMMU are pinned already, most of them.
        if !PagePins::fits(mapping.range.len()) {
            room().map_err(PathError::from)?;
        }
        let pinning = PinOptions {
            room: Some(&room),
            ..self.pinning(&cancel)
        };
        let client = leased(&mut self.client)?;
        Ok(self.path.map(client, mapping, &pinning)?)
    }

    fn unmap(&mut self, run: &Run) -> Result<(), WorkError> {
        let Some(MemoryChange::Unmap(mappings)) = &run.change else {
            return Ok(());
        };
        let client = leased(&mut self.client)?;
        for mapping in mappings {
            self.path.unmap(client, mapping)?;
        }
        Ok(())
    }

    fn close(&mut self) -> Result<(), WorkError> {
        let path = &mut self.path;
        with_lease(&mut self.client, |client| path.close(client))
    }

    fn pinning<'a>(&self, cancel: &'a AtomicBool) -> PinOptions<'a> {
        PinOptions {
            deadline: Some(self.pin_by),
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
                Ok(()) => self.log("returned", "returned"),
                Err(error) => log::error!("{}: cannot return it: {}", self.name(), Chain(&error)),
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
            // This lease may be in the way of the next borrow.
            self.borrow_unanswered = true;
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

    /// For states that a guest or client can cause as often as it likes.
    fn log(&self, kind: &'static str, what: &str) {
        self.lines.line(kind, &format!("{}: {what}", self.name()));
    }
}

/// How long the lender may take for `steps`, of which pinning has `limit`.
fn time_for(steps: &[Step], limit: Duration, behind_iommu: bool) -> Duration {
    let has = |wanted: [Step; 2]| steps.iter().any(|step| wanted.contains(step));
    if has([Step::Open, Step::Map]) {
        limit + CALLS_AFTER_PINNING
    } else if behind_iommu && has([Step::Unmap, Step::Stop]) {
        // An IOMMU unmaps as slowly as it maps. Late, the lease is broken off, which
        // comes on top.
        CALLS_TIMEOUT.max(limit.saturating_sub(HANG_UP_TIMEOUT))
    } else {
        CALLS_TIMEOUT
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
        .ok_or_else(|| CallError::Lost(farside_lender_protocol::ChannelError::Closed).into())
}

fn with_lease(
    client: &mut Option<Client>,
    call: impl FnOnce(&mut Client) -> Result<(), CallError>,
) -> Result<(), WorkError> {
    Ok(call(leased(client)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_iommu_has_as_long_to_unmap_as_to_map() {
        let seconds = Duration::from_secs;
        for step in [Step::Unmap, Step::Stop] {
            assert_eq!(time_for(&[step], seconds(100), true), seconds(99));
            // The lender of a software model only drops a mapping.
            assert_eq!(time_for(&[step], seconds(100), false), CALLS_TIMEOUT);
            // With hanging up, within QEMU's own 5 s, of which pinning has 4.
            assert_eq!(time_for(&[step], seconds(4), true), CALLS_TIMEOUT);
        }
        assert!(CALLS_TIMEOUT + HANG_UP_TIMEOUT < seconds(5));
        assert_eq!(time_for(&[Step::Close], seconds(100), true), CALLS_TIMEOUT);
        let open = time_for(&[Step::Close, Step::Open], seconds(4), true);
        assert_eq!(open, seconds(4) + CALLS_AFTER_PINNING);
    }
}
