//! The thread that does the work of a borrow: it talks to the lender and pins,
//! and may wait for either. The event loop holds the client's request
//! meanwhile and is told through a [`Wakeup`].

use std::{
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use farside_control::{CallError, Channel, Client, Epoch, ErrorKind, IrqUpdate, MAX_FDS, Wakeup};
use farside_devices::Description;
use farside_fabric::pin::{self, PinOptions, PinPolicy, PinProgress};
use farside_guest_layout::{PlanRules, ProbeError, ProbeLimits, plan, probe};
use farside_irq_relay::{SetIrqs, Vectors};

use super::{
    State, Step,
    path::{OpenPath, OpenReport, PathError},
};
use crate::{
    dma_table::{Blocked, DmaError, DmaTable, Mapping},
    vfio_user::RateLimit,
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

/// What does not change in the life of a backend's device.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) vm: String,
    pub(crate) device: String,
    pub(crate) lender: PathBuf,
    /// Interrupts go through the backend instead of from the device straight
    /// to the VMM.
    pub(crate) relay_interrupts: bool,
    pub(crate) pin_policy: PinPolicy,
    /// How long a held bus-master enable, or a change of guest memory, may take
    /// to pin; below the VMM's message timeout.
    pub(crate) open_timeout: Duration,
}

/// Work for the thread.
pub(crate) enum Job {
    /// Say whether the device can be borrowed, for a client that connects.
    Check,
    /// Take these steps.
    Run(Box<Run>),
    /// Pass a change of interrupts on.
    SetIrqs(SetIrqs),
    /// Pass the INTx disable bit on.
    SetIntxDisable(bool),
}

/// Steps, with all that they need.
pub(crate) struct Run {
    pub(crate) state: State,
    pub(crate) steps: &'static [Step],
    /// `Borrow`: files of the BARs with mappable areas.
    pub(crate) bar_files: Vec<Arc<OwnedFd>>,
    /// `Borrow`: interrupts that the client set up already.
    pub(crate) irqs: Vec<SetIrqs>,
    pub(crate) intx_disable: bool,
    /// `Open`: what the client has mapped.
    pub(crate) memory: Option<DmaTable>,
    /// `Remap`: what changed.
    pub(crate) change: Option<MemoryChange>,
}

impl Run {
    /// Whether it may have to pin guest RAM.
    fn pins(&self) -> bool {
        let pins = |step: &Step| matches!(step, Step::Open | Step::Remap);
        self.steps.iter().any(pins)
    }
}

/// A change of guest memory while windows are open.
pub(crate) enum MemoryChange {
    Map(Mapping),
    /// The client was refused a mapping that it will take for good.
    Refused(DmaError),
    Unmap(Vec<Mapping>),
}

/// What became of a [`Job`].
#[derive(Default)]
pub(crate) struct Outcome {
    /// Where the borrow stands now; none when the job was no [`Job::Run`].
    pub(crate) state: Option<State>,
    /// From `Borrow`.
    pub(crate) lease: Option<(Epoch, Channel)>,
    /// From `Open` and `Remap`.
    pub(crate) opened: Option<OpenReport>,
    /// From `Open`.
    pub(crate) layout: Option<LayoutReport>,
    /// What stopped it.
    pub(crate) error: Option<WorkError>,
}

/// What `Open` found.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub(crate) struct LayoutReport {
    pub(crate) guest_ram_bytes: u64,
    pub(crate) layout_probes: u32,
    pub(crate) bme_to_ready_us: u64,
    /// What was pinned when bus-master enable came.
    pub(crate) bytes_pinned_before_bme: u64,
}

/// Why work was not done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkError {
    #[error(transparent)]
    Path(#[from] PathError),
    #[error("the guest's memory layout cannot be found: {0}")]
    Layout(#[from] ProbeError),
    #[error(transparent)]
    Memory(#[from] Blocked),
    #[error(
        "device {0} is not the one that was described when the backend started: restart the backend"
    )]
    Changed(String),
    #[error("the thread that does the borrow's work has panicked")]
    Panicked,
}

impl From<CallError> for WorkError {
    fn from(error: CallError) -> Self {
        Self::Path(error.into())
    }
}

impl WorkError {
    /// Whether the lender is gone, and with it the lease.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(
            self,
            Self::Path(PathError::Lender(
                CallError::Lost(_) | CallError::Unreachable { .. } | CallError::Unexpected(_)
            ))
        )
    }

    /// What the lender said, if it refused.
    pub(crate) fn refusal(&self) -> Option<ErrorKind> {
        match self {
            Self::Path(PathError::Lender(CallError::Refused(error))) => Some(error.kind),
            _ => None,
        }
    }
}

/// The event loop's end of the thread. Dropping it gives the device back.
pub(crate) struct Worker {
    jobs: Option<mpsc::Sender<Job>>,
    outcomes: mpsc::Receiver<Outcome>,
    wakeup: Wakeup,
    cancel: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread. `description` is what the client was or will be
    /// told the device is.
    pub(crate) fn start(settings: Settings, description: Description) -> std::io::Result<Self> {
        let (jobs, inbox) = mpsc::channel();
        let (outbox, outcomes) = mpsc::channel();
        let wakeup = Wakeup::new()?;
        let raised = wakeup.clone();
        let cancel = Arc::new(AtomicBool::new(false));
        let mut borrow = Borrow {
            deadline: Instant::now(),
            settings,
            description,
            client: None,
            path: OpenPath::default(),
            cancel: Arc::clone(&cancel),
        };
        let thread = std::thread::Builder::new()
            .name(format!("borrow-{}", borrow.settings.device))
            .spawn(move || {
                // Dropped in the reverse order: whoever is woken when the
                // thread panics finds the outbox closed.
                let raised = RaisedAtLast(raised);
                let outbox = outbox;
                for job in inbox {
                    let outcome = borrow.work(job);
                    if outbox.send(outcome).is_err() {
                        break;
                    }
                    raised.0.raise();
                }
                borrow.set_deadline(CALLS_TIMEOUT);
                borrow.give_back();
            })?;
        Ok(Self {
            jobs: Some(jobs),
            outcomes,
            wakeup,
            cancel,
            thread: Some(thread),
        })
    }

    /// Hands out work. One job at a time: its outcome comes first.
    pub(crate) fn post(&self, job: Job) {
        self.cancel.store(false, Ordering::Relaxed);
        if let Some(jobs) = &self.jobs
            && jobs.send(job).is_err()
        {
            // The outcome is that the thread is gone.
            self.wakeup.raise();
        }
    }

    /// Nobody waits for the job's outcome any more: ends what takes long.
    pub(crate) fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }

    /// The outcome of the last job, once `wakeup` was raised.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        self.wakeup.lower();
        match self.outcomes.try_recv() {
            Ok(outcome) => Some(outcome),
            Err(mpsc::TryRecvError::Empty) => None,
            // With its connection the lease went.
            Err(mpsc::TryRecvError::Disconnected) => Some(Outcome {
                state: Some(State::Lost),
                error: Some(WorkError::Panicked),
                ..Outcome::default()
            }),
        }
    }

    /// Raised when an outcome is there.
    pub(crate) fn wakeup(&self) -> &Wakeup {
        &self.wakeup
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.cancel();
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("a borrow's thread panicked");
        }
    }
}

/// Is raised by the time it is dropped.
struct RaisedAtLast(Wakeup);

impl Drop for RaisedAtLast {
    fn drop(&mut self) {
        self.0.raise();
    }
}

/// The thread's state.
struct Borrow {
    settings: Settings,
    description: Description,
    client: Option<Client>,
    path: OpenPath,
    /// When pinning for the current job must be done; calls to the lender
    /// have [`CALLS_MARGIN`] more.
    deadline: Instant,
    cancel: Arc<AtomicBool>,
}

impl Borrow {
    fn work(&mut self, job: Job) -> Outcome {
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
        if client.describe(device)? != self.description {
            return Err(WorkError::Changed(device.clone()));
        }
        let patience = Instant::now() + SUCCESSION_TIMEOUT;
        loop {
            match client.status(device)?.entry.borrowed_by {
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

    fn borrow_device(&mut self, run: &Run, outcome: &mut Outcome) -> Result<(), WorkError> {
        let Settings {
            vm, device, lender, ..
        } = &self.settings;
        let mut client = Client::connect_by(lender, Some(vm), self.calls_deadline())?;
        if client.describe(device)? != self.description {
            return Err(WorkError::Changed(device.clone()));
        }
        let files: Vec<_> = run.bar_files.iter().map(|file| file.as_fd()).collect();
        let registers = client.borrow_device(device, &files)?;
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
        outcome.lease = Some((epoch, registers));
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

/// The requests that bring a lender's vectors into the state that a client set
/// up before the borrow.
pub(crate) fn recorded_irqs(vectors: &Vectors) -> Vec<SetIrqs> {
    vectors.configuration(MAX_FDS as u16)
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
