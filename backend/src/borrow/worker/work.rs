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

use super::{
    Job, LayoutReport, NewLease, Outcome, Settings, StepDone, WorkError,
    lease::{Borrow, Lease},
    progress::Progress,
};
use crate::{
    borrow::{
        Setup, State, Step, bars::LeasedBars, error::PathError, far::FarSide, page_pins::PagePins,
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
pub(super) struct Borrower {
    settings: Settings,
    described: Described,
    borrow: Borrow,
    lines: StateLog,
    /// When pinning for the current job must be done.
    pin_by: Instant,
    /// When the lender must have answered.
    calls_by: Instant,
    /// The last borrow was not answered in time: its lease may yet be granted,
    /// to a connection that is closed.
    borrow_unanswered: bool,
    cancel: Arc<AtomicBool>,
}

impl Borrower {
    pub(super) fn new(settings: Settings, described: Described, cancel: Arc<AtomicBool>) -> Self {
        Self {
            lines: StateLog::new(|line| log::info!("{line}")),
            settings,
            described,
            borrow: Borrow::default(),
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
            Job::Take(steps) => time_for(steps, limit, self.far_side().is_behind_iommu()),
            _ => CALLS_TIMEOUT,
        });
        let mut steps = Vec::new();
        let result = match job {
            Job::Take(wanted) => self.take(&wanted, &mut steps),
            Job::Check => self.check(),
            Job::SetIrqs(request) => self.set_irqs(&request),
            Job::SetIntxDisable(disabled) => self.set_intx_disable(disabled),
        };
        let is_lost = result.as_ref().is_err_and(WorkError::is_lost);
        if is_lost && self.borrow.lease().is_ok() {
            self.enter(State::Lost);
        }
        Outcome {
            state: self.borrow.state(),
            steps,
            opened: self.borrow.report(),
            result,
        }
    }

    /// Gives the lender so long from now on for all that is asked of it.
    fn give_lender(&mut self, timeout: Duration) {
        self.calls_by = Instant::now() + timeout;
        if let Ok(lease) = self.borrow.lease() {
            lease.client.set_deadline(Some(self.calls_by));
        }
    }

    /// Takes `steps` until one fails, whose state it cleans up.
    fn take(&mut self, steps: &[Step], done: &mut Vec<StepDone>) -> Result<(), WorkError> {
        for step in steps {
            let before = self.borrow.state();
            match self.step(step) {
                Ok(came_to) => {
                    self.enter(step.after());
                    done.push(came_to);
                }
                Err(error) => {
                    let next = self.clean_up(step, before, &error);
                    self.enter(next);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<StepDone, WorkError> {
        match step {
            Step::Borrow(setup) => return self.borrow_device(setup).map(StepDone::Borrowed),
            Step::Open(memory) => return self.open(memory).map(StepDone::Opened),
            Step::Close | Step::Stop | Step::Block(_) => {
                self.close()?;
                self.log("stopped", "stopped DMA; windows closed, guest RAM unpinned");
                if let Step::Block(blocked) = step {
                    return Ok(StepDone::Blocked(*blocked));
                }
            }
            Step::Reset => {
                self.borrow.lease()?.client.reset()?;
                self.enter(State::Leased);
                self.log("reset", "reset");
            }
            Step::Map(mapping) => self.map(mapping)?,
            Step::Unmap(mappings) => {
                let (client, path) = self.borrow.path()?;
                for mapping in mappings {
                    path.unmap(client, mapping)?;
                }
            }
            Step::Return => self.give_back(),
            Step::Abandon => {}
        }
        Ok(StepDone::Done)
    }

    /// Enters `state` with what the borrow has for it, and gives up the rest.
    ///
    /// A lease ends with its connection: the lender stops the device before it
    /// does anything else. Waits until it has, so that a `DMA_UNMAP` is not
    /// answered before; but no longer than [`HANG_UP_TIMEOUT`], for a lender that
    /// is alive and does not get to it.
    fn enter(&mut self, state: State) {
        self.borrow = match std::mem::take(&mut self.borrow).into_parts() {
            Some((mut lease, path)) => {
                let new_path = || OpenPath::new(self.far_side(), lease.page_window);
                let path = path.unwrap_or_else(new_path);
                match state {
                    State::Ready => Borrow::Ready(lease, path),
                    State::Closing => Borrow::Closing(lease, path),
                    State::Leased => {
                        lease.page_window = path.page_window();
                        Borrow::Leased(lease)
                    }
                    State::Unleased | State::Lost => {
                        self.hang_up(lease.client);
                        Borrow::without_lease(state)
                    }
                }
            }
            None => Borrow::without_lease(state),
        };
        debug_assert_eq!(self.borrow.state(), state);
    }

    fn hang_up(&mut self, client: Client) {
        if !client.hang_up(HANG_UP_TIMEOUT) {
            // This lease may be in the way of the next borrow.
            self.borrow_unanswered = true;
            log::error!(
                "{}: the lender has not confirmed within {HANG_UP_TIMEOUT:?} that the device does no DMA any more",
                self.name()
            );
        }
    }

    /// After a step that failed: undoes what it did, and returns where that leads.
    /// See [`crate::borrow`].
    fn clean_up(&mut self, step: &Step, before: State, error: &WorkError) -> State {
        if error.is_lost() {
            return match step {
                // No lease was held, so the state is unchanged.
                Step::Borrow(_) => before,
                _ => State::Lost,
            };
        }
        // What is left of the time, if that is more.
        let left = self.calls_by.saturating_duration_since(Instant::now());
        self.give_lender(left.max(UNDO_TIMEOUT));
        match step {
            Step::Borrow(_) | Step::Return | Step::Abandon => {
                self.borrow_unanswered |= error.is_late();
                step.after_refusal()
            }
            Step::Map(mapping) if !error.is_late() && self.undo_map(mapping) => {
                step.after_refusal()
            }
            Step::Open(_) | Step::Map(_) => self.close_after(step),
            // Answered, memory must be out of reach.
            Step::Unmap(_) if !error.is_late() => self.close_after(step),
            // Asking again would only take longer.
            Step::Unmap(_) | Step::Stop | Step::Close | Step::Block(_) | Step::Reset => {
                self.after_failed_close(step, error)
            }
        }
    }

    fn close_after(&mut self, failed: &Step) -> State {
        match self.close() {
            Ok(()) => State::Leased,
            Err(error) => self.after_failed_close(failed, &error),
        }
    }

    /// Whether what failed of adding memory is undone, and nothing else.
    fn undo_map(&mut self, mapping: &Mapping) -> bool {
        let Ok((client, path)) = self.borrow.path() else {
            return false;
        };
        match path.undo_map(client, mapping) {
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

    /// The lender has not answered that DMA is stopped, or that it is not. A
    /// device that does not stop is given up.
    fn after_failed_close(&self, step: &Step, error: &WorkError) -> State {
        let next = match error.is_late() {
            true => step.after_late(),
            false => State::Lost,
        };
        if next == State::Lost {
            log::error!(
                "{}: cannot stop DMA ({error}): giving the device up",
                self.name(),
                error = Chain(error)
            );
        }
        next
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

    fn borrow_device(&mut self, setup: &Setup) -> Result<NewLease, WorkError> {
        let Settings {
            vm, device, lender, ..
        } = &self.settings;
        let mut client = Client::connect_by(lender, Some(vm), Some(self.calls_by))?;
        if client.describe(device)? != self.described {
            return Err(WorkError::Changed(device.clone()));
        }
        if self.described.bars == BarOwner::Lender {
            // The client has not booted yet, and can still be told.
            let ram = guest_ram(&setup.memory)?;
            client.check(device, self.settings.route, ram)?;
        }
        if self.borrow_unanswered {
            self.when_left(&mut client)?;
            self.borrow_unanswered = false;
        }
        client.set_fence(self.fence()?);
        let files: Vec<_> = setup.bar_files.iter().map(|file| file.as_fd()).collect();
        let granted = client.borrow_device(device, self.settings.route, &files)?;
        let epoch = client.epoch();
        self.log(
            "borrowed",
            &format!("borrowed from lender {} (epoch {epoch})", client.lender()),
        );
        self.borrow = Borrow::Leased(Lease {
            client,
            bar_window: None,
            page_window: None,
        });
        self.set_intx_disable(setup.intx_disable)?;
        for request in &setup.irqs {
            self.set_irqs(request)?;
        }
        let description = &self.described.description;
        let ntb = self.settings.ntb.as_ref();
        let bars = LeasedBars::new(description, ntb, &granted.bars, granted.files)
            .map_err(PathError::from)?;
        self.borrow.lease()?.bar_window = bars.window;
        Ok(NewLease {
            epoch,
            bars: bars.files,
            registers: granted.registers,
        })
    }

    fn open(&mut self, memory: &DmaTable) -> Result<LayoutReport, WorkError> {
        let started = Instant::now();
        let bytes_pinned_before_bme = self.borrow.report().bytes_pinned;
        // Until all is open: what has been opened is closed if something fails.
        self.enter(State::Closing);
        if let Some(blocked) = memory.blocked() {
            return Err(blocked.into());
        }
        let layout = probe(&mut memory.oracle(), &ProbeLimits::default())?;
        let plan = plan(&layout, &PlanRules::default());
        let mappings: Vec<Mapping> = memory.iter().cloned().collect();
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
        let (client, path) = self.borrow.path()?;
        path.open(client, &plan, &mappings, &pinning)?;
        client.enable_bus_master()?;
        let report = path.report();
        let bme_to_ready_us = started.elapsed().as_micros() as u64;
        self.log("ready", &format!(
            "DMA-ready {bme_to_ready_us} µs after bus-master enable: {} MiB pinned, {} windows, {} LUT entries",
            report.bytes_pinned >> 20,
            report.dma_windows,
            report.lut_entries
        ));
        Ok(LayoutReport {
            guest_ram_bytes: layout.ram_bytes(),
            layout_probes: layout.probes,
            bme_to_ready_us,
            bytes_pinned_before_bme,
        })
    }

    fn map(&mut self, mapping: &Mapping) -> Result<(), WorkError> {
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
        let (client, path) = self.borrow.path()?;
        Ok(path.map(client, mapping, &pinning)?)
    }

    fn close(&mut self) -> Result<(), WorkError> {
        self.borrow.lease()?.client.close()?;
        self.enter(State::Leased);
        Ok(())
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
        Ok(self.borrow.lease()?.client.set_irqs(update, &fds)?)
    }

    fn set_intx_disable(&mut self, disabled: bool) -> Result<(), WorkError> {
        Ok(self.borrow.lease()?.client.set_intx_disable(disabled)?)
    }

    /// Whatever the lender answers, the lease is over afterwards.
    fn give_back(&mut self) {
        if let Ok(lease) = self.borrow.lease() {
            match lease.client.return_device() {
                Ok(()) => self.log("returned", "returned"),
                Err(error) => log::error!("{}: cannot return it: {}", self.name(), Chain(&error)),
            }
        }
        self.enter(State::Unleased);
    }

    fn far_side(&self) -> FarSide {
        FarSide::new(self.described.bars, self.settings.ntb.as_ref())
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
    let any = |wanted: fn(&Step) -> bool| steps.iter().any(wanted);
    if any(|step| matches!(step, Step::Open(_) | Step::Map(_))) {
        limit + CALLS_AFTER_PINNING
    } else if behind_iommu && any(|step| matches!(step, Step::Unmap(_) | Step::Stop)) {
        // An IOMMU unmaps as slowly as it maps. Late, the lease is broken off, which
        // comes on top.
        CALLS_TIMEOUT.max(limit.saturating_sub(HANG_UP_TIMEOUT))
    } else {
        CALLS_TIMEOUT
    }
}

/// Where the guest's RAM is, for a lender to look at.
fn guest_ram(memory: &DmaTable) -> Result<Vec<RamRange>, WorkError> {
    let layout = probe(&mut memory.oracle(), &ProbeLimits::default())?;
    let windows = plan(&layout, &PlanRules::default()).windows;
    let ram = windows.iter().map(|window| RamRange {
        start: window.range.start().get(),
        len: window.range.len(),
    });
    Ok(ram.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_iommu_has_as_long_to_unmap_as_to_map() {
        let seconds = Duration::from_secs;
        for step in [Step::Unmap(Vec::new()), Step::Stop] {
            let step = [step];
            assert_eq!(time_for(&step, seconds(100), true), seconds(99));
            // The lender of a software model only drops a mapping.
            assert_eq!(time_for(&step, seconds(100), false), CALLS_TIMEOUT);
            // With hanging up, within QEMU's own 5 s, of which pinning has 4.
            assert_eq!(time_for(&step, seconds(4), true), CALLS_TIMEOUT);
        }
        assert!(CALLS_TIMEOUT + HANG_UP_TIMEOUT < seconds(5));
        assert_eq!(time_for(&[Step::Close], seconds(100), true), CALLS_TIMEOUT);
        let open = time_for(
            &[Step::Close, Step::Open(DmaTable::default())],
            seconds(4),
            true,
        );
        assert_eq!(open, seconds(4) + CALLS_AFTER_PINNING);
    }
}
