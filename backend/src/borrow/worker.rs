//! The thread that does the work of a borrow: it talks to the lender and pins,
//! and may wait for either. The event loop holds the client's request
//! meanwhile and is told through a [`Wakeup`].

mod lease;
mod progress;
mod work;

use std::{
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
use farside_irq_relay::SetIrqs;
use farside_lender_protocol::{Address, CallError, Channel, Described, Epoch, ErrorKind, Route};
use farside_ntb::Adapter;

use super::{State, Step, bars::BarFile, error::PathError, path::OpenReport};
use crate::dma_table::Blocked;
use work::Borrower;

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
    /// Find out whether the device can be borrowed, for a client that connects.
    Check,
    /// Take these steps, until one fails.
    Take(Vec<Step>),
    /// Pass a change of interrupts on.
    SetIrqs(SetIrqs),
    /// Pass the INTx disable bit on.
    SetIntxDisable(bool),
}

/// What became of a [`Job`].
pub(crate) struct Outcome {
    /// Where the borrow stands now.
    pub(crate) state: State,
    /// The steps that were taken.
    pub(crate) steps: Vec<StepDone>,
    /// What is open now.
    pub(crate) opened: OpenReport,
    pub(crate) result: Result<(), WorkError>,
}

/// What a [`Step`] came to.
pub(crate) enum StepDone {
    Borrowed(NewLease),
    Opened(LayoutReport),
    Blocked(Blocked),
    /// Any other: there is nothing to add.
    Done,
}

/// What a lease came with.
pub(crate) struct NewLease {
    pub(crate) epoch: Epoch,
    pub(crate) registers: Channel,
    /// For each BAR with mappable areas, what a client maps of it, if anything.
    pub(crate) bars: Vec<Option<BarFile>>,
}

/// What was found when windows were opened.
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
        let mut borrower = Borrower::new(settings, described, Arc::clone(&cancel));
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            // Dropped in the reverse order: when the thread panics, the event
            // loop wakes to a closed outbox.
            let raised = RaiseOnDrop(raised);
            let outbox = outbox;
            for job in inbox {
                let outcome = borrower.work(job);
                if outbox.send(outcome).is_err() {
                    break;
                }
                raised.0.raise();
            }
            borrower.finish();
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
                state: State::Lost,
                steps: Vec::new(),
                opened: OpenReport::default(),
                result: Err(WorkError::Panicked),
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

/// Raises the wakeup on drop, so that a thread that panics is noticed.
struct RaiseOnDrop(Wakeup);

impl Drop for RaiseOnDrop {
    fn drop(&mut self) {
        self.0.raise();
    }
}
