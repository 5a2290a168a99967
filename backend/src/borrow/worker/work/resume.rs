//! A lease that goes on: its worker, or the lender, has ended, and the state of the device is in this process.
//!
//! Nothing reaches the guest before its windows are there: the new worker has no memory of the VM until it is mapped,
//! interrupts are set up before that, and bus mastering is enabled last. What the guest has written to registers
//! meanwhile follows (`device/register_log.rs`).

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use farside_error_chain::Chain;
use farside_lender_protocol::{
    BarOwner, CallError, ChannelError, Client, Described, IrqUpdate, Keeping, Lease as Granted,
    Secret, Transport, served,
};

use super::{
    super::{
        NewLease, Settings, StepDone, WorkError,
        lease::{Borrow, Lease},
    },
    Borrower, HANG_UP_TIMEOUT,
};
use crate::{
    borrow::{Setup, State, Step, bars::LeasedBars, error::PathError, network, path::OpenPath},
    records::{LeaseRecord, LeftConnection, LeftLease, Recorded},
};

/// How long an attempt waits for the lease. The next one waits further, however slowly a worker starts.
const LEASE_TIMEOUT: Duration = Duration::from_millis(700);

/// Time limit for setting the new worker up: a worker for which this is too short is ended.
const SET_UP_TIMEOUT: Duration = Duration::from_millis(800);

/// Most attempts to borrow a device whose worker ends before it is set up.
const BORROWS: u32 = 3;

/// How long an attempt waits for the former worker to be gone. With the other two, and the time for which a request is held
/// before (`device/outage.rs`), below a VMM's message timeout of 5 s.
const GONE_TIMEOUT: Duration = Duration::from_millis(500);

/// A lease without its worker.
pub(in crate::borrow::worker) struct Away {
    /// The connection of the former worker, which stays open: the lender keeps the device for it.
    former: Recorded,
    /// The connection of an attempt that has no answer yet: closed, it would end a lease that the lender still grants.
    asked: Option<Recorded>,
    /// The former worker is gone: until then it may reach guest memory.
    is_alone: bool,
    /// The device is a function, whose DMA does not end with its worker.
    is_function: bool,
    /// Left by a backend that was killed.
    is_left: bool,
    /// The former worker could not be set up, or is that of a backend that was killed. It runs until the lender ends it
    /// for the next attempt.
    is_useless: bool,
    chain: Secret,
    /// Its guest memory stays pinned.
    path: Option<OpenPath>,
    page_window: Option<u64>,
    /// The device was reset since.
    reset: bool,
    /// Other connections that the lease may be of.
    others: Vec<Recorded>,
}

impl Away {
    /// Of a backend that was killed: its worker may run.
    pub(in crate::borrow::worker) fn left(
        settings: &Settings,
        connections: Vec<LeftConnection>,
        chain: Secret,
        record: &LeaseRecord,
        is_function: bool,
    ) -> Option<Self> {
        let mut connections = recorded(settings, connections, record);
        Some(Self {
            former: connections.pop()?,
            asked: None,
            is_alone: false,
            is_function,
            is_left: true,
            is_useless: true,
            chain,
            path: None,
            page_window: None,
            reset: false,
            others: connections,
        })
    }

    pub(in crate::borrow::worker) fn state(&self) -> State {
        match self.path {
            Some(_) => State::Ready,
            None => State::Leased,
        }
    }

    pub(in crate::borrow::worker) fn path(&self) -> Option<&OpenPath> {
        self.path.as_ref()
    }

    /// Whether the former worker is gone. Waits for at most `timeout`.
    fn is_alone(&mut self, timeout: Duration) -> bool {
        let has_one = self.others.is_empty();
        self.is_alone = self.is_alone || has_one && self.former.is_closed(timeout);
        self.is_alone
    }

    /// Whether the device does no DMA. Waits for at most `timeout`.
    fn is_quiet(&mut self, timeout: Duration) -> bool {
        !self.is_function && self.is_alone(timeout)
    }

    /// An attempt over `client` has failed.
    fn attempt_failed(&mut self, client: Recorded, error: &CallError) {
        if matches!(error, CallError::Late(_)) && client.awaits_answer() {
            self.asked = Some(client);
        } else if client.has_process_ended() {
            // The lease was granted, and its worker has ended: the lender keeps the device for this connection now.
            self.former = client;
        } else if matches!(error, CallError::Unexpected(_)) {
            self.is_not_usable(client);
        }
    }

    /// The lease was granted to `client`, and its worker cannot be used.
    fn is_not_usable(&mut self, client: Recorded) {
        self.former = client;
        self.is_alone = false;
        self.is_useless = true;
    }

    /// Gives the lease up. Returns the connections of workers that may still be there, and the memory.
    pub(in crate::borrow::worker) fn into_former(mut self) -> (Vec<Recorded>, Option<OpenPath>) {
        if !self.is_alone || self.is_function {
            self.others.push(self.former);
        }
        (self.others, self.path)
    }

    /// Whether the lender may still grant the lease to the connection of an attempt.
    pub(in crate::borrow::worker) fn may_be_granted(&self) -> bool {
        self.asked.is_some()
    }
}

/// How a borrow begins after a backend that was killed, and whether the lender may not have noticed yet that the lease of
/// that one is over.
pub(super) fn left(
    settings: &Settings,
    described: &Described,
    left: LeftLease,
    record: &LeaseRecord,
) -> (Borrow, bool) {
    match left {
        LeftLease::Fresh => (Borrow::Unleased, false),
        LeftLease::None(connections) => {
            stop(settings, connections, record);
            (Borrow::Unleased, true)
        }
        LeftLease::Ended(connections) => {
            stop(settings, connections, record);
            (Borrow::Lost, true)
        }
        LeftLease::GoesOn { connections, chain } => {
            let is_function = described.bars == BarOwner::Lender;
            let away = Away::left(settings, connections, chain, record, is_function).map(Box::new);
            (away.map_or(Borrow::Lost, Borrow::Away), false)
        }
    }
}

fn recorded(
    settings: &Settings,
    connections: Vec<LeftConnection>,
    record: &LeaseRecord,
) -> Vec<Recorded> {
    let client = |socket| Client::left(&settings.lender, &settings.dialer, socket);
    let connections = connections.into_iter();
    connections
        .map(|left| Recorded::left(left, record, client))
        .collect()
}

/// Waits until the devices of a process before do no DMA any more: no request may be answered before.
fn stop(settings: &Settings, connections: Vec<LeftConnection>, record: &LeaseRecord) {
    let until = Instant::now() + HANG_UP_TIMEOUT;
    for mut client in recorded(settings, connections, record) {
        if !client.hang_up(until.saturating_duration_since(Instant::now())) {
            log::error!(
                "device {} (VM {}): the lender has not confirmed within {HANG_UP_TIMEOUT:?} that the device of the backend before does no DMA any more",
                settings.device,
                settings.vm
            );
        }
    }
}

/// Whether an error is the end of the connection.
pub(super) fn is_cut(error: &WorkError) -> bool {
    matches!(
        error,
        WorkError::Path(crate::borrow::error::PathError::Lender(CallError::Lost(
            ChannelError::Closed | ChannelError::Io(_)
        )))
    )
}

impl Borrower {
    /// Borrows the device, again if the worker that the lender has started for it has ended.
    pub(super) fn borrow_device(&mut self, setup: &Setup) -> Result<NewLease, WorkError> {
        let before = self.borrow.state();
        for _ in 1..BORROWS {
            let error = match self.borrow_once(setup) {
                Ok(lease) => return Ok(lease),
                Err(error) => error,
            };
            if !is_cut(&error) {
                return Err(error);
            }
            log::debug!("{}: borrowing it again: {}", self.name(), Chain(&error));
            self.enter(before);
        }
        let last = self.borrow_once(setup);
        if last.as_ref().is_err_and(is_cut) {
            log::error!(
                "{}: {BORROWS} times the lender's process for it ended before the lease began: see the lender's log",
                self.name()
            );
        }
        last
    }

    /// Whether the lease may go on.
    pub(super) fn goes_on(&mut self) -> bool {
        match &self.borrow {
            Borrow::Leased(lease) | Borrow::Ready(lease, _) | Borrow::Closing(lease, _) => {
                lease.chain.is_some()
            }
            Borrow::Away(_) => true,
            Borrow::Unleased | Borrow::Lost => false,
        }
    }

    /// The worker has ended. A path that was being opened or closed is closed with it.
    pub(super) fn go_away(&mut self) {
        let was_open = self.borrow.state() == State::Ready;
        self.borrow = match std::mem::take(&mut self.borrow) {
            away @ Borrow::Away(_) => away,
            other => match other.into_parts() {
                Some((
                    Lease {
                        client,
                        chain: Some(chain),
                        page_window,
                        ..
                    },
                    path,
                )) => Borrow::Away(Box::new(Away {
                    former: client,
                    asked: None,
                    is_alone: false,
                    is_function: self.described.bars == BarOwner::Lender,
                    is_left: false,
                    is_useless: false,
                    chain,
                    path: path.filter(|_| was_open),
                    page_window,
                    reset: false,
                    others: Vec::new(),
                })),
                _ => Borrow::Lost,
            },
        };
    }

    /// A step without a worker: what stops DMA is done when the former one is gone, what starts it fails.
    pub(super) fn step_away(&mut self, step: &Step) -> Result<StepDone, WorkError> {
        let Borrow::Away(away) = &mut self.borrow else {
            return Err(cut());
        };
        match step {
            Step::Borrow(_) | Step::Open(_) => return Err(cut()),
            Step::Map(mapping) => {
                if let Some(path) = &mut away.path {
                    path.leave_out(mapping);
                }
                return Err(cut());
            }
            Step::Abandon => {}
            Step::Return => self.enter(State::Unleased),
            Step::Close | Step::Stop | Step::Block(_) | Step::Reset | Step::Unmap(_) => {
                if !away.is_quiet(HANG_UP_TIMEOUT) {
                    return Err(CallError::Late(HANG_UP_TIMEOUT).into());
                }
                match (step, &mut away.path) {
                    (Step::Unmap(mappings), Some(path)) => {
                        mappings.iter().for_each(|mapping| path.forget(mapping));
                    }
                    _ => {
                        if let Some(path) = away.path.take() {
                            away.page_window = path.page_window();
                        }
                    }
                }
                away.reset |= matches!(step, Step::Reset);
                if let Step::Block(blocked) = step {
                    return Ok(StepDone::Blocked(*blocked));
                }
            }
        }
        Ok(StepDone::Done)
    }

    /// The state after a failed step without a worker.
    pub(super) fn after_away(&mut self, step: &Step) -> State {
        match step {
            Step::Borrow(_) | Step::Open(_) | Step::Map(_) => self.borrow.state(),
            // The former worker may still do what it should not.
            _ => State::Lost,
        }
    }

    /// Borrows as the lease that goes on.
    pub(super) fn resume(&mut self, setup: &Setup) -> Result<NewLease, WorkError> {
        self.go_away();
        let Borrow::Away(away) = &mut self.borrow else {
            return Err(cut());
        };
        let patience = match away.is_useless {
            true => Duration::ZERO,
            false => GONE_TIMEOUT,
        };
        if !(away.is_alone(patience) || away.is_useless) {
            return Err(CallError::Late(GONE_TIMEOUT).into());
        }
        let asked = away.asked.take();
        if self.settings.transport == Transport::Network {
            return self.resume_remote(setup);
        }
        let (mut client, granted) = self.ask(asked, setup)?;
        let Borrow::Away(away) = &mut self.borrow else {
            return Err(cut());
        };
        let granted = match granted {
            Ok(granted) => granted,
            Err(error) => {
                away.attempt_failed(client, &error);
                return Err(error.into());
            }
        };
        // The former worker is gone, and this one has none to serve yet.
        let served = setup.state_page.as_ref().map_or(0, served);
        let generation = client.generation();
        client.set_deadline(Some(Instant::now() + SET_UP_TIMEOUT));
        let relay = self.settings.relay_interrupts;
        let mut go_on = || -> Result<(), WorkError> {
            set_up_interrupts(&mut client, setup, relay)?;
            if away.reset {
                client.reset()?;
                away.reset = false;
            }
            match &mut away.path {
                Some(path) => {
                    path.reopen(&mut client)?;
                    client.enable_bus_master()?;
                }
                // It may have been killed before the function was stopped. What a backend before has left is opened next.
                None if away.is_function && !(away.is_left && setup.may_dma) => client.close()?,
                None => {}
            }
            Ok(())
        };
        if let Err(error) = go_on() {
            // This worker is the former one now.
            away.is_not_usable(client);
            away.is_useless = !is_cut(&error);
            return Err(error);
        }
        // Of a function; those of a model are the client's.
        let bars = LeasedBars::new(
            &self.described.description,
            None,
            &granted.bars,
            granted.files,
        );
        let bars = bars.map_err(PathError::from)?;
        let chain = granted.chain.unwrap_or(away.chain);
        self.record.set(Some(chain));
        let lease = Lease {
            client,
            chain: Some(chain),
            _remote: None,
            bar_window: None,
            page_window: away.page_window,
        };
        self.borrow = match away.path.take() {
            Some(path) => Borrow::Ready(lease, path),
            None => Borrow::Leased(lease),
        };
        Ok(NewLease {
            generation,
            registers: granted.registers,
            bars: bars.files,
            goes_on: true,
            counts: true,
            served,
        })
    }

    /// As [`resume`](Self::resume), of a controller in the backend that was killed: it is started again here.
    fn resume_remote(&mut self, setup: &Setup) -> Result<NewLease, WorkError> {
        let Borrow::Away(away) = &self.borrow else {
            return Err(cut());
        };
        let (chain, page_window) = (away.chain, away.page_window);
        let mut client = self.connect(Instant::now() + LEASE_TIMEOUT + SET_UP_TIMEOUT)?;
        client.set_fence(self.settings.fence()?);
        let described = &self.described;
        let leased = network::borrow(&self.settings, described, client, setup, Some(chain))?;
        let served = setup.state_page.as_ref().map_or(0, served);
        let mut client = Recorded::new(leased.client, &self.record);
        let generation = client.generation();
        client.set_deadline(Some(Instant::now() + SET_UP_TIMEOUT));
        set_up_interrupts(&mut client, setup, self.settings.relay_interrupts)?;
        self.borrow = Borrow::Leased(Lease {
            client,
            chain: None,
            _remote: Some(leased.remote),
            bar_window: None,
            page_window,
        });
        Ok(NewLease {
            generation,
            registers: leased.lease.registers,
            bars: Vec::new(),
            goes_on: false,
            counts: true,
            served,
        })
    }

    /// Asks for the lease that goes on, or waits further for the answer to one that `asked`.
    fn ask(
        &self,
        asked: Option<Recorded>,
        setup: &Setup,
    ) -> Result<(Recorded, Result<Granted, CallError>), WorkError> {
        let Borrow::Away(away) = &self.borrow else {
            return Err(cut());
        };
        let settings = &self.settings;
        let device = &settings.device;
        let deadline = Instant::now() + LEASE_TIMEOUT;
        if let Some(mut client) = asked {
            client.set_deadline(Some(deadline));
            let granted = client.late_lease();
            return Ok((client, granted));
        }
        let mut client = self.connect(deadline)?;
        client.set_fence(settings.fence()?);
        let keeping = Keeping {
            keep: settings.lost_after,
            resumes: Some(away.chain),
        };
        let files = setup.files();
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        let mut client = Recorded::new(client, &self.record);
        let granted = client.borrow_and_keep(device, keeping, &files);
        Ok((client, granted))
    }

    /// Whether leases of the device can go on.
    pub(super) fn keeps_state(&self) -> bool {
        self.described.state != 0 && self.settings.transport == Transport::SharedMemory
    }
}

/// Has a new lease signal as its client has set it up.
pub(super) fn set_up_interrupts(
    client: &mut Client,
    setup: &Setup,
    relay: bool,
) -> Result<(), WorkError> {
    client.set_intx_disable(setup.intx_disable)?;
    for request in &setup.irqs {
        let (update, fds) = IrqUpdate::new(request, relay);
        client.set_irqs(update, &fds)?;
    }
    Ok(())
}

fn cut() -> WorkError {
    CallError::Lost(ChannelError::Closed).into()
}
