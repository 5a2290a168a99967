//! One borrowed device as a client sees it: requests in, answers out.
//!
//! Most requests are answered at once. One that needs the lender is *held*
//! ([`Pending`]): it becomes a queue of [`Task`]s, taken one after another, each
//! of which may wait for the worker or for the register channel; when the queue is
//! empty the request is concluded and its answer sent. No other request is taken
//! meanwhile, so no task finds a state that another request has changed.

mod bars;
mod config_write;
mod pending;
mod perform;
mod registers;
mod report;
mod requests;

use std::time::{Duration, Instant};

use farside_backend_api::DeviceReport;
use farside_config_space::ConfigSpace;
use farside_daemon::RateLimit;
use farside_error_chain::Chain;
use farside_irq_relay::{IrqCounts, Vectors};
use farside_lender_protocol::{Channel, Described, ErrorKind};
use farside_vfio_user::{ClientLog, Reply, ReplyTo, serve::Answer};
use rustix::io::Errno;

use crate::{
    borrow::{
        Event, State,
        worker::{NewLease, Outcome, Settings, StepDone, WorkError, Worker},
    },
    dma_table::DmaTable,
};
use bars::Bars;
use pending::{Finish, Pending, Task, Waiting};

/// Events of the register channel that are taken before others have their turn.
const REGISTER_EVENTS: usize = 256;

/// Why a device cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error("its configuration space is invalid")]
    Config(#[from] farside_config_space::ConfigSpaceError),
    #[error("its interrupts are invalid")]
    Irqs(#[from] farside_irq_relay::IrqCountsError),
    #[error(transparent)]
    System(#[from] std::io::Error),
}

/// A device and the borrow behind it.
pub(crate) struct Device {
    settings: Settings,
    described: Described,
    counts: IrqCounts,
    config: ConfigSpace,
    memory: DmaTable,
    /// What the client set up: for the lender to be told at the borrow, and in
    /// the relayed form for signalling.
    vectors: Vectors,
    bars: Bars,
    worker: Worker,
    /// Lines on the device's clients.
    pub(crate) client_log: ClientLog,
    line_limits: LineLimits,
    registers: Option<Channel>,
    /// Register channels that are done with, until the event loop no longer
    /// watches them: closed earlier, their numbers could come back as those of
    /// other descriptors.
    retired: Vec<Channel>,
    state: State,
    /// The lender refused the last borrow: the device is not there.
    absent: bool,
    /// The client has unplugged the device and may keep the connection.
    unplugged: bool,
    /// The client took guest RAM back, and nothing else since.
    ram_taken: bool,
    pending: Pending,
    /// What a read fills; kept, so that reads do not allocate.
    buffer: Vec<u8>,
    report: DeviceReport,
}

/// The limits of the log lines that a guest or client can cause.
#[derive(Debug, Default)]
struct LineLimits {
    failure: RateLimit,
    bus_master: RateLimit,
    memory: RateLimit,
    irqs: RateLimit,
    viommu: RateLimit,
}

/// What a finished request comes to.
pub(crate) struct Conclusion<'a> {
    pub(crate) to: ReplyTo,
    pub(crate) reply: Result<Reply<'a>, Errno>,
    pub(crate) then: Then,
}

/// What becomes of the client after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    GoOn,
    /// Its version was refused: the device is not for it now. Some clients
    /// cannot read an error here and wait for the rest of a reply; all
    /// understand a connection that closes.
    HangUp,
}

impl Device {
    pub(crate) fn new(settings: Settings, described: Described) -> Result<Self, DeviceError> {
        let config = ConfigSpace::new(&described.description)?;
        let counts = farside_lender_protocol::irq_counts(&described.description)?;
        for hidden in config.hidden() {
            log::info!(
                "device {} (VM {}): capability {} is hidden from the guest: {}",
                settings.device,
                settings.vm,
                hidden.name,
                hidden.reason
            );
        }
        Ok(Self {
            counts,
            config,
            memory: DmaTable::default(),
            vectors: Vectors::new(counts),
            bars: Bars::new(&described)?,
            worker: Worker::start(settings.clone(), described.clone())?,
            client_log: ClientLog::default(),
            line_limits: LineLimits::default(),
            registers: None,
            retired: Vec::new(),
            state: State::default(),
            absent: false,
            unplugged: false,
            ram_taken: false,
            pending: Pending::default(),
            buffer: Vec::new(),
            report: report::initial(&settings, &described.description),
            settings,
            described,
        })
    }

    /// Whether a request is held: no other may be taken.
    pub(crate) fn is_busy(&self) -> bool {
        self.pending.is_busy()
    }

    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }

    pub(crate) fn registers(&self) -> Option<&Channel> {
        self.registers.as_ref()
    }

    /// Whether the client has unplugged the device: its connection is of no
    /// more use, and may go when another client comes.
    pub(crate) fn is_unplugged(&self) -> bool {
        self.unplugged && !self.is_busy()
    }

    /// Whether the client has unplugged the device, or is doing so.
    pub(crate) fn is_released(&self) -> bool {
        self.unplugged
    }

    /// Whether a register access waits for room in the channel.
    pub(crate) fn wants_register_room(&self) -> bool {
        matches!(self.pending.waiting, Waiting::Room(_))
    }

    /// What there is to say about the device now.
    pub(crate) fn report(&self) -> DeviceReport {
        DeviceReport {
            state: self.state,
            bars: self.bar_addresses(),
            interrupts: self.vectors.status(),
            ..self.report.clone()
        }
    }

    /// For log lines.
    pub(crate) fn name(&self) -> String {
        format!("device {} (VM {})", self.settings.device, self.settings.vm)
    }

    /// Since when a register read waits for the lender, if one does.
    pub(crate) fn register_read_since(&self) -> Option<Instant> {
        self.pending.register_read_since()
    }

    /// The lender has not answered a register read in time.
    pub(crate) fn on_register_timeout(&mut self, timeout: Duration) -> Option<Conclusion<'_>> {
        self.lender_gone(&format_args!(
            "no answer to a register read within {timeout:?}"
        ));
        self.advance();
        self.conclusion()
    }

    /// Closes what is done with.
    pub(crate) fn drop_retired(&mut self) {
        self.retired.clear();
    }

    /// The client is gone: everything it brought goes, the device is given
    /// back.
    pub(crate) fn client_gone(&mut self) {
        if self.ram_taken && !self.unplugged {
            self.name_viommu();
        }
        self.worker.cancel();
        self.pending.forget_client();
        let tasks = [Task::Event(Event::ClientGone), Task::Forget];
        self.pending.then.extend(tasks);
        self.advance();
    }

    /// QEMU takes all guest RAM back when the guest turns a vIOMMU on, and aborts
    /// when that does not tell what the guest maps. Otherwise it ends without
    /// taking anything back.
    fn name_viommu(&mut self) {
        if let Some(held_back) = self.line_limits.viommu.allow() {
            log::warn!(
                "{}: the VMM closed the connection right after it took guest RAM back; if QEMU ended with \"requires caching mode\", the guest turned on a vIOMMU that hides its mappings: use `-device intel-iommu,caching-mode=on`{held_back}",
                self.name()
            );
        }
    }

    /// The worker has an outcome. Returns the answer of the held request, if
    /// that concludes it.
    pub(crate) fn on_worker(&mut self) -> Option<Conclusion<'_>> {
        let outcome = self.worker.outcome()?;
        self.absorb(outcome);
        self.pending.waiting = Waiting::No;
        self.advance();
        self.conclusion()
    }

    /// The register channel has something, or room.
    pub(crate) fn on_registers(&mut self) -> Option<Conclusion<'_>> {
        for _ in 0..REGISTER_EVENTS {
            let Some(channel) = &mut self.registers else {
                break;
            };
            match registers::next_event(channel) {
                Ok(Some(event)) => self.on_register_event(event),
                Ok(None) => break,
                Err(error) => {
                    self.lender_gone(&Chain(&error));
                    break;
                }
            }
        }
        self.pending.retry();
        self.advance();
        self.conclusion()
    }

    fn lender_gone(&mut self, error: &dyn std::fmt::Display) {
        self.retired.extend(self.registers.take());
        if matches!(self.pending.waiting, Waiting::Worker { returning: true }) {
            return;
        }
        log::error!(
            "{}: the lender is gone ({error}); its registers read as all ones from here on",
            self.name()
        );
        self.pending.stop_waiting_for_registers();
        self.pending.then.push_back(Task::Event(Event::LenderGone));
    }

    /// Takes over what the worker did.
    fn absorb(&mut self, outcome: Outcome) {
        let Outcome {
            state,
            steps,
            opened,
            result,
        } = outcome;
        self.state = state;
        opened.fill(&mut self.report);
        for step in steps {
            match step {
                StepDone::Borrowed(lease) => self.adopt(lease),
                StepDone::Opened(layout) => {
                    layout.fill(&mut self.report);
                    // All is well again.
                    self.report.last_error = None;
                }
                StepDone::Blocked(blocked) => self.fail(&blocked.into()),
                StepDone::Done => {}
            }
        }
        match self.state {
            State::Unleased | State::Lost => self.retired.extend(self.registers.take()),
            State::Leased | State::Ready | State::Closing => {}
        }
        if let Err(error) = result {
            self.fail(&error);
        }
    }

    fn adopt(&mut self, lease: NewLease) {
        self.retired.extend(self.registers.replace(lease.registers));
        self.bars.adopt(lease.bars);
        self.absent = false;
        self.report.epoch = lease.epoch;
    }

    fn fail(&mut self, error: &WorkError) {
        if let Some(held_back) = self.line_limits.failure.allow() {
            log::error!("{}: {error}{held_back}", self.name(), error = Chain(error));
        }
        // A borrow that was not answered in time is asked for again.
        self.absent = self.state == State::Unleased && !error.is_late();
        self.pending.failure = Some(errno_of(error));
        self.report.last_error = Some(Chain(error).to_string());
    }

    /// Takes a request in hand. Answers at once if nothing has to be waited
    /// for.
    fn hold(
        &mut self,
        to: ReplyTo,
        finish: Finish,
        tasks: impl IntoIterator<Item = Task>,
    ) -> Answer<'_> {
        self.pending.hold(to, finish, tasks);
        self.advance();
        match self.conclusion().map(|conclusion| conclusion.reply) {
            Some(Ok(reply)) => Answer::Reply(reply),
            Some(Err(errno)) => Answer::Error(errno),
            None => Answer::Later,
        }
    }

    /// The answer to the held request, once its tasks are done.
    fn conclusion(&mut self) -> Option<Conclusion<'_>> {
        let (to, finish, failure) = self.pending.conclude()?;
        let is_version = matches!(finish, Finish::Reply(Reply::Version(_)));
        let then = match failure {
            Some(_) if is_version => Then::HangUp,
            _ => Then::GoOn,
        };
        if is_version && failure.is_none() {
            self.absent = false;
        }
        let reply = match (finish, failure) {
            (Finish::Always(reply), _) | (Finish::Reply(reply), None) => Ok(reply),
            (Finish::Read { region, offset }, _) => Ok(Reply::RegionRead {
                region,
                offset,
                data: &self.buffer,
            }),
            (Finish::RegionInfo { region, argsz }, None) => Ok(Reply::RegionInfo {
                info: self.region_info(region),
                argsz,
            }),
            (Finish::Error(errno), _)
            | (Finish::Reply(_) | Finish::RegionInfo { .. }, Some(errno)) => Err(errno),
        };
        Some(Conclusion { to, reply, then })
    }
}

fn errno_of(error: &WorkError) -> Errno {
    match error.refusal() {
        Some(ErrorKind::Busy) => Errno::BUSY,
        Some(ErrorKind::Limit) => Errno::NOSPC,
        Some(ErrorKind::Invalid) => Errno::INVAL,
        _ if error.is_lost() => Errno::NODEV,
        _ if error.is_late() => Errno::TIMEDOUT,
        _ => Errno::IO,
    }
}
