//! What outlives the broker: its ends of the channels to the workers, and what it knows of their leases.
//!
//! A keeper is a process that holds a duplicate of each of these descriptors, and reads none of them. When
//! the broker dies, the workers do not notice: nothing is closed, and what they send waits. The next
//! broker connects to the keeper and goes on where the former one was.
//!
//! ```text
//!   broker ──── orders, calls, log ────▶ workers
//!     │  Keep, Update, Forget             ▲
//!     └────────▶ keeper ──── duplicates ──┘
//!                  ▲
//!   next broker ───┘  Take
//! ```
//!
//! The keeper's socket is in a directory that only the lender's user can search, both ends compare that
//! user with the other's, and a keeper whose broker lives refuses others.

mod look;
mod process;

use std::{
    collections::BTreeMap,
    fs, io, mem,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use farside_daemon::{OwnedListener, SocketKind, Wakeup, paths, peer_credentials};
use farside_error_chain::Chain;
use farside_hand_over::{Format, Unreadable};
use farside_lender_protocol::{Address, Channel, ChannelError, MAX_DEVICES};
use serde::{Deserialize, Serialize};

pub use look::{KeptLeases, LeaseFormat, look};
pub use process::{KeeperError, run};

use crate::worker::Program;

/// Of the messages between brokers, workers and keepers, and of [`crate::worker::KeptLease`]: raise it with
/// each change of one of them (docs/hand-over-state.md).
///
/// | version | new in it |
/// | --- | --- |
/// | 2 | records of leases have their version beside them; keepers show their version of farside, and their leases; virtio-blk and virtio-net models; functions can be adopted by the next worker; devices of vfio-user servers |
pub(crate) const VERSION: u32 = 2;

/// The format of leases, and of the messages of their workers.
pub const LEASES: Format = Format::new("its lease", VERSION);

/// The format of a keeper's messages.
const KEEPER: Format = Format::new("what keeps them", VERSION);

/// Timeout for each message between a broker and its keeper.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for a keeper to end its workers. Longer than a worker's end may take.
const END_TIMEOUT: Duration = Duration::from_secs(6);

/// So many starts of a keeper in [`SOON`] are too many.
const MOST_STARTS: usize = 20;
const SOON: Duration = Duration::from_secs(10);

/// Most descriptors of a lease.
const MAX_FDS: usize = 8;

/// A broker's message to its keeper.
#[derive(Debug, Serialize, Deserialize)]
enum ToKeeper {
    /// End: every worker ends its lease in order, or is killed. First, as all versions have it.
    End,
    /// Send the leases: this broker goes on with them.
    Take,
    /// Listen for the next broker. Comes with the socket.
    Listen,
    /// Keep a lease, or replace it. Comes with its descriptors, the first of which is the worker's pidfd.
    Keep {
        id: u64,
        lease: Vec<u8>,
        /// How many of the last descriptors are closed when the worker ends without a broker.
        with_worker: usize,
    },
    /// The lease has changed; its descriptors are the same.
    Update { id: u64, lease: Vec<u8> },
    /// The lease has ended.
    Forget { id: u64 },
    /// Send the leases without their descriptors. Since version 2; root may send it, too, and while there is a broker.
    Look,
}

/// A keeper's first message, of which all versions have the beginning.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    version: u32,
    /// Its broker lives.
    busy: bool,
    /// Its version of farside. Empty before version 2.
    farside: String,
}

/// A keeper's message to a broker that takes the leases.
#[derive(Debug, Serialize, Deserialize)]
enum FromKeeper {
    /// A lease, with its descriptors. Those that are closed when a worker ends are missing if it has.
    Lease { id: u64, lease: Vec<u8> },
    /// That were all.
    Done,
}

/// A lease that was kept, and its descriptors.
pub(crate) struct Found {
    pub(crate) id: u64,
    pub(crate) lease: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// Descriptors that the next broker needs in any case: the worker's process, its channels and its log.
const NEEDED: usize = 4;

impl Found {
    /// How many of the descriptors are of use to the worker alone: those of a model beyond the first.
    fn with_worker(&self) -> usize {
        match crate::worker::needs_broker(&self.lease) {
            true => 0,
            false => self.fds.len().saturating_sub(NEEDED),
        }
    }
}

fn duplicates<'a>(fds: impl Iterator<Item = BorrowedFd<'a>>) -> io::Result<Vec<OwnedFd>> {
    fds.map(|fd| fd.try_clone_to_owned()).collect()
}

/// Why the leases of a former broker are not taken.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// An eventfd cannot be created.
    #[error("cannot watch what keeps leases")]
    System(#[source] io::Error),
    /// It lives.
    #[error(
        "another lender has these devices and lives: stop it, or name another socket (--socket)"
    )]
    Busy,
    /// There is something else than a keeper.
    #[error(
        "{path} is not the keeper of a former lender of this user: remove it",
        path = path.display()
    )]
    Foreign {
        /// Its socket.
        path: PathBuf,
        /// What has failed; without, it is another user's.
        source: Option<ChannelError>,
    },
    /// They have a format that this lender does not read. They go on without one.
    #[error(
        "the leases of the former lender go on without one: {what}{why}: install {remedy} and start the lender again, or end them by stopping their VMs",
        remedy = why.remedy()
    )]
    Unreadable {
        /// The lease's device and VM, as a prefix, unless it is the keeper.
        what: String,
        /// Its version, and those that are read.
        why: Unreadable,
    },
}

/// The broker's side of its keeper, which is started with the first lease, and again when it has ended.
#[derive(Debug)]
pub(crate) struct Keeper {
    /// Without one nothing is kept.
    program: Option<Program>,
    path: PathBuf,
    state: Mutex<State>,
    /// Raised when [`Keeper::watched`] is another one.
    started: Wakeup,
}

#[derive(Debug)]
struct State {
    channel: Option<Channel>,
    /// The process, unless a former broker has started it.
    process: Option<Child>,
    next: u64,
    /// What the keeper has, for the next one.
    leases: BTreeMap<u64, Kept>,
    starts: Vec<Instant>,
    /// One has ended, and no other one was started.
    is_lost: bool,
}

#[derive(Debug)]
struct Kept {
    lease: Vec<u8>,
    fds: Vec<OwnedFd>,
    with_worker: usize,
}

impl Kept {
    fn message(&self, id: u64) -> ToKeeper {
        ToKeeper::Keep {
            id,
            lease: self.lease.clone(),
            with_worker: self.with_worker,
        }
    }

    fn send(&self, id: u64, channel: &mut Channel) -> Result<(), ChannelError> {
        let fds: Vec<_> = self.fds.iter().map(AsFd::as_fd).collect();
        channel.send(&self.message(id), &fds, TIMEOUT)
    }
}

impl Keeper {
    /// The keeper of the lender that listens at `socket`, with the leases of its former broker.
    ///
    /// # Errors
    /// [`TakeError::Busy`] and [`TakeError::Unreadable`]. Anything else is logged.
    pub(crate) fn find(
        socket: &Path,
        program: Option<Program>,
    ) -> Result<(Self, Vec<Found>), TakeError> {
        let started = Wakeup::new().map_err(TakeError::System)?;
        let path = path(socket);
        let program = program.filter(|program| program.keeper.is_some());
        let (mut channel, mut found) = (None, Vec::new());
        if program.is_some() {
            match take(&path) {
                Ok(Some((keeper, leases))) => (channel, found) = (Some(keeper), leases),
                Ok(None) => {}
                Err(error @ (TakeError::Busy | TakeError::Unreadable { .. })) => return Err(error),
                Err(error) => log::error!("no lease is adopted: {}", Chain(&error)),
            }
        }
        let next = found.iter().map(|lease| lease.id + 1).max();
        let leases = found.iter().filter_map(|found| {
            let kept = Kept {
                lease: found.lease.clone(),
                fds: duplicates(found.fds.iter().map(AsFd::as_fd)).ok()?,
                with_worker: found.with_worker(),
            };
            Some((found.id, kept))
        });
        let state = State {
            channel,
            process: None,
            next: next.unwrap_or_default(),
            leases: leases.collect(),
            starts: Vec::new(),
            is_lost: false,
        };
        let keeper = Self {
            program,
            path,
            state: Mutex::new(state),
            started,
        };
        Ok((keeper, found))
    }

    /// Keeps a lease with these descriptors, of which the last `with_worker` are of use to its worker alone.
    /// Returns its number.
    pub(crate) fn keep(
        &self,
        lease: &impl Serialize,
        fds: &[BorrowedFd<'_>],
        with_worker: usize,
    ) -> Option<u64> {
        self.program.as_ref()?;
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        let is_kept = self.insert(&mut state, id, lease, fds, with_worker);
        if !is_kept {
            state.leases.remove(&id);
        }
        is_kept.then_some(id)
    }

    /// Replaces a lease and its descriptors, all of which the next broker needs.
    pub(crate) fn replace(&self, id: u64, lease: &impl Serialize, fds: &[BorrowedFd<'_>]) {
        self.insert(&mut self.lock(), id, lease, fds, 0);
    }

    fn insert(
        &self,
        state: &mut State,
        id: u64,
        lease: &impl Serialize,
        fds: &[BorrowedFd<'_>],
        with_worker: usize,
    ) -> bool {
        let kept = (|| {
            Ok::<_, io::Error>(Kept {
                lease: serde_json::to_vec(lease)?,
                fds: duplicates(fds.iter().copied())?,
                with_worker,
            })
        })();
        let message = match kept {
            Ok(kept) => {
                let message = kept.message(id);
                state.leases.insert(id, kept);
                message
            }
            Err(error) => {
                log::warn!("a lease ends with this process: {}", Chain(&error));
                return false;
            }
        };
        match state.channel {
            Some(_) => self.send(state, &message, fds),
            None => self.renew(state),
        }
    }

    /// Replaces what is known of a lease.
    pub(crate) fn update(&self, id: u64, lease: &impl Serialize) {
        let mut state = self.lock();
        let lease = match serde_json::to_vec(lease) {
            Ok(lease) => lease,
            Err(error) => return log::warn!("a lease ends with this process: {}", Chain(&error)),
        };
        if let Some(kept) = state.leases.get_mut(&id) {
            kept.lease.clone_from(&lease);
        }
        self.send(&mut state, &ToKeeper::Update { id, lease }, &[]);
    }

    /// Forgets a lease, and closes its descriptors.
    pub(crate) fn forget(&self, id: u64) {
        let mut state = self.lock();
        state.leases.remove(&id);
        self.send(&mut state, &ToKeeper::Forget { id }, &[]);
    }

    /// The lender ends, in order. What is left are leases whose threads have not ended in time: no other lender finds them.
    pub(crate) fn close(&self) {
        let left: Vec<u64> = self.lock().leases.keys().copied().collect();
        for lease in left {
            self.forget(lease);
        }
        if self.lock().channel.take().is_some() {
            remove(&self.path);
        }
    }

    /// What is to be polled, for [`Keeper::look_after`]: the keeper's socket, if there is one.
    pub(crate) fn watched(&self) -> (&Wakeup, Option<OwnedFd>) {
        let state = self.lock();
        let socket = state.channel.as_ref().map(AsFd::as_fd);
        let socket = socket.and_then(|socket| socket.try_clone_to_owned().ok());
        (&self.started, socket)
    }

    /// Starts another keeper if it has ended.
    pub(crate) fn look_after(&self) {
        self.started.lower();
        let mut state = self.lock();
        // It sends nothing to a broker that has taken the leases.
        let ended = match &mut state.channel {
            Some(channel) => match channel.try_receive::<()>() {
                Ok(None) => return,
                Ok(Some(_)) => ChannelError::Closed,
                Err(error) => error,
            },
            None => return,
        };
        self.lose(&mut state, &ended);
        self.renew(&mut state);
    }

    fn send(&self, state: &mut State, message: &ToKeeper, fds: &[BorrowedFd<'_>]) -> bool {
        let Some(channel) = &mut state.channel else {
            return false;
        };
        match channel.send(message, fds, TIMEOUT) {
            Ok(()) => true,
            Err(error @ ChannelError::TooLarge { .. }) => {
                log::warn!("a lease ends with this process: {}", Chain(&error));
                false
            }
            Err(error) => {
                self.lose(state, &error);
                self.renew(state)
            }
        }
    }

    /// The keeper is gone.
    fn lose(&self, state: &mut State, error: &ChannelError) {
        log::error!("what keeps the leases is gone: {}", Chain(error));
        state.channel = None;
        state.is_lost = true;
        if let Some(mut process) = state.process.take() {
            // Fails if it has ended.
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Starts a keeper, which gets all leases. Returns whether it has them.
    fn renew(&self, state: &mut State) -> bool {
        let (Some(program), false) = (&self.program, state.leases.is_empty()) else {
            return false;
        };
        let now = Instant::now();
        state
            .starts
            .retain(|start| now.duration_since(*start) < SOON);
        state.starts.push(now);
        let failed = |error: &dyn std::error::Error| {
            log::error!(
                "{} leases end with this process, unless another keeper is started with the next one: cannot keep them at {}: {}",
                state.leases.len(),
                self.path.display(),
                Chain(error)
            );
            false
        };
        if state.starts.len() > MOST_STARTS {
            return failed(&io::Error::other(format!(
                "it has ended {MOST_STARTS} times within {SOON:?}"
            )));
        }
        let (mut channel, process) = match self.start(program) {
            Ok(started) => started,
            Err(error) => return failed(&*error),
        };
        for (id, kept) in &state.leases {
            match kept.send(*id, &mut channel) {
                Ok(()) => {}
                Err(error @ ChannelError::TooLarge { .. }) => {
                    log::warn!("a lease ends with this process: {}", Chain(&error));
                }
                Err(error) => return failed(&error),
            }
        }
        if std::mem::take(&mut state.is_lost) {
            log::info!("another process keeps {} leases", state.leases.len());
        }
        (state.channel, state.process) = (Some(channel), Some(process));
        self.started.raise();
        true
    }

    fn start(&self, program: &Program) -> Result<(Channel, Child), Box<dyn std::error::Error>> {
        let directory = self.path.parent().unwrap_or(Path::new(""));
        paths::create_directory(directory)?;
        let listener = OwnedListener::bind(&self.path, SocketKind::SeqPacket, 4)?;
        let (ours, theirs) = Channel::pair()?;
        let mut ours = ours.appendable();
        let process = program
            .command()
            .args(&program.keeper)
            .stdin(Stdio::from(theirs.into_socket()))
            .stderr(Stdio::null())
            .spawn()?;
        ours.send(&ToKeeper::Listen, &[listener.as_fd()], TIMEOUT)?;
        listener.disown();
        Ok((ours, process))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic leaves at most a lease that is not kept.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of the keeper of the lender that listens at `socket`.
fn path(socket: &Path) -> PathBuf {
    socket.with_extension("keeper").join("socket")
}

fn remove(path: &Path) {
    // Fails if another lender has replaced it.
    let _ = fs::remove_file(path);
    let _ = path.parent().map(fs::remove_dir);
}

/// The keeper at `path` and its leases, if there is one.
fn take(path: &Path) -> Result<Option<(Channel, Vec<Found>)>, TakeError> {
    let foreign = |source| TakeError::Foreign {
        path: path.to_owned(),
        source,
    };
    match path.parent().map(fs::symlink_metadata) {
        Some(Ok(directory)) if is_private(&directory) => {}
        Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        _ => return Err(foreign(None)),
    }
    let address = Address::Unix(path.to_owned());
    let mut channel = match Channel::connect(&address, Path::new(""), TIMEOUT) {
        Ok(channel) => channel.appendable(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            // Its last lease has ended.
            remove(path);
            return Ok(None);
        }
        Err(error) => return Err(foreign(Some(error.into()))),
    };
    if !is_own(&channel) {
        return Err(foreign(None));
    }
    let received = channel.receive::<Hello>(TIMEOUT);
    let (hello, _) = received.map_err(|error| foreign(Some(error)))?;
    if hello.busy {
        return Err(TakeError::Busy);
    }
    // It goes on waiting for another broker.
    let checked = KEEPER.check(hello.version, Some(&hello.farside));
    checked.map_err(|why| TakeError::Unreadable {
        what: String::new(),
        why,
    })?;
    let mut found = Vec::new();
    let sent = channel.send(&ToKeeper::Take, &[], TIMEOUT);
    sent.map_err(|error| foreign(Some(error)))?;
    loop {
        let received = channel.receive::<FromKeeper>(TIMEOUT);
        match received.map_err(|error| foreign(Some(error)))? {
            (FromKeeper::Lease { id, lease }, fds) if found.len() < 2 * MAX_DEVICES => {
                found.push(Found { id, lease, fds });
            }
            _ => break,
        }
    }
    // Before any of them is changed: this connection closes, and they wait for another broker.
    for lease in &found {
        look::check(&lease.lease)?;
    }
    Ok(Some((channel, mem::take(&mut found))))
}

/// Whether this user alone can search a directory.
fn is_private(directory: &fs::Metadata) -> bool {
    let is_ours = directory.uid() == rustix::process::geteuid().as_raw();
    directory.is_dir() && is_ours && directory.mode() & 0o077 == 0
}

/// Whether the process at the other end is root's.
fn is_of_root(channel: &Channel) -> bool {
    peer_credentials(&channel.as_fd()).is_ok_and(|peer| peer.uid == 0)
}

/// Whether the process at the other end has this one's user.
fn is_own(channel: &Channel) -> bool {
    let peer = peer_credentials(&channel.as_fd());
    peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid().as_raw())
}

#[cfg(test)]
mod tests;
