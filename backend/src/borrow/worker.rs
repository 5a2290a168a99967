//! The thread that does the work of a borrow: it talks to the lender and pins,
//! and may wait for either. The event loop holds the client's request
//! meanwhile and is told through a [`Wakeup`].

mod progress;
mod work;

use std::{
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use farside_daemon::Wakeup;
use farside_fabric::pin::PinPolicy;
use farside_guest_layout::ProbeError;
use farside_irq_relay::{SetIrqs, Vectors};
use farside_lender_protocol::{
    Address, CallError, Channel, Described, Epoch, ErrorKind, MAX_FDS, Route,
};
use farside_ntb::Adapter;

use super::{Event, State, Step, bars::BarFile, error::PathError, path::OpenReport};
use crate::dma_table::{Blocked, DmaError, DmaTable, Mapping};
use work::Borrow;

/// What does not change in the life of a backend's device.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) vm: String,
    pub(crate) device: String,
    pub(crate) lender: Address,
    /// Interrupts go through the backend instead of from the device straight
    /// to the VMM.
    pub(crate) relay_interrupts: bool,
    /// How the device reaches guest RAM.
    pub(crate) route: Route,
    /// This host's NTB, for devices that are reached through it.
    pub(crate) ntb: Option<Adapter>,
    /// The file with the fences of the VM.
    pub(crate) fences: Option<PathBuf>,
    pub(crate) pin_policy: PinPolicy,
    /// After how long a bus-master enable is late.
    pub(crate) open_timeout: Duration,
    /// How long the VMM waits for an answer.
    pub(crate) message_timeout: Duration,
}

impl Settings {
    /// How long a held bus-master enable, or a change of guest memory, may take
    /// to pin: four fifths of what the VMM waits, for the lender's answers and
    /// what has to be undone come after it. Longer when the user says so.
    pub(crate) fn open_limit(&self) -> Duration {
        self.open_timeout.max(self.message_timeout * 4 / 5)
    }
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
    /// `Borrow`, `Open`: what the client has mapped.
    pub(crate) memory: Option<DmaTable>,
    /// `Map`, `Unmap`: what changed.
    pub(crate) change: Option<MemoryChange>,
}

/// A change of guest memory while windows are open.
pub(crate) enum MemoryChange {
    Map(Mapping),
    /// The client was refused a mapping that it will take for good.
    Refused(DmaError),
    Unmap(Vec<Mapping>),
}

impl MemoryChange {
    /// What it is to the borrow.
    pub(crate) fn event(&self) -> Event {
        match self {
            change if change.blocked().is_some() => Event::MemoryRefused,
            Self::Unmap(_) => Event::MemoryRemoved,
            Self::Map(_) | Self::Refused(_) => Event::MemoryAdded,
        }
    }

    /// Why no device may do DMA after it.
    fn blocked(&self) -> Option<Blocked> {
        match self {
            Self::Map(mapping) => mapping
                .is_private_ram()
                .then(|| Blocked::private_ram(mapping)),
            Self::Refused(error) => Some(Blocked::Refused(*error)),
            Self::Unmap(_) => None,
        }
    }
}

/// What became of a [`Job`].
#[derive(Default)]
pub(crate) struct Outcome {
    /// Where the borrow stands now; none when the job was no [`Job::Run`].
    pub(crate) state: Option<State>,
    /// From `Borrow`.
    pub(crate) lease: Option<NewLease>,
    /// What is open now.
    pub(crate) opened: OpenReport,
    /// From `Open`.
    pub(crate) layout: Option<LayoutReport>,
    /// What stopped it.
    pub(crate) error: Option<WorkError>,
}

/// What `Borrow` brought.
pub(crate) struct NewLease {
    pub(crate) epoch: Epoch,
    pub(crate) registers: Channel,
    /// For each BAR with mappable areas, what a client maps of it, if anything.
    pub(crate) bars: Vec<Option<BarFile>>,
}

/// What `Open` found.
#[derive(Clone, Copy, Debug, Default)]
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
    #[error("the guest's memory layout cannot be found")]
    Layout(#[from] ProbeError),
    #[error(transparent)]
    Memory(#[from] Blocked),
    #[error(
        "device {0} is not the one that was described when the backend started: restart the backend"
    )]
    Changed(String),
    #[error(
        "cannot read the fences of device {device}, without which the VM's right to it is unknown"
    )]
    Fences {
        device: String,
        source: std::io::Error,
    },
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
                CallError::Lost(_)
                    | CallError::Unreachable { .. }
                    | CallError::NotALender { .. }
                    | CallError::Unexpected(_)
            ))
        )
    }

    /// Whether the lender has not answered in time: it may yet.
    pub(crate) fn is_late(&self) -> bool {
        matches!(self, Self::Path(PathError::Lender(CallError::Late(_))))
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
    /// Starts the thread. `described` is what the client was or will be
    /// told the device is.
    pub(crate) fn start(settings: Settings, described: Described) -> std::io::Result<Self> {
        let (jobs, inbox) = mpsc::channel();
        let (outbox, outcomes) = mpsc::channel();
        let wakeup = Wakeup::new()?;
        let raised = wakeup.clone();
        let cancel = Arc::new(AtomicBool::new(false));
        let name = format!("borrow-{}", settings.device);
        let mut borrow = Borrow::new(settings, described, Arc::clone(&cancel));
        let thread = std::thread::Builder::new().name(name).spawn(move || {
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
            borrow.finish();
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

/// The requests that bring a lender's vectors into the state that a client set
/// up before the borrow.
pub(crate) fn recorded_irqs(vectors: &Vectors) -> Vec<SetIrqs> {
    vectors.configuration(MAX_FDS as u16)
}
