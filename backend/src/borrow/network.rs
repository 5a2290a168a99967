//! Leases over the network: the controller of the device is in this process, its medium at the lender.
//!
//! The controller is served as a lender within this host serves it, so that everything else in a borrow
//! is as there. A thread keeps its medium connected: after a cut, I/O waits, and goes on over the next
//! connection. After [`Settings::lost_after`](super::worker::Settings) the guest is asked to release the
//! device, and I/O fails.

use std::{
    fmt,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    time::{Duration, Instant},
};

use farside_backend_api::{Connection, ConnectionState};
use farside_devices::{
    block::{MediumKeeper, Notice, Supply, remote_medium},
    remote::Model,
};
use farside_error_chain::Chain;
use farside_lender::near::{Handle, KeptState, Near};
use farside_lender_protocol::{
    CallError, Channel, Client, Described, DeviceStatus, ErrorKind, Lease, MediumLease, Secret,
};
use farside_medium::Link;

use super::{
    Setup,
    worker::{Settings, WorkError},
};

/// Time limit for connecting, and for the lender's answers.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);

/// Time limit for sending what the control protocol has left to send.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause after the first failed attempt to connect; each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Maximum pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A connection that has lasted this long was one, without I/O, too: the time of waiting, and the pauses, begin anew.
const STABLE: Duration = Duration::from_secs(10);

/// Time for the guest to release a device that is given up.
const RELEASE_LIMIT: Duration = Duration::from_secs(30);

/// What the event loop shows of the connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct NetworkState(Arc<Mutex<Shown>>);

#[derive(Debug, Default)]
struct Shown {
    connection: Option<Connected>,
    controller: Option<Handle>,
}

#[derive(Clone, Debug)]
struct Connected {
    state: ConnectionState,
    since: Instant,
    retries: u64,
    restarts: u64,
    error: Option<String>,
}

impl NetworkState {
    /// For a report: the connection, and the controller's status.
    pub(crate) fn report(&self) -> (Option<Connection>, Option<DeviceStatus>) {
        let (connection, controller) = {
            let shown = self.lock();
            (shown.connection.clone(), shown.controller.clone())
        };
        let connection = connection.map(|it| Connection {
            state: it.state,
            seconds: it.since.elapsed().as_secs(),
            retries: it.retries,
            restarts: it.restarts,
            last_error: it.error,
        });
        (connection, controller.and_then(|it| it.status()))
    }

    pub(crate) fn set(&self, state: ConnectionState, since: Instant, error: Option<String>) {
        let mut shown = self.lock();
        let before = shown.connection.take();
        let retries = before.as_ref().map_or(0, |before| before.retries);
        let restarts = before.as_ref().map_or(0, |before| before.restarts);
        let error = error.or(before.and_then(|before| before.error));
        shown.connection = Some(Connected {
            state,
            since,
            retries,
            restarts,
            error,
        });
    }

    /// The device goes on in another process.
    pub(crate) fn restarted(&self, now: Instant) {
        self.set(ConnectionState::Connected, now, None);
        if let Some(connection) = &mut self.lock().connection {
            connection.restarts += 1;
        }
    }

    /// Nothing is borrowed.
    pub(crate) fn clear(&self) {
        *self.lock() = Shown::default();
    }

    pub(crate) fn retried(&self, error: String) {
        if let Some(connection) = &mut self.lock().connection {
            connection.retries += 1;
            connection.error = Some(error);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shown> {
        // Each update is one assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A controller whose medium is at the lender. Dropping it returns the device.
pub(super) struct Remote {
    _near: Near,
    state: NetworkState,
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.state.clear();
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote")
    }
}

/// The lease of a controller in this process.
pub(super) struct Leased {
    pub(super) client: Client,
    /// Its chain is the right of the next backend to go on, with the controller's state.
    pub(super) lease: Lease,
    pub(super) remote: Remote,
}

/// Borrows the device's medium through `client`, and starts its controller, which goes on from the state of one before if
/// the lease `resumes` a chain.
pub(super) fn borrow(
    settings: &Settings,
    described: &Described,
    client: Client,
    setup: &Setup,
    resumes: Option<Secret>,
) -> Result<Leased, WorkError> {
    let copy = |file: &Arc<OwnedFd>| file.try_clone().map_err(WorkError::System);
    let bar_memory = setup.bar_files.iter().map(copy).collect::<Result<_, _>>()?;
    let state = setup.state.as_ref().map(copy).transpose()?;
    let lender = client.lender().to_owned();
    let (medium, link) = lend(settings, client, resumes)?;
    let invalid = |why: &dyn fmt::Display| {
        WorkError::from(CallError::Unexpected(format!(
            "a medium that no controller fits: {why}"
        )))
    };
    let MediumLease {
        generation,
        chain,
        model,
        size,
        punches_holes,
    } = medium;
    let model: Model = serde_json::from_str(&model).map_err(|error| invalid(&error))?;
    let (remote, keeper) = remote_medium(size, link).map_err(WorkError::System)?;
    let device = model
        .controller(&settings.device, remote, (size, punches_holes))
        .map_err(|error| invalid(&Chain(&error)))?;
    let now = Described {
        description: device.description().clone(),
        ..described.clone()
    };
    if !now.is_same_to_guests(described) {
        return Err(WorkError::Changed(settings.device.clone()));
    }
    let (ours, theirs) = Channel::pair().map_err(WorkError::System)?;
    let kept = state.map(|file| KeptState {
        file,
        chain,
        goes_on: resumes.is_some(),
    });
    let near = Near::start(
        &settings.device,
        &settings.vm,
        device,
        generation,
        theirs,
        (bar_memory, settings.quota.clone()),
        kept,
    )
    .map_err(CallError::from)?;
    let leased = Client::leased(ours, &settings.lender, lender, settings.dialer.clone());
    let (client, lease) = leased?;
    let state = settings.network.clone();
    state.set(ConnectionState::Connected, Instant::now(), None);
    state.lock().controller = Some(near.handle());
    let keeping = Keeping {
        settings: settings.clone(),
        chain,
        keeper,
        handle: near.handle(),
        since: Instant::now(),
        pause: FIRST_PAUSE,
        reconnected: None,
    };
    std::thread::Builder::new()
        .name(format!("keep-{}", settings.device))
        .spawn(move || keeping.run())
        .map_err(WorkError::System)?;
    Ok(Leased {
        client,
        lease,
        remote: Remote { _near: near, state },
    })
}

/// Borrows the medium; with a chain, the lease goes on.
fn lend(
    settings: &Settings,
    client: Client,
    resumes: Option<Secret>,
) -> Result<(MediumLease, Link), CallError> {
    let keep = settings.lost_after;
    let (lease, channel) = client.borrow_medium(&settings.device, keep, resumes)?;
    let (socket, secrets) = channel.into_link(SEND_TIMEOUT)?;
    let link = Link::new(socket, secrets.as_ref());
    let link = link.map_err(|error| CallError::Unexpected(Chain(&error).to_string()))?;
    Ok((lease, link))
}

/// Keeps a medium connected, on its own thread.
struct Keeping {
    settings: Settings,
    chain: Secret,
    keeper: MediumKeeper,
    handle: Handle,
    /// Since when I/O waits.
    since: Instant,
    /// The next pause between two attempts.
    pause: Duration,
    /// When the current connection was made, if it is not the first.
    reconnected: Option<Instant>,
}

impl Keeping {
    /// Until the controller has ended.
    fn run(mut self) {
        while let Ok(notice) = self.keeper.notices.recv() {
            match notice {
                Notice::Release(limit) => self.handle.release(limit),
                Notice::Lost { error, went_on } => {
                    let error = Chain(&error).to_string();
                    if went_on || self.reconnected.is_none_or(|at| at.elapsed() >= STABLE) {
                        (self.since, self.pause) = (Instant::now(), FIRST_PAUSE);
                    }
                    log::warn!(
                        "{}: the connection to lender {} is lost ({error}): I/O waits for up to {:?}",
                        self.name(),
                        self.settings.lender,
                        self.settings.lost_after
                    );
                    let state = &self.settings.network;
                    state.set(ConnectionState::Waiting, self.since, Some(error));
                    if !self.reconnect() {
                        return;
                    }
                }
            }
        }
    }

    /// Connects anew, or gives the device up. Returns false when the controller has ended.
    fn reconnect(&mut self) -> bool {
        loop {
            let error = match self.connect() {
                Ok((link, size)) => {
                    let now = Instant::now();
                    self.reconnected = Some(now);
                    let state = &self.settings.network;
                    state.set(ConnectionState::Connected, now, None);
                    log::info!(
                        "{}: connected again after {:.1?}: I/O goes on",
                        self.name(),
                        self.since.elapsed()
                    );
                    return self.keeper.supply(Supply::Link(Box::new(link), size));
                }
                Err(error) => error,
            };
            let ended = error.refusal().is_some_and(is_final);
            let text = Chain(&error).to_string();
            if ended || self.since.elapsed() >= self.settings.lost_after {
                return self.give_up(text);
            }
            log::debug!("{}: {text}", self.name());
            self.settings.network.retried(text);
            match self.keeper.notices.recv_timeout(self.pause) {
                Err(mpsc::RecvTimeoutError::Disconnected) => return false,
                // Of the connection before.
                Ok(_) | Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The next connection, and the bytes of the medium.
    fn connect(&self) -> Result<(Link, u64), WorkError> {
        let Settings {
            vm, lender, dialer, ..
        } = &self.settings;
        let deadline = Some(Instant::now() + CONNECT_TIMEOUT);
        let mut client = Client::connect_through(dialer, lender, Some(vm), deadline)?;
        client.set_fence(self.settings.fence()?);
        let (medium, link) = lend(&self.settings, client, Some(self.chain))?;
        Ok((link, medium.size))
    }

    /// Has the guest release the device, whose I/O fails from now on.
    fn give_up(&self, error: String) -> bool {
        log::error!(
            "{}: giving the device up, {:.0?} after its connection was lost ({error}): the guest is asked to release it",
            self.name(),
            self.since.elapsed()
        );
        let state = &self.settings.network;
        state.set(ConnectionState::GivenUp, Instant::now(), Some(error));
        self.handle.release(RELEASE_LIMIT);
        self.keeper.supply(Supply::GivenUp)
    }

    fn name(&self) -> String {
        format!("device {} (VM {})", self.settings.device, self.settings.vm)
    }
}

/// Whether a refusal stays: asking again does not help.
pub(crate) fn is_final(kind: ErrorKind) -> bool {
    match kind {
        ErrorKind::ChainEnded
        | ErrorKind::UnknownDevice
        | ErrorKind::Fenced
        | ErrorKind::Version
        | ErrorKind::Denied => true,
        ErrorKind::Busy
        | ErrorKind::StaleGeneration
        | ErrorKind::Limit
        | ErrorKind::Invalid
        | ErrorKind::Internal => false,
    }
}
