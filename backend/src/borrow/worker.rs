//! The worker thread of a borrow: it calls the lender and pins memory, and may block on either. The
//! event loop holds the client's request meanwhile; a [`Wakeup`] signals the outcome.

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

use farside_daemon::{DeviceId, VmName, Wakeup};
use farside_fabric::{SharedQuota, pin::PinPolicy};
use farside_guest_layout::ProbeError;
use farside_irq_relay::SetIrqs;
use farside_lender_protocol::{
    Address, CallError, Channel, Described, Dialer, ErrorKind, Generation, HeldFence, Transport,
};
use farside_ntb::Adapter;

use super::{
    Setup, State, Step,
    bars::BarFile,
    error::PathError,
    network::NetworkState,
    path::OpenReport,
    vm_memory::{PeerWindows, VmMemory},
};
use crate::{
    ReleaseHook,
    dma_table::Blocked,
    helper::{Helper, held_fence},
    peer_bars::PeerBars,
    records::{LeaseRecord, LeftLease},
};
use work::Borrower;

/// The constant settings of a backend's device.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) vm: VmName,
    pub(crate) device: DeviceId,
    pub(crate) lender: Address,
    pub(crate) dialer: Dialer,
    pub(crate) helper: Option<Helper>,
    /// The backend signals interrupts, instead of the device signalling the VMM directly.
    pub(crate) relay_interrupts: bool,
    /// How the device reaches guest RAM.
    pub(crate) transport: Transport,
    /// This host's NTB, for devices that are reached through it.
    pub(crate) ntb: Option<Adapter>,
    /// The file with the fences of the VM.
    pub(crate) fences: Option<PathBuf>,
    pub(crate) pin_policy: PinPolicy,
    /// The guest memory that the devices of the VM pin.
    pub(crate) memory: VmMemory,
    /// The peer addresses of their windows.
    pub(crate) windows: PeerWindows,
    /// The BARs that the devices of the VM can reach.
    pub(crate) peer_bars: PeerBars,
    /// Time after which a bus-master enable is logged as late.
    pub(crate) open_timeout: Duration,
    /// The VMM's request timeout.
    pub(crate) message_timeout: Duration,
    /// Asks the guest to release the device.
    pub(crate) release: Option<ReleaseHook>,
    /// Time for which I/O waits for a lender that is out of reach.
    pub(crate) lost_after: Duration,
    /// The connection of a device that is borrowed over the network.
    pub(crate) network: NetworkState,
    /// What the controllers in this process may map.
    pub(crate) quota: SharedQuota,
}

impl Settings {
    /// Time limit for pinning during a held bus-master enable or a change of guest memory: four
    /// fifths of the VMM's timeout, which leaves time for the lender's answers and a rollback;
    /// `open_timeout` if that is longer.
    pub(crate) fn open_limit(&self) -> Duration {
        self.open_timeout.max(self.message_timeout * 4 / 5)
    }

    /// This VM's fence for the device, if it was handed over. Read each time: the VM may migrate
    /// repeatedly while its backend runs.
    pub(super) fn fence(&self) -> Result<Option<HeldFence>, WorkError> {
        let Self {
            device,
            fences,
            helper,
            ..
        } = self;
        let held = match helper {
            Some(helper) => helper.fence(device),
            None => held_fence(fences.as_deref(), device),
        };
        held.map_err(|source| WorkError::Fences {
            device: device.clone(),
            source,
        })
    }
}

/// Work for the thread.
pub(crate) enum Job {
    /// Check whether the device can be borrowed, for a new client.
    Check,
    /// Execute these steps until one fails.
    Take(Vec<Step>),
    /// Forward a change of the interrupt configuration.
    SetIrqs(SetIrqs),
    /// Forward the INTx disable bit.
    SetIntxDisable(bool),
    /// The device's process has ended: try once to go on in another.
    Resume(Setup),
}

/// The outcome of a [`Job`].
pub(crate) struct Outcome {
    /// The state of the borrow afterwards.
    pub(crate) state: State,
    /// The steps that succeeded.
    pub(crate) steps: Vec<StepDone>,
    /// The memory behind the open path.
    pub(crate) opened: OpenReport,
    pub(crate) result: Result<(), WorkError>,
    /// The device has no process, and may go on in another.
    pub(crate) away: bool,
    /// This was an attempt to.
    pub(crate) attempt: bool,
    /// What was not done, as its process has ended.
    pub(crate) unserved: Option<Job>,
}

/// The result of a [`Step`].
pub(crate) enum StepDone {
    Borrowed(NewLease),
    Opened(LayoutReport),
    Blocked(Blocked),
    /// Any other step, without a result.
    Done,
}

/// The resources of a new lease.
pub(crate) struct NewLease {
    pub(crate) generation: Generation,
    pub(crate) registers: Channel,
    /// The mmap-able memory of each BAR with sparse mmap areas, if any.
    pub(crate) bars: Vec<Option<BarFile>>,
    /// It goes on when its process has ended.
    pub(crate) goes_on: bool,
    /// Register accesses are counted in the file of its state.
    pub(crate) counts: bool,
    /// How many register accesses the process before has served, of a lease that goes on.
    pub(crate) served: u64,
}

/// The guest's memory layout and the cost of opening the path.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LayoutReport {
    pub(crate) guest_ram_bytes: u64,
    pub(crate) layout_probes: u32,
    pub(crate) bme_to_ready_us: u64,
    /// Bytes already pinned when bus-master enable was written.
    pub(crate) bytes_pinned_before_bme: u64,
}

/// The error of a job.
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
    Changed(DeviceId),
    #[error(
        "cannot read the fences of device {device}, without which the VM's right to it is unknown"
    )]
    Fences {
        device: DeviceId,
        source: std::io::Error,
    },
    #[error("cannot start the controller of the device")]
    System(#[source] std::io::Error),
    #[error("the thread that does the borrow's work has panicked")]
    Panicked,
}

impl From<CallError> for WorkError {
    fn from(error: CallError) -> Self {
        Self::Path(error.into())
    }
}

impl WorkError {
    /// Whether the lender is gone, which ends the lease.
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

    /// Whether the lender missed its deadline; it may still answer.
    pub(crate) fn is_late(&self) -> bool {
        matches!(self, Self::Path(PathError::Lender(CallError::Late(_))))
    }

    /// The lender's error, if it refused.
    pub(crate) fn refusal(&self) -> Option<ErrorKind> {
        match self {
            Self::Path(PathError::Lender(CallError::Refused(error))) => Some(error.kind),
            _ => None,
        }
    }
}

/// The event loop's handle of the thread. Dropping it returns the device.
pub(crate) struct Worker {
    jobs: Option<mpsc::Sender<Job>>,
    outcomes: mpsc::Receiver<Outcome>,
    wakeup: Wakeup,
    cancel: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread. `described` is the description that the client sees, `lease` what the process before has left.
    pub(crate) fn start(
        settings: Settings,
        described: Described,
        lease: (LeaseRecord, LeftLease),
    ) -> std::io::Result<Self> {
        let (jobs, inbox) = mpsc::channel();
        let (outbox, outcomes) = mpsc::channel();
        let wakeup = Wakeup::new()?;
        let raised = wakeup.clone();
        let cancel = Arc::new(AtomicBool::new(false));
        let name = format!("borrow-{}", settings.device);
        let mut borrower = Borrower::new(settings, described, Arc::clone(&cancel), lease);
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

    /// Posts a job. One at a time: take its outcome before the next.
    pub(crate) fn post(&self, job: Job) {
        self.cancel.store(false, Ordering::Relaxed);
        if let Some(jobs) = &self.jobs
            && jobs.send(job).is_err()
        {
            // The thread is gone; `outcome` reports it.
            self.wakeup.raise();
        }
    }

    /// Cancels the slow parts of the current job, whose outcome is no longer needed.
    pub(crate) fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }

    /// The outcome of the last job, after `wakeup` was raised.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        self.wakeup.lower();
        match self.outcomes.try_recv() {
            Ok(outcome) => Some(outcome),
            Err(mpsc::TryRecvError::Empty) => None,
            // The lease ended with the thread's connection.
            Err(mpsc::TryRecvError::Disconnected) => Some(Outcome {
                state: State::Lost,
                steps: Vec::new(),
                opened: OpenReport::default(),
                result: Err(WorkError::Panicked),
                away: false,
                attempt: false,
                unserved: None,
            }),
        }
    }

    /// Raised when an outcome is available.
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
