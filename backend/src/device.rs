//! One borrowed device as seen by a client: processes its requests.
//!
//! Most requests are answered at once. A request that needs the lender is *held* ([`Pending`]): it
//! becomes a queue of [`Task`]s, executed in order, each of which may wait for the worker or for
//! the register channel. The answer is sent when the queue is empty. No other request is processed
//! meanwhile, so no task sees a state that another request has changed.

mod bars;
mod config_write;
mod outage;
mod peer;
mod pending;
mod perform;
mod register_log;
mod registers;
mod report;
mod requests;
mod saved;

use std::time::{Duration, Instant};

use farside_backend_api::{ConnectionState, DeviceReport};
use farside_config_space::ConfigSpace;
use farside_daemon::RateLimit;
use farside_error_chain::Chain;
use farside_guest_layout::Gpa;
use farside_irq_relay::{IrqCounts, Vectors};
use farside_lender_protocol::{BarOwner, Channel, Described, ErrorKind, MAX_FDS, Transport};
use farside_pci::ConfigMirror;
use farside_vfio_user::{
    ClientLog, Connection, Negotiated, Reply, ReplyTo, Session, serve::Answer,
};
use rustix::io::Errno;

use crate::{
    borrow::{
        Event, Setup, State,
        worker::{NewLease, Outcome, Settings, StepDone, WorkError, Worker},
    },
    dma_table::DmaTable,
    records::{LeftLease, Records, Start},
};
use bars::Bars;
use outage::Outage;
use pending::{Finish, Pending, Task, Waiting};
use register_log::RegisterLog;

/// Maximum number of register-channel events processed per round of the event loop.
const REGISTER_EVENTS: usize = 256;

/// An error that prevents a device from being served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error("its configuration space is invalid")]
    Config(#[from] farside_config_space::ConfigSpaceError),
    #[error("its interrupts are invalid")]
    Irqs(#[from] farside_irq_relay::IrqCountsError),
    #[error(transparent)]
    System(#[from] std::io::Error),
    #[error("what the backend before has left is not of this device")]
    Left,
}

/// A device and the borrow behind it.
pub(crate) struct Device {
    settings: Settings,
    described: Described,
    counts: IrqCounts,
    config: ConfigSpace,
    /// The mirror of it in a BAR.
    mirror: Option<ConfigMirror>,
    /// Its expansion ROM; empty if it has none.
    rom: Vec<u8>,
    memory: DmaTable,
    /// The client's interrupt configuration: sent to the lender with a borrow, and used for
    /// signalling in the relayed form.
    vectors: Vectors,
    bars: Bars,
    /// Where the guest has them.
    placed: [Option<Gpa>; 6],
    worker: Worker,
    records: Records,
    /// The capabilities of the client.
    negotiated: Option<Negotiated>,
    /// Log lines about the device's clients.
    pub(crate) client_log: ClientLog,
    line_limits: LineLimits,
    registers: Option<Channel>,
    log: RegisterLog,
    /// The lease goes on when the device's process has ended.
    goes_on: bool,
    /// That has no process.
    outage: Option<Outage>,
    /// Closed register channels, kept until the event loop no longer watches them: their descriptor
    /// numbers must not be reused earlier.
    retired: Vec<Channel>,
    state: State,
    /// The lender refused the last borrow: the device reads as absent.
    absent: bool,
    /// The client has unplugged the device, but may keep the connection.
    unplugged: bool,
    /// The lender has asked for the device under this lease.
    release_requested: bool,
    /// The client unmapped low RAM, and only unmapped since.
    ram_taken: bool,
    /// The device of a backend that was killed may still reach the guest's memory.
    is_taken_over: bool,
    pending: Pending,
    /// Read buffer; kept so that reads do not allocate.
    buffer: Vec<u8>,
    report: DeviceReport,
}

/// Rate limits of the log lines that a guest or client can cause.
#[derive(Debug, Default)]
struct LineLimits {
    failure: RateLimit,
    bus_master: RateLimit,
    memory: RateLimit,
    irqs: RateLimit,
    peer_bars: RateLimit,
    viommu: RateLimit,
    records: RateLimit,
}

/// The result of a held request.
pub(crate) struct Conclusion<'a> {
    pub(crate) to: ReplyTo,
    pub(crate) reply: Result<Reply<'a>, Errno>,
    pub(crate) then: Then,
}

/// What to do with the client's connection after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    GoOn,
    /// Close it: the version was refused because the device is not available. Some clients cannot
    /// parse an error here and wait for the rest of a reply; all handle a closed connection.
    HangUp,
}

impl Device {
    /// Returns the client, too, that the process before had.
    pub(crate) fn new(
        settings: Settings,
        described: Described,
        rom: Vec<u8>,
        start: Start,
    ) -> Result<(Self, Option<(Connection, Session)>), DeviceError> {
        let mut config = match described.bars {
            BarOwner::Borrower => ConfigSpace::new(&described.description)?,
            BarOwner::Lender => ConfigSpace::of_function(&described.description)?,
        };
        config.add_rom(rom.len());
        let counts = farside_lender_protocol::irq_counts(&described.description)?;
        let Start {
            records,
            log,
            lease,
            left,
        } = start;
        let state = match &lease.1 {
            LeftLease::Fresh | LeftLease::None(_) => State::Unleased,
            LeftLease::Ended(_) => State::Lost,
            LeftLease::GoesOn { .. } => State::Leased,
        };
        for hidden in config.hidden() {
            log::info!(
                "device {} (VM {}): capability {} is hidden from the guest: {}",
                settings.device,
                settings.vm,
                hidden.name,
                hidden.reason
            );
        }
        let mut vectors = Vectors::new(counts);
        let (bars, memory, kept) = match left {
            None => (Bars::new(&described)?, DmaTable::default(), None),
            Some(left) => {
                let is_applied = left.irqs.into_iter().all(|it| vectors.apply(it).is_ok());
                if !(config.restore(&left.saved.config) && is_applied) {
                    return Err(DeviceError::Left);
                }
                let bars = Bars::with(&described, left.bars, left.state)?;
                (bars, left.memory, Some((left.saved, left.connection)))
            }
        };
        let mut device = Self {
            counts,
            mirror: described.description.mirror(),
            config,
            rom,
            memory,
            vectors,
            bars,
            placed: Default::default(),
            worker: Worker::start(settings.clone(), described.clone(), lease)?,
            records,
            negotiated: None,
            client_log: ClientLog::default(),
            line_limits: LineLimits::default(),
            registers: None,
            log: RegisterLog::new(log),
            goes_on: false,
            outage: None,
            retired: Vec::new(),
            state,
            absent: false,
            unplugged: false,
            release_requested: false,
            ram_taken: false,
            is_taken_over: false,
            pending: Pending::default(),
            buffer: Vec::new(),
            report: report::initial(&settings, &described.description),
            settings,
            described,
        };
        let client = kept.map(|(saved, connection)| {
            device.take_over(&saved);
            (connection, Session::resumed(saved.negotiated))
        });
        Ok((device, client))
    }

    /// Whether a request is held; no other may be processed.
    pub(crate) fn is_busy(&self) -> bool {
        self.pending.is_busy()
    }

    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }

    pub(crate) fn registers(&self) -> Option<&Channel> {
        self.registers.as_ref()
    }

    /// Whether the client has unplugged the device: its connection may be closed when another
    /// client connects.
    pub(crate) fn is_unplugged(&self) -> bool {
        self.unplugged && !self.is_busy()
    }

    /// Whether the client has unplugged the device, or is doing so.
    pub(crate) fn is_released(&self) -> bool {
        self.unplugged
    }

    /// Whether a register access waits for room in the channel.
    pub(crate) fn wants_register_room(&self) -> bool {
        matches!(self.pending.waiting, Waiting::Room(_)) || self.log.is_waiting()
    }

    /// The device's current report.
    pub(crate) fn report(&self) -> DeviceReport {
        let (connection, controller) = self.settings.network.report();
        DeviceReport {
            state: self.state,
            connection,
            controller,
            bars: self.bar_addresses(),
            interrupts: self.vectors.status(),
            state_version: match self.state {
                State::Leased | State::Ready | State::Closing => self.bars.state_version(),
                State::Unleased | State::Lost => None,
            },
            ..self.report.clone()
        }
    }

    /// The device's name in log lines.
    pub(crate) fn name(&self) -> String {
        format!("device {} (VM {})", self.settings.device, self.settings.vm)
    }

    /// What a borrow takes from the client.
    fn setup(&self) -> Setup {
        Setup {
            bar_files: self.bars.files(),
            state: self.bars.state_file(),
            state_page: self.bars.state_page(),
            irqs: self.vectors.configuration(MAX_FDS as u16),
            intx_disable: self.config.intx_disabled(),
            memory: self.memory.clone(),
            may_dma: self.config.may_dma(),
        }
    }

    /// Processes tasks whose time has come.
    pub(crate) fn on_time(&mut self) -> Option<Conclusion<'_>> {
        self.advance();
        self.conclusion()
    }

    /// When the pending register read was sent to the lender, if any.
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

    /// Closes the retired channels.
    pub(crate) fn drop_retired(&mut self) {
        self.retired.clear();
    }

    /// The client is gone: drops its state and returns the device.
    pub(crate) fn client_gone(&mut self) {
        if self.ram_taken && !self.unplugged {
            self.name_viommu();
        }
        self.records.client_gone();
        self.worker.cancel();
        self.pending.forget_client();
        let tasks = [Task::Event(Event::ClientGone), Task::Forget];
        self.pending.then.extend(tasks);
        self.advance();
    }

    /// Warns about a vIOMMU without caching mode: QEMU unmaps all guest RAM when the guest enables
    /// a vIOMMU, and aborts if the vIOMMU does not report the guest's mappings. In other cases QEMU
    /// exits without unmapping.
    fn name_viommu(&mut self) {
        if let Some(held_back) = self.line_limits.viommu.allow() {
            log::warn!(
                "{}: the VMM closed the connection right after it took guest RAM back; if QEMU ended with \"requires caching mode\", the guest turned on a vIOMMU that hides its mappings: use `-device intel-iommu,caching-mode=on`{held_back}",
                self.name()
            );
        }
    }

    /// Handles the worker's outcome. Returns the answer to the held request, if that completes it.
    pub(crate) fn on_worker(&mut self) -> Option<Conclusion<'_>> {
        let outcome = self.worker.outcome()?;
        self.pending.waiting = Waiting::No;
        self.absorb(outcome);
        self.advance();
        self.conclusion()
    }

    /// Handles a readable or writable register channel.
    pub(crate) fn on_registers(&mut self) -> Option<Conclusion<'_>> {
        for _ in 0..REGISTER_EVENTS {
            let Some(channel) = &mut self.registers else {
                break;
            };
            match registers::next_event(channel) {
                Ok(Some(event)) => self.on_register_event(event),
                Ok(None) => break,
                Err(error) => {
                    self.registers_ended(&error);
                    break;
                }
            }
        }
        if let Some(channel) = &mut self.registers
            && let Err(error) = self.log.flush(channel)
        {
            self.registers_ended(&error);
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

    /// Applies the worker's outcome.
    fn absorb(&mut self, outcome: Outcome) {
        let Outcome {
            state,
            steps,
            opened,
            result,
            away,
            attempt,
            unserved,
        } = outcome;
        self.state = state;
        opened.fill(&mut self.report);
        for step in steps {
            match step {
                StepDone::Borrowed(lease) => self.adopt(lease),
                StepDone::Opened(layout) => {
                    layout.fill(&mut self.report);
                    // Success clears the last error.
                    self.report.last_error = None;
                }
                StepDone::Blocked(blocked) => self.fail(&blocked.into()),
                StepDone::Done => {}
            }
        }
        match self.state {
            State::Unleased | State::Lost => {
                self.retired.extend(self.registers.take());
                self.end_outage();
                self.goes_on = false;
                self.log.clear();
            }
            State::Leased | State::Ready | State::Closing => {}
        }
        if let State::Unleased = self.state
            && self.settings.transport != Transport::Network
        {
            self.settings.network.clear();
        }
        if away && self.outage.is_none() {
            self.begin_outage();
        }
        if let Some(job) = unserved {
            self.pending.then.push_front(Task::Work(job));
        }
        if attempt {
            return match &result {
                Ok(()) => self.resumed(),
                Err(error) => self.attempt_failed(error),
            };
        }
        if let Err(error) = result {
            self.fail(&error);
        }
    }

    fn adopt(&mut self, lease: NewLease) {
        match self.outage {
            Some(_) => self.log.cut(self.bars.state_page(), lease.served),
            None => {
                let page = self.bars.state_page().filter(|_| lease.counts);
                self.log.begin(page);
                if lease.goes_on {
                    let state = &self.settings.network;
                    state.set(ConnectionState::Connected, Instant::now(), None);
                }
            }
        }
        self.goes_on = lease.goes_on;
        let registers = self.registers.insert(lease.registers);
        // An error recurs when the channel is read.
        let _ = self.log.flush(registers);
        self.bars.adopt(lease.bars);
        self.publish_bars();
        self.absent = false;
        self.release_requested = false;
        self.report.generation = lease.generation;
    }

    /// The lender takes the device back: asks the guest to release it, once for a lease. The lender
    /// ends the lease after `limit`.
    fn request_release(&mut self, limit: Duration) {
        if std::mem::replace(&mut self.release_requested, true) {
            return;
        }
        let reason = format!("its lender takes it back within {limit:?}");
        log::warn!("{}: {reason}", self.name());
        self.report.last_error = Some(reason);
        if self.vectors.signal_req() {
            return;
        }
        match &self.settings.release {
            Some(hook) => hook.call(&self.settings.device, limit),
            None => log::warn!("{}: the guest cannot be asked to release it", self.name()),
        }
    }

    fn fail(&mut self, error: &WorkError) {
        if let Some(held_back) = self.line_limits.failure.allow() {
            log::error!("{}: {error}{held_back}", self.name(), error = Chain(error));
        }
        // A borrow that missed its deadline is retried.
        self.absent = self.state == State::Unleased && !error.is_late();
        self.pending.failure = Some(errno_of(error));
        self.report.last_error = Some(Chain(error).to_string());
    }

    /// Holds a request. Answers at once if no task has to wait.
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
        self.save();
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
