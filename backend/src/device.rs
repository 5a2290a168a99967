//! One borrowed device as a client sees it: requests in, answers out.
//!
//! Most requests are answered at once. One that needs the lender is *held*: it
//! becomes a queue of [`Task`]s, taken one after another, each of which may
//! wait for the worker or for the register channel; when the queue is empty the
//! request is concluded and its answer sent. No other request is taken
//! meanwhile, so tasks need not fear that the ground moves under them.

mod bars;
mod config_write;
mod perform;
mod registers;
mod report;
mod task;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use farside_config_space::ConfigSpace;
use farside_control::{Channel, Described, ErrorKind};
use farside_devices::Description;
use farside_irq_relay::{IrqCounts, Vectors};
use farside_vfio_user::{
    DeviceInfo, DmaMap, DmaUnmap, IrqInfo, RateLimit, Region, RegionInfo, RegionWrite, Reply,
    ReplyTo, Request, SetIrqs as WireIrqs,
    serve::{Answer, Handler},
};
use rustix::io::Errno;

use crate::{
    borrow::{
        Event, State,
        worker::{MemoryChange, Outcome, Settings, WorkError, Worker},
    },
    dma_table::{Backing, DmaTable},
};
pub(crate) use bars::BarFile;
use bars::Bars;
pub(crate) use report::DeviceReport;
use task::{Finish, Held, Task, Tasks};

/// Events of the register channel that are taken before others have their turn.
const REGISTER_EVENTS: usize = 256;

/// Why a device cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error("its configuration space makes no sense: {0}")]
    Config(#[from] farside_config_space::ConfigSpaceError),
    #[error("its interrupts make no sense: {0}")]
    Irqs(#[from] farside_irq_relay::IrqCountsError),
    #[error("{0}")]
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
    registers: Option<Channel>,
    /// Register channels that are done with, until the event loop no longer
    /// watches them: closed earlier, their numbers could come back as those of
    /// other descriptors.
    retired: Vec<Channel>,
    /// The worker gives the device back: the lender closes the register
    /// channel, and that is no loss.
    returning: bool,
    state: State,
    /// The lender refused the last borrow: the device is not there.
    absent: bool,
    /// The client has unplugged the device and may keep the connection.
    unplugged: bool,
    held: Option<Held>,
    tasks: Tasks,
    /// The last refusal of the request being served.
    failure: Option<Errno>,
    /// What a read fills; kept, so that reads do not allocate.
    buffer: Vec<u8>,
    report: DeviceReport,
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
        let counts = farside_control::irq_counts(&described.description)?;
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
            registers: None,
            retired: Vec::new(),
            returning: false,
            state: State::default(),
            absent: false,
            unplugged: false,
            held: None,
            tasks: Tasks::default(),
            failure: None,
            buffer: Vec::new(),
            report: DeviceReport::new(&settings, &described.description),
            settings,
            described,
        })
    }

    /// Whether a request is held: no other may be taken.
    pub(crate) fn is_busy(&self) -> bool {
        self.held.is_some() || !self.tasks.is_idle()
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

    /// Whether a register access waits for room in the channel.
    pub(crate) fn wants_register_room(&self) -> bool {
        self.tasks.waits_for_room()
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
        self.tasks.register_read_since()
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
        self.held = None;
        self.worker.cancel();
        self.tasks.keep_current();
        self.tasks.push(Task::Event(Event::ClientGone));
        self.tasks.push(Task::Forget);
        self.advance();
    }

    /// The worker has an outcome. Returns the answer of the held request, if
    /// that concludes it.
    pub(crate) fn on_worker(&mut self) -> Option<Conclusion<'_>> {
        let outcome = self.worker.outcome()?;
        self.absorb(outcome);
        self.tasks.finish_current();
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
                    self.lender_gone(&error);
                    break;
                }
            }
        }
        self.tasks.retry();
        self.advance();
        self.conclusion()
    }

    fn lender_gone(&mut self, error: &dyn std::fmt::Display) {
        if self.returning {
            self.retired.extend(self.registers.take());
            return;
        }
        log::error!(
            "device {} (VM {}): the lender is gone ({error}); its registers read as all ones from here on",
            self.settings.device,
            self.settings.vm
        );
        self.retired.extend(self.registers.take());
        self.tasks.stop_waiting_for_registers();
        self.tasks.push(Task::Event(Event::LenderGone));
    }

    /// Takes over what the worker did.
    fn absorb(&mut self, outcome: Outcome) {
        self.returning = false;
        if let Some(state) = outcome.state {
            self.state = state;
        }
        if let Some(lease) = outcome.lease {
            self.retired.extend(self.registers.replace(lease.registers));
            self.bars.adopt(lease.bars);
            self.absent = false;
            self.report.epoch = lease.epoch;
        }
        if let Some(layout) = outcome.layout {
            self.report.layout = layout;
            // All is well again.
            self.report.last_error = None;
        }
        self.report.open = outcome.opened.unwrap_or(match self.state {
            State::Ready => self.report.open,
            _ => Default::default(),
        });
        match self.state {
            State::Described | State::Lost => self.retired.extend(self.registers.take()),
            State::Leased | State::Ready => {}
        }
        if let Some(error) = outcome.error {
            static FAILED: RateLimit = RateLimit::new();
            if let Some(held_back) = FAILED.allow() {
                log::error!("{}: {error}{held_back}", self.name());
            }
            self.absent = self.state == State::Described;
            self.failure = Some(errno_of(&error));
            self.report.last_error = Some(error.to_string());
        }
    }

    /// Takes a request in hand. Answers at once if nothing has to be waited
    /// for.
    fn hold(
        &mut self,
        to: ReplyTo,
        finish: Finish,
        tasks: impl IntoIterator<Item = Task>,
    ) -> Answer<'_> {
        self.failure = None;
        self.held = Some(Held { to, finish });
        for task in tasks {
            self.tasks.push(task);
        }
        self.advance();
        match self.conclusion().map(|conclusion| conclusion.reply) {
            Some(Ok(reply)) => Answer::Reply(reply),
            Some(Err(errno)) => Answer::Error(errno),
            None => Answer::Later,
        }
    }

    /// The answer to the held request, once its tasks are done.
    fn conclusion(&mut self) -> Option<Conclusion<'_>> {
        if !self.tasks.is_idle() {
            return None;
        }
        let Held { to, finish } = self.held.take()?;
        let failure = self.failure.take();
        let then = match (&finish, failure) {
            (Finish::Version(_), Some(_)) => Then::HangUp,
            _ => Then::GoOn,
        };
        let reply = match (finish, failure) {
            (Finish::Version(negotiated), None) => {
                self.absent = false;
                Ok(Reply::Version(negotiated))
            }
            (Finish::Unmap(request), _) => Ok(Reply::DmaUnmap(request)),
            // What was read from a device that is gone is all ones already.
            (Finish::Read { region, offset }, _) => Ok(Reply::RegionRead {
                region,
                offset,
                data: &self.buffer,
            }),
            // A refused bus-master enable shows in the register, as it would
            // in hardware; the write itself was done.
            (
                Finish::Write {
                    region,
                    offset,
                    count,
                },
                _,
            ) => Ok(Reply::RegionWrite {
                region,
                offset,
                count,
            }),
            (Finish::WriteMulti { done }, _) => Ok(Reply::RegionWriteMulti { done }),
            (Finish::Done, None) => Ok(Reply::Done),
            (Finish::RegionInfo { region, argsz }, None) => Ok(Reply::RegionInfo {
                info: self.region_info(region),
                argsz,
            }),
            (Finish::Version(_) | Finish::Done | Finish::RegionInfo { .. }, Some(errno)) => {
                Err(errno)
            }
            (Finish::Error(errno), _) => Err(errno),
        };
        Some(Conclusion { to, reply, then })
    }

    fn read(&mut self, region: Region, offset: u64, count: u32, to: ReplyTo) -> Answer<'_> {
        let count = count as usize;
        self.buffer.clear();
        self.buffer.resize(count, 0xff);
        let bar = match region {
            Region::Config => {
                let size = self.config.size();
                if self.is_present() && offset + count as u64 <= size {
                    self.config.read(offset, &mut self.buffer);
                }
                None
            }
            Region::Bar(bar) => self.in_bar(bar, offset, count).then_some(bar),
            Region::Rom | Region::Vga => None,
        };
        let finish = Finish::Read { region, offset };
        match bar {
            Some(bar) => {
                let borrow = Task::Event(Event::BarAccess);
                let read = Task::BarRead {
                    bar,
                    offset,
                    done: 0,
                };
                self.hold(to, finish, [borrow, read])
            }
            None => self.hold(to, finish, []),
        }
    }

    fn write(&mut self, write: RegionWrite<'_>, to: ReplyTo) -> Answer<'_> {
        let RegionWrite {
            region,
            offset,
            data,
        } = write;
        let count = data.len() as u32;
        let finish = Finish::Write {
            region,
            offset,
            count,
        };
        if let (Region::Bar(bar), Some(channel)) = (region, &mut self.registers) {
            // The common case, with no task and no copy.
            if !in_bar(&self.described.description, bar, offset, data.len()) {
                return Answer::Error(Errno::INVAL);
            }
            match registers::post_write(channel, bar, offset, data) {
                Ok(done) if done == data.len() => {
                    return Answer::Reply(Reply::RegionWrite {
                        region,
                        offset,
                        count,
                    });
                }
                Ok(done) => {
                    let rest = Task::bar_write(bar, offset, data, done);
                    return self.hold(to, finish, [rest]);
                }
                Err(error) => {
                    self.lender_gone(&error);
                    return self.hold(to, finish, []);
                }
            }
        }
        match self.write_tasks(region, offset, data) {
            Ok(tasks) => self.hold(to, finish, tasks),
            Err(errno) => Answer::Error(errno),
        }
    }

    /// What a write comes to.
    fn write_tasks(&self, region: Region, offset: u64, data: &[u8]) -> Result<Vec<Task>, Errno> {
        match region {
            Region::Config => {
                let end = offset.checked_add(data.len() as u64);
                if end.is_none_or(|end| end > self.config.size()) {
                    return Err(Errno::INVAL);
                }
                Ok(vec![Task::ConfigWrite {
                    offset,
                    data: data.to_vec(),
                }])
            }
            Region::Bar(bar) if self.in_bar(bar, offset, data.len()) => Ok(vec![
                Task::Event(Event::BarAccess),
                Task::bar_write(bar, offset, data, 0),
            ]),
            Region::Bar(_) | Region::Rom | Region::Vga => Err(Errno::INVAL),
        }
    }

    /// Whether the guest is to find a device.
    fn is_present(&self) -> bool {
        !self.absent && self.state != State::Lost
    }

    fn in_bar(&self, bar: u8, offset: u64, count: usize) -> bool {
        in_bar(&self.described.description, bar, offset, count)
    }

    fn map(&mut self, request: DmaMap, to: ReplyTo) -> Answer<'_> {
        let backing = request.fd.map(|file| Backing {
            file: Arc::new(file.into()),
            offset: request.offset,
        });
        match self
            .memory
            .map(request.address, request.size, request.writable, backing)
        {
            Ok(mapping) => {
                let change = Task::Memory(MemoryChange::Map(mapping));
                self.hold(to, Finish::Done, [change])
            }
            Err(error) => {
                self.refuse_memory(&error);
                // The client carries on as if it were mapped.
                let change = Task::Memory(MemoryChange::Refused(error));
                self.hold(to, Finish::Error(error.errno()), [change])
            }
        }
    }

    fn unmap(&mut self, request: DmaUnmap, to: ReplyTo) -> Answer<'_> {
        let mappings = match request {
            DmaUnmap::All => self.memory.unmap_all(),
            DmaUnmap::Range { address, size } => match self.memory.unmap(address, size) {
                Ok(mappings) => mappings,
                Err(error) => {
                    self.refuse_memory(&error);
                    return Answer::Error(error.errno());
                }
            },
        };
        let change = Task::Memory(MemoryChange::Unmap(mappings));
        self.hold(to, Finish::Unmap(request), [change])
    }

    /// The client only prints the error reply, so say it here too.
    fn refuse_memory(&mut self, error: &crate::dma_table::DmaError) {
        static REFUSED: RateLimit = RateLimit::new();
        if let Some(held_back) = REFUSED.allow() {
            log::warn!("{}: guest memory refused: {error}{held_back}", self.name());
        }
        self.report.last_error = Some(error.to_string());
    }

    fn region_info(&self, region: Region) -> RegionInfo<'_> {
        match region {
            Region::Config => RegionInfo {
                readable: true,
                writable: true,
                size: self.config.size(),
                ..RegionInfo::absent(region)
            },
            Region::Bar(bar) => match self.described.description.bars.get(usize::from(bar)) {
                Some(Some(description)) => RegionInfo {
                    readable: true,
                    writable: true,
                    size: description.size,
                    mappable: self.bars.mappable(bar),
                    ..RegionInfo::absent(region)
                },
                _ => RegionInfo::absent(region),
            },
            Region::Rom | Region::Vga => RegionInfo::absent(region),
        }
    }

    fn set_irqs(&mut self, wire: WireIrqs<'_>, to: ReplyTo) -> Answer<'_> {
        let request = match wire.for_function(&self.counts) {
            Ok(request) => request,
            Err(error) => {
                static REFUSED: RateLimit = RateLimit::new();
                if let Some(held_back) = REFUSED.allow() {
                    log::warn!("{}: interrupts refused: {error}{held_back}", self.name());
                }
                return Answer::Error(error.errno());
            }
        };
        // A loopback trigger is for the one who signals; all else is recorded.
        let loopback = task::is_loopback(&request);
        let we_signal = self.settings.relay_interrupts || self.registers.is_none();
        if (!loopback || we_signal)
            && let Err(error) = self.vectors.apply(request.clone())
        {
            return Answer::Error(error.errno());
        }
        let farewell = request.is_farewell();
        self.unplugged |= farewell;
        let give_back = farewell.then_some([Task::Event(Event::ClientGone), Task::ResetConfig]);
        let forward = (!loopback || !we_signal).then_some(Task::SetIrqs(request));
        self.hold(
            to,
            Finish::Done,
            forward.into_iter().chain(give_back.into_iter().flatten()),
        )
    }
}

impl Handler for Device {
    fn handle(&mut self, request: Request<'_>, to: ReplyTo) -> Answer<'_> {
        match request {
            Request::Version(negotiated) => {
                self.hold(to, Finish::Version(negotiated), [Task::Check])
            }
            Request::DmaMap(request) => self.map(request, to),
            Request::DmaUnmap(request) => self.unmap(request, to),
            Request::DeviceGetInfo => {
                Answer::Reply(Reply::DeviceInfo(DeviceInfo { resettable: true }))
            }
            Request::DeviceGetRegionInfo { region, argsz } => {
                // A BAR of hardware comes with a lease.
                let borrow = matches!(region, Region::Bar(bar) if self.bars.need_a_lease(bar));
                let borrow = borrow.then_some(Task::Event(Event::BarAccess));
                self.hold(to, Finish::RegionInfo { region, argsz }, borrow)
            }
            Request::DeviceGetIrqInfo { index } => {
                Answer::Reply(Reply::IrqInfo(IrqInfo::of(&self.counts, index)))
            }
            Request::DeviceSetIrqs(request) => self.set_irqs(request, to),
            Request::RegionRead {
                region,
                offset,
                count,
            } => self.read(region, offset, count, to),
            Request::RegionWrite(write) => self.write(write, to),
            Request::RegionWriteMulti(writes) => {
                let done = writes.len() as u64;
                let mut tasks = Vec::new();
                for write in writes.writes() {
                    match self.write_tasks(write.region, write.offset, write.data) {
                        Ok(more) => tasks.extend(more),
                        Err(errno) => return Answer::Error(errno),
                    }
                }
                self.hold(to, Finish::WriteMulti { done }, tasks)
            }
            Request::DeviceReset => self.hold(
                to,
                Finish::Done,
                // The lender is to be told of the registers as they are after
                // the reset.
                [Task::ResetConfig, Task::Event(Event::Reset)],
            ),
        }
    }
}

fn in_bar(description: &Description, bar: u8, offset: u64, count: usize) -> bool {
    let size = match description.bars.get(usize::from(bar)) {
        Some(Some(bar)) => bar.size,
        _ => return false,
    };
    offset
        .checked_add(count as u64)
        .is_some_and(|end| end <= size)
}

fn errno_of(error: &WorkError) -> Errno {
    match error.refusal() {
        Some(ErrorKind::Busy) => Errno::BUSY,
        Some(ErrorKind::Limit) => Errno::NOSPC,
        Some(ErrorKind::Invalid) => Errno::INVAL,
        _ if error.is_lost() => Errno::NODEV,
        _ => Errno::IO,
    }
}
