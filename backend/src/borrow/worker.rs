//! The thread that does the work of a borrow: it talks to the lender and pins,
//! and may wait for either. The event loop holds the client's request
//! meanwhile and is told through a [`Wakeup`].

use std::{
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use farside_control::{CallError, Channel, Client, Epoch, ErrorKind, IrqUpdate, MAX_FDS, Wakeup};
use farside_devices::Description;
use farside_fabric::pin::{PinOptions, PinPolicy, PinProgress, check_memlock};
use farside_guest_layout::{PlanRules, ProbeError, ProbeLimits, plan, probe};
use farside_irq_relay::{SetIrqs, Vectors};

use super::{
    State, Step,
    path::{OpenPath, OpenReport, PathError},
};
use crate::dma_table::{DmaTable, Mapping};

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
    /// How long a held bus-master enable may take; below the VMM's message
    /// timeout.
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

/// A change of guest memory while windows are open.
pub(crate) enum MemoryChange {
    Map(Mapping),
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
    #[error(
        "guest RAM at GPA {start:#x} ({len} MiB) is not shared with the backend: start QEMU with `-object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem`"
    )]
    PrivateRam { start: u64, len: u64 },
    #[error(
        "device {0} is not the one that was described when the backend started: restart the backend"
    )]
    Changed(String),
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

    /// Whether another VM has the device.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(
            self,
            Self::Path(PathError::Lender(CallError::Refused(error))) if error.kind == ErrorKind::Busy
        )
    }
}

/// The event loop's end of the thread. Dropping it gives the device back.
pub(crate) struct Worker {
    jobs: Option<mpsc::Sender<Job>>,
    outcomes: mpsc::Receiver<Outcome>,
    wakeup: Wakeup,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread. `description` is what the client was or will be
    /// told the device is.
    pub(crate) fn start(settings: Settings, description: Description) -> std::io::Result<Self> {
        let (jobs, inbox) = mpsc::channel();
        let (outbox, outcomes) = mpsc::channel();
        let wakeup = Wakeup::new()?;
        let raised = wakeup.try_clone()?;
        let thread = std::thread::Builder::new()
            .name(format!("borrow-{}", settings.device))
            .spawn(move || {
                let mut borrow = Borrow {
                    settings,
                    description,
                    client: None,
                    path: OpenPath::default(),
                };
                for job in inbox {
                    let outcome = borrow.work(job);
                    if outbox.send(outcome).is_err() {
                        break;
                    }
                    raised.raise();
                }
                borrow.give_back();
            })?;
        Ok(Self {
            jobs: Some(jobs),
            outcomes,
            wakeup,
            thread: Some(thread),
        })
    }

    /// Hands out work. One job at a time: its outcome comes first.
    pub(crate) fn post(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            jobs.send(job)
                .expect("the thread lives as long as its queue");
        }
    }

    /// The outcome of the last job, once `wakeup` was raised.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        self.wakeup.lower();
        self.outcomes.try_recv().ok()
    }

    /// Raised when an outcome is there.
    pub(crate) fn wakeup(&self) -> &Wakeup {
        &self.wakeup
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("a borrow's thread panicked");
        }
    }
}

/// The thread's state.
struct Borrow {
    settings: Settings,
    description: Description,
    client: Option<Client>,
    path: OpenPath,
}

impl Borrow {
    fn work(&mut self, job: Job) -> Outcome {
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
            Step::Open | Step::Close | Step::Reset | Step::Remap => {
                let path = &mut self.path;
                if let Err(error) = with_lease(&mut self.client, |client| path.close(client)) {
                    // Closing the connection makes the lender stop the device.
                    log::error!(
                        "{}: cannot stop DMA ({error}): giving the device up",
                        self.name()
                    );
                    self.drop_lease();
                    return State::Lost;
                }
            }
        }
        state.after_refusal(step)
    }

    fn check(&mut self) -> Result<(), WorkError> {
        let Settings {
            vm, device, lender, ..
        } = &self.settings;
        let mut client = Client::connect(lender, Some(vm))?;
        if client.describe(device)? != self.description {
            return Err(WorkError::Changed(device.clone()));
        }
        let status = client.status(device)?;
        match status.entry.borrowed_by {
            Some(holder) => Err(CallError::Refused(farside_control::RemoteError {
                kind: ErrorKind::Busy,
                message: format!(
                    "device {device} is borrowed by VM {} (epoch {}, for {} s); stop that VM, or borrow another device",
                    holder.vm, holder.epoch, holder.seconds
                ),
            })
            .into()),
            None => Ok(()),
        }
    }

    fn borrow_device(&mut self, run: &Run, outcome: &mut Outcome) -> Result<(), WorkError> {
        let Settings {
            vm, device, lender, ..
        } = &self.settings;
        let mut client = Client::connect(lender, Some(vm))?;
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
        if let Some(range) = table.private_ram() {
            return Err(WorkError::PrivateRam {
                start: range.start().get(),
                len: range.len() >> 20,
            });
        }
        let layout = probe(&mut table.oracle(), &ProbeLimits::default())?;
        let plan = plan(&layout, &PlanRules::default());
        let mappings: Vec<Mapping> = table.iter().cloned().collect();
        if self.settings.pin_policy == PinPolicy::Require {
            check_memlock(layout.ram_bytes()).map_err(PathError::from)?;
        }
        let progress = Progress::new(self.name());
        let mut pinning = PinOptions::new(self.settings.pin_policy);
        pinning.deadline = Some(started + self.settings.open_timeout);
        let show = |at| progress.show(at);
        pinning.progress = Some(&show);
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
        let client = leased(&mut self.client)?;
        match change {
            Some(MemoryChange::Map(mapping)) => {
                let mut pinning = PinOptions::new(self.settings.pin_policy);
                pinning.deadline = Some(Instant::now() + self.settings.open_timeout);
                self.path.map(client, mapping, &pinning)?;
            }
            Some(MemoryChange::Unmap(mappings)) => {
                for mapping in mappings {
                    self.path.unmap(client, mapping)?;
                }
            }
            None => {}
        }
        Ok(())
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
    /// lender stops the device before it does anything else.
    fn drop_lease(&mut self) {
        self.client = None;
        self.path.forget();
    }

    fn name(&self) -> String {
        format!("device {} (VM {})", self.settings.device, self.settings.vm)
    }

    fn log(&self, what: &str) {
        log::info!("{}: {what}", self.name());
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
