//! Executes the steps of the state machine, and rolls them back.

mod check;
pub(super) mod resume;

use std::{
    os::fd::AsFd,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use farside_daemon::StateLog;
use farside_error_chain::Chain;
use farside_fabric::pin::{self, PinOptions};
use farside_guest_layout::{PlanRules, ProbeLimits, plan, probe};
use farside_irq_relay::SetIrqs;
use farside_lender_protocol::{BarOwner, Client, Described, IrqUpdate, Keeping, Transport};

use super::{
    Job, LayoutReport, NewLease, Outcome, Settings, StepDone, WorkError,
    lease::{Borrow, Lease},
    progress::Progress,
};
use crate::{
    borrow::{
        Setup, State, Step, bars::LeasedBars, error::PathError, network, page_pins::PagePins,
        path::OpenPath, peer_mapper::PeerMapper,
    },
    dma_table::{DmaTable, Mapping},
    records::{LeaseRecord, LeftLease, Recorded},
};

/// Time limit for the lender's answers in a job that pins nothing: longer than the lender's DMA
/// drain timeout. With [`HANG_UP_TIMEOUT`], below a VMM's message timeout of 5 s.
const CALLS_TIMEOUT: Duration = Duration::from_millis(3500);

/// Time reserved for the lender after pinning has used up its own limit.
const CALLS_AFTER_PINNING: Duration = Duration::from_millis(500);

/// Minimum time for the lender's part of a rollback.
const UNDO_TIMEOUT: Duration = Duration::from_millis(300);

/// Maximum wait for the lender to stop a device after its lease was terminated.
const HANG_UP_TIMEOUT: Duration = Duration::from_secs(1);

/// The thread's state.
pub(super) struct Borrower {
    settings: Settings,
    described: Described,
    borrow: Borrow,
    lines: StateLog,
    /// Deadline for pinning in the current job.
    pin_by: Instant,
    /// Deadline for the lender's answers.
    calls_by: Instant,
    /// The last borrow missed its deadline: the lender may still grant it on the closed connection.
    borrow_unanswered: bool,
    cancel: Arc<AtomicBool>,
    record: LeaseRecord,
}

impl Borrower {
    /// `left` is what a backend that was killed has left.
    pub(super) fn new(
        settings: Settings,
        described: Described,
        cancel: Arc<AtomicBool>,
        (record, left): (LeaseRecord, LeftLease),
    ) -> Self {
        let (borrow, borrow_unanswered) = resume::left(&settings, &described, left, &record);
        if !matches!(borrow, Borrow::Away(_)) {
            record.clear();
        }
        Self {
            record,
            lines: StateLog::new(|line| log::info!("{line}")),
            settings,
            described,
            borrow,
            pin_by: Instant::now(),
            calls_by: Instant::now(),
            borrow_unanswered,
            cancel,
        }
    }

    /// Returns the device, at the end of the thread.
    pub(super) fn finish(&mut self) {
        self.give_lender(CALLS_TIMEOUT);
        self.give_back();
    }

    /// Executes a job.
    pub(super) fn work(&mut self, job: Job) -> Outcome {
        let limit = self.settings.open_limit();
        self.pin_by = Instant::now() + limit;
        self.give_lender(match &job {
            Job::Take(steps) => time_for(steps, limit, self.peer_mapper().is_behind_iommu()),
            _ => CALLS_TIMEOUT,
        });
        let mut steps = Vec::new();
        let mut unserved = None;
        let attempt = matches!(job, Job::Resume(_));
        let mut result = match job {
            Job::Take(wanted) => {
                let taken = self.take(&wanted, &mut steps);
                // The others, when the device has another process.
                if taken.as_ref().is_err_and(|error| self.is_cut(error)) {
                    unserved = wanted
                        .get(steps.len()..)
                        .map(|rest| Job::Take(rest.to_vec()));
                }
                taken
            }
            Job::Check => self.check(),
            Job::SetIrqs(request) => self.set_irqs(&request),
            Job::SetIntxDisable(disabled) => self.set_intx_disable(disabled),
            Job::Resume(setup) => self
                .resume(&setup)
                .map(|lease| steps.push(StepDone::Borrowed(lease))),
        };
        // The device's interrupts are set up anew with the next process.
        if result.as_ref().is_err_and(|error| self.is_cut(error)) {
            self.go_away();
            result = Ok(());
        }
        let is_lost = result.as_ref().is_err_and(WorkError::is_lost);
        if is_lost && self.borrow.lease().is_ok() {
            self.enter(State::Lost);
        }
        Outcome {
            state: self.borrow.state(),
            steps,
            opened: self.borrow.report(),
            result,
            away: matches!(self.borrow, Borrow::Away(_)),
            attempt,
            unserved,
        }
    }

    /// Sets the deadline of all further calls to the lender to `timeout` from now.
    fn give_lender(&mut self, timeout: Duration) {
        self.calls_by = Instant::now() + timeout;
        if let Ok(lease) = self.borrow.lease() {
            lease.client.set_deadline(Some(self.calls_by));
        }
    }

    /// Executes `steps` until one fails, and rolls that one back.
    fn take(&mut self, steps: &[Step], done: &mut Vec<StepDone>) -> Result<(), WorkError> {
        for step in steps {
            let before = self.borrow.state();
            match self.step(step) {
                Ok(came_to) => {
                    self.enter(step.after());
                    done.push(came_to);
                }
                Err(error) if !matches!(step, Step::Borrow(_)) && self.is_cut(&error) => {
                    return Err(error);
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

    /// Whether an error is the end of the process of a device that may go on in another.
    fn is_cut(&mut self, error: &WorkError) -> bool {
        !matches!(self.borrow, Borrow::Away(_)) && self.goes_on() && resume::is_cut(error)
    }

    fn step(&mut self, step: &Step) -> Result<StepDone, WorkError> {
        if matches!(self.borrow, Borrow::Away(_)) {
            return self.step_away(step);
        }
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

    /// Enters `state`, keeps the resources that it needs and drops the others.
    ///
    /// Closing the connection ends a lease: the lender stops the device first. Waits for that, so
    /// that a `DMA_UNMAP` is not answered earlier, but no longer than [`HANG_UP_TIMEOUT`], in case
    /// the lender is alive but does not get to it.
    fn enter(&mut self, state: State) {
        if let State::Unleased | State::Lost = state {
            self.record.clear();
        }
        if let Borrow::Away(away) = &self.borrow {
            match state {
                State::Unleased | State::Lost => {}
                _ => return debug_assert_eq!(away.state(), state),
            }
        }
        let before = match std::mem::take(&mut self.borrow) {
            Borrow::Away(away) => {
                self.borrow_unanswered |= away.may_be_granted();
                let (former, path) = away.into_former();
                for former in former {
                    self.hang_up(former);
                }
                drop(path);
                Borrow::without_lease(state)
            }
            other => other,
        };
        self.borrow = match before.into_parts() {
            Some((mut lease, path)) => {
                let new_path = || {
                    let (vm, windows) = (&self.settings.memory, &self.settings.windows);
                    OpenPath::new(
                        self.peer_mapper(),
                        vm.clone(),
                        windows.clone(),
                        lease.page_window,
                    )
                };
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

    fn hang_up(&mut self, mut client: Recorded) {
        if !client.hang_up(HANG_UP_TIMEOUT) {
            // This lease may still block the next borrow.
            self.borrow_unanswered = true;
            log::error!(
                "{}: the lender has not confirmed within {HANG_UP_TIMEOUT:?} that the device does no DMA any more",
                self.name()
            );
        }
    }

    /// Rolls back a failed step, and returns the resulting state. See [`crate::borrow`].
    fn clean_up(&mut self, step: &Step, before: State, error: &WorkError) -> State {
        if matches!(self.borrow, Borrow::Away(_)) {
            return self.after_away(step);
        }
        if error.is_lost() {
            return match step {
                // No lease was held, so the state is unchanged.
                Step::Borrow(_) => before,
                _ => State::Lost,
            };
        }
        // The remaining time, if that is longer.
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
            // Once the unmap is answered, the memory must be unreachable.
            Step::Unmap(_) if !error.is_late() => self.close_after(step),
            // A retry would only take longer.
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

    /// Rolls back a failed mapping, and nothing else. Returns whether that succeeded.
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

    /// The lender has not confirmed that DMA is stopped, or has reported that it is not. A device
    /// that does not stop is abandoned.
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

    /// Connects to the lender, whose device must be the one that the client sees.
    fn connect(&self, deadline: Instant) -> Result<Client, WorkError> {
        let Settings {
            vm,
            device,
            lender,
            dialer,
            ..
        } = &self.settings;
        let mut client = Client::connect_through(dialer, lender, Some(vm), Some(deadline))?;
        match client.describe(device)?.is_same_to_guests(&self.described) {
            true => Ok(client),
            false => Err(WorkError::Changed(device.clone())),
        }
    }

    fn borrow_once(&mut self, setup: &Setup) -> Result<NewLease, WorkError> {
        let device = &self.settings.device;
        let mut client = self.connect(self.calls_by)?;
        if self.described.bars == BarOwner::Lender {
            // The guest has not booted yet, so the client can still fail early.
            let ram = check::guest_ram(&setup.memory)?;
            client.check(device, self.settings.transport, ram)?;
        }
        if self.borrow_unanswered {
            self.when_left(&mut client)?;
            self.borrow_unanswered = false;
        }
        client.set_fence(self.settings.fence()?);
        let keeps_state = self.keeps_state();
        let (client, granted, remote) = match self.settings.transport {
            Transport::Network => {
                let leased = network::borrow(&self.settings, &self.described, client, setup, None)?;
                (leased.client, leased.lease, Some(leased.remote))
            }
            _ if keeps_state => {
                let files = setup.files();
                let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
                let keeping = Keeping {
                    keep: self.settings.lost_after,
                    resumes: None,
                };
                let granted = client.borrow_and_keep(device, keeping, &files)?;
                (client, granted, None)
            }
            transport => {
                let files: Vec<_> = setup.bar_files.iter().map(|file| file.as_fd()).collect();
                let granted = client.borrow_device(device, transport, &files)?;
                (client, granted, None)
            }
        };
        let generation = client.generation();
        self.log(
            "borrowed",
            &format!(
                "borrowed from lender {} (generation {generation})",
                client.lender()
            ),
        );
        // Over the network, the controller is in this process: the next backend alone may go on.
        let chain = granted.chain.filter(|_| remote.is_none());
        let client = Recorded::new(client, &self.record);
        self.record.set(granted.chain);
        self.borrow = Borrow::Leased(Lease {
            client,
            chain,
            _remote: remote,
            bar_window: None,
            page_window: None,
        });
        let relay = self.settings.relay_interrupts;
        resume::set_up_interrupts(&mut self.borrow.lease()?.client, setup, relay)?;
        let description = &self.described.description;
        let ntb = self.settings.ntb.as_ref();
        let bars = LeasedBars::new(description, ntb, &granted.bars, granted.files)
            .map_err(PathError::from)?;
        self.borrow.lease()?.bar_window = bars.window;
        Ok(NewLease {
            generation,
            bars: bars.files,
            registers: granted.registers,
            goes_on: chain.is_some(),
            counts: granted.chain.is_some(),
            served: 0,
        })
    }

    fn open(&mut self, memory: &DmaTable) -> Result<LayoutReport, WorkError> {
        let started = Instant::now();
        let bytes_pinned_before_bme = self.borrow.report().bytes_pinned;
        // Closing until everything is open, so that a failure closes the windows opened so far.
        self.enter(State::Closing);
        if let Some(blocked) = memory.blocked() {
            return Err(blocked.into());
        }
        let layout = probe(&mut memory.oracle(), &ProbeLimits::default())?;
        let plan = plan(&layout, &PlanRules::default());
        let mappings: Vec<Mapping> = memory.iter().cloned().collect();
        // Again when the windows are open. RAM that exceeds both has the host's limit as its error.
        let ram = mappings.iter().filter(|mapping| mapping.is_ram());
        let memory: Vec<_> = ram.filter_map(Mapping::memory).collect();
        let vm = &self.settings.memory;
        vm.lock()
            .check(&memory, self.settings.pin_policy)
            .map_err(PathError::from)?;
        let progress = Progress::new(self.name(), &self.settings);
        let show = |at| progress.show(at);
        let cancel = Arc::clone(&self.cancel);
        let pinning = PinOptions {
            progress: Some(&show),
            ..self.pinning(&cancel)
        };
        let (client, path) = self.borrow.path()?;
        path.open(client, &plan, &mappings, &pinning)?;
        let left_out = path.map_bars(client, &mappings)?;
        client.enable_bus_master()?;
        let report = path.report();
        let bme_to_ready_us = started.elapsed().as_micros() as u64;
        self.log("ready", &format!(
            "DMA-ready {bme_to_ready_us} µs after bus-master enable: {} MiB pinned, {} windows, {} LUT entries",
            report.bytes_pinned >> 20,
            report.dma_windows,
            report.lut_entries
        ));
        for (range, error) in left_out {
            let why = Chain(&error);
            self.log(
                "left out",
                &format!("does not reach the BAR at GPA {range}: {why}"),
            );
        }
        Ok(LayoutReport {
            guest_ram_bytes: layout.ram_bytes(),
            layout_probes: layout.probes,
            bme_to_ready_us,
            bytes_pinned_before_bme,
        })
    }

    fn map(&mut self, mapping: &Mapping) -> Result<(), WorkError> {
        let cancel = Arc::clone(&self.cancel);
        let memory = mapping.memory().filter(|_| mapping.is_ram());
        let room = || memory.as_ref().map_or(Ok(()), pin::check_room_for_more);
        // Most pages behind a vIOMMU are pinned already.
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

    /// Returns the device. The lease ends whatever the lender answers.
    fn give_back(&mut self) {
        if let Ok(lease) = self.borrow.lease() {
            match lease.client.return_device() {
                Ok(()) => self.log("returned", "returned"),
                Err(error) => log::error!("{}: cannot return it: {}", self.name(), Chain(&error)),
            }
        }
        self.enter(State::Unleased);
    }

    fn peer_mapper(&self) -> PeerMapper {
        PeerMapper::new(self.described.bars, self.settings.ntb.as_ref())
    }

    fn name(&self) -> String {
        format!("device {} (VM {})", self.settings.device, self.settings.vm)
    }

    /// Logs a state that a guest or client can cause at any rate.
    fn log(&self, kind: &'static str, what: &str) {
        self.lines.line(kind, &format!("{}: {what}", self.name()));
    }
}

/// Time limit for the lender's answers in `steps`; `limit` is that of pinning.
fn time_for(steps: &[Step], limit: Duration, behind_iommu: bool) -> Duration {
    let any = |wanted: fn(&Step) -> bool| steps.iter().any(wanted);
    if any(|step| matches!(step, Step::Open(_) | Step::Map(_))) {
        limit + CALLS_AFTER_PINNING
    } else if behind_iommu && any(|step| matches!(step, Step::Unmap(_) | Step::Stop)) {
        // An IOMMU unmaps as slowly as it maps. A late lease is terminated, which takes additional
        // time.
        CALLS_TIMEOUT.max(limit.saturating_sub(HANG_UP_TIMEOUT))
    } else {
        CALLS_TIMEOUT
    }
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
            // The lender of a software model only has to drop a mapping.
            assert_eq!(time_for(&step, seconds(100), false), CALLS_TIMEOUT);
            // Including `HANG_UP_TIMEOUT` within QEMU's 5 s, of which pinning has 4.
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
