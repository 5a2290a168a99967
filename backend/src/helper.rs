//! The helper process of a backend that confines itself: it does what the backend may not do any more,
//! for this VM alone. It finds lenders in etcd and by mDNS; opens connections to the VM's lenders and binds the VM's sockets, whose
//! descriptors it sends; opens this host's certificates; reads the VM's fences; unplugs a device that
//! its lender takes back; and removes the directory of the sockets at the end.
//!
//! A lender at a UNIX socket knows its peers by their user, who is often its operator. So the helper
//! exchanges Hello, which binds a connection to the VM, before it passes the connection on.
//!
//! Each order has a channel of its own for its answer, so a slow one holds up no other.

use std::{
    collections::HashSet,
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, OwnedListener, RateLimit, SocketGroup, VmName, Wakeup};
use farside_discovery::Known;
use farside_error_chain::Chain;
use farside_lender_protocol::{
    Address, CallError, Channel, ChannelError, Client, Dial, Fences, Greeted, HeldFence,
    MAX_REVOKE_LIMIT, Target, dial,
};
use farside_pki::{CA_CERT, CA_CRL, Side};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::getpeername,
};

use found::Found;
use orders::{Answer, Order};
pub(crate) use orders::{Removed, Start};
use releases::Releases;

use crate::{
    links,
    sockets::{self, SocketName},
};

mod found;
mod orders;
mod releases;

/// Time limit for a message to be taken: neither process does anything else with the channel.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time limit of connecting, whatever the backend asks for.
const MAX_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for name resolution, beside that of connecting.
const RESOLUTION_TIMEOUT: Duration = Duration::from_secs(30);

/// Time limit for the helper's answer, beside that of connecting.
const CONNECTED_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit for an answer that depends on this host alone.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for the last answer, of the 5 s in which a backend ends.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval of a wait without a limit.
const IDLE: Duration = Duration::from_secs(3600);

/// Time limit for finding lenders: that of etcd, of resolving its members' names, and of mDNS.
const FIND_TIMEOUT: Duration = Duration::from_secs(15);

/// Maximum number of orders at a time; each has a thread.
const MAX_ORDERS: usize = 64;

/// The backend's end.
#[derive(Clone, Debug)]
pub struct Helper(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Locked for calls that do not block: the event loop has orders, too.
    orders: Mutex<Channel>,
    /// The channel's socket, to wait for it without the lock.
    socket: OwnedFd,
    /// Raised when the backend ends.
    stopping: Wakeup,
}

impl Helper {
    /// Starts `program`, which calls [`serve_backend`] with its standard input. It ends with this
    /// process.
    ///
    /// # Errors
    /// Those of starting it.
    pub fn start(mut program: Command) -> io::Result<Self> {
        let (ours, theirs) = Channel::pair()?;
        // `program` has the helper's end: kept, it would hide that the helper has ended.
        program
            .stdin(Stdio::from(theirs.into_socket()))
            .stdout(Stdio::null())
            .spawn()?;
        drop(program);
        Self::new(ours)
    }

    fn new(orders: Channel) -> io::Result<Self> {
        let socket = orders.as_fd().try_clone_to_owned()?;
        let orders = Mutex::new(orders);
        let stopping = Wakeup::new()?;
        let shared = Shared {
            orders,
            socket,
            stopping,
        };
        Ok(Self(Arc::new(shared)))
    }

    /// Ends the waits of all threads for the helper, which may be stopped: the backend ends.
    pub fn stop_waiting(&self) {
        self.0.stopping.raise();
    }

    /// Hangs up when the helper has ended.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.0.socket.as_fd()
    }

    pub(crate) fn configure(&self, start: Start) -> io::Result<()> {
        self.send(&Order::Start(start.into()), &[])
    }

    /// Unplugs a device from the VM, for up to `limit`. Does not wait: an order that the helper does
    /// not take now is lost, and logged.
    pub fn release(&self, device: &DeviceId, limit: Duration) {
        let order = Order::Release {
            device: device.clone(),
            limit,
        };
        if let Err(error) = self.post(&order, &[]) {
            log::error!(
                "device {device}: its guest is not asked to release it, and its lender takes it back without that within {limit:?}: {}",
                Chain(&error)
            );
        }
    }

    pub(crate) fn bind(&self, name: &SocketName) -> io::Result<OwnedFd> {
        self.open(&Order::Bind(name.clone()), ANSWER_TIMEOUT)
    }

    pub(crate) fn fence(&self, device: &DeviceId) -> io::Result<Option<HeldFence>> {
        match self.ask(&Order::Fence(device.clone()), ANSWER_TIMEOUT)? {
            (Answer::Fence(fence), _) => Ok(fence),
            _ => Err(unexpected()),
        }
    }

    /// The lenders that are found, to which connections are opened from now on.
    pub(crate) fn lenders(&self) -> io::Result<Known> {
        match self.ask(&Order::Lenders, FIND_TIMEOUT)? {
            (Answer::Lenders { now, before }, _) => Ok(Known { now, before }),
            _ => Err(unexpected()),
        }
    }

    /// Waits for a helper that is slow or stopped no longer than the end of a backend may take.
    pub(crate) fn remove(&self, what: Removed) -> io::Result<()> {
        let (mut ours, theirs) = Channel::pair()?;
        self.post(&Order::Remove(what), &[theirs])?;
        match (ours.receive(END_TIMEOUT).map_err(gone)?, what) {
            ((Answer::Failed { text, .. }, _), Removed::Links) => Err(io::Error::other(text)),
            // A directory may still hold what others have in it.
            _ => Ok(()),
        }
    }

    /// Links a device's socket for SPDK's clients.
    pub(crate) fn link(&self, device: &DeviceId) -> io::Result<()> {
        self.ask(&Order::Link(device.clone()), ANSWER_TIMEOUT)?;
        Ok(())
    }

    fn open(&self, order: &Order, timeout: Duration) -> io::Result<OwnedFd> {
        let (answer, fds) = self.ask(order, timeout)?;
        match (answer, fds.into_iter().next()) {
            (Answer::Opened, Some(fd)) => Ok(fd),
            _ => Err(unexpected()),
        }
    }

    fn ask(&self, order: &Order, timeout: Duration) -> io::Result<(Answer, Vec<OwnedFd>)> {
        let (mut ours, theirs) = Channel::pair()?;
        self.send(order, &[theirs])?;
        self.wait(&ours, PollFlags::IN, timeout)?;
        match ours.receive(Duration::ZERO).map_err(gone)? {
            (Answer::Failed { errno, text }, _) => Err(match errno {
                Some(errno) => io::Error::from_raw_os_error(errno),
                None => io::Error::other(text),
            }),
            answer => Ok(answer),
        }
    }

    /// Sends an order, now or not at all.
    fn post(&self, order: &Order, answer: &[Channel]) -> io::Result<()> {
        match self.try_send(order, answer)? {
            true => Ok(()),
            false => Err(io::Error::other(
                "the backend's helper process is stopped or slow: orders that it was sent before fill its queue",
            )),
        }
    }

    fn send(&self, order: &Order, answer: &[Channel]) -> io::Result<()> {
        let deadline = Instant::now() + SEND_TIMEOUT;
        while !self.try_send(order, answer)? {
            let left = deadline.saturating_duration_since(Instant::now());
            self.wait(&self.0.socket, PollFlags::OUT, left)?;
        }
        Ok(())
    }

    /// Waits until `socket` is ready. Fails after `timeout`, and when the backend ends.
    fn wait(&self, socket: &impl AsFd, flags: PollFlags, timeout: Duration) -> io::Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).unwrap_or_default();
            let stopping = PollFd::new(&self.0.stopping, PollFlags::IN);
            let mut fds = [PollFd::new(socket, flags), stopping];
            match poll(&mut fds, Some(&left)) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
                Ok(_) if !fds[1].revents().is_empty() => {
                    return Err(io::Error::other("the backend is stopping"));
                }
                Ok(0) => return Err(gone(ChannelError::TimedOut(timeout))),
                Ok(_) => return Ok(()),
            }
        }
    }

    fn try_send(&self, order: &Order, answer: &[Channel]) -> io::Result<bool> {
        // A message is sent as a whole or not at all.
        let mut orders = self.0.orders.lock().unwrap_or_else(PoisonError::into_inner);
        let fds: Vec<_> = answer.iter().map(AsFd::as_fd).collect();
        orders.try_send(order, &fds).map_err(gone)
    }
}

impl Dial for Helper {
    fn dial(&self, target: &Target, timeout: Duration) -> io::Result<OwnedFd> {
        let resolution = match target {
            Target::Tcp { .. } => RESOLUTION_TIMEOUT,
            Target::Unix(_) | Target::Peer(_) => Duration::ZERO,
        };
        let target = target.clone();
        let limit = timeout + resolution + CONNECTED_TIMEOUT;
        self.open(&Order::Connect { target, timeout }, limit)
    }

    fn certificate(&self, name: &str) -> io::Result<File> {
        let order = Order::Certificate(name.to_owned());
        self.open(&order, ANSWER_TIMEOUT).map(File::from)
    }

    fn greet(&self, lender: &Path, timeout: Duration) -> Result<Greeted, CallError> {
        let unreachable = |source| CallError::Unreachable {
            address: lender.to_owned().into(),
            source,
        };
        let order = Order::Greet {
            lender: lender.to_owned(),
            timeout,
        };
        let answered = self.ask(&order, timeout + CONNECTED_TIMEOUT);
        let (answer, fds) = answered.map_err(unreachable)?;
        match (answer, fds.into_iter().next()) {
            (Answer::Welcome { lender, instance }, Some(socket)) => Ok(Greeted {
                socket,
                lender,
                instance,
            }),
            (Answer::Refused(error), _) => Err(error.into()),
            (Answer::Late, _) => Err(CallError::Late(timeout)),
            _ => Err(unreachable(unexpected())),
        }
    }
}

fn gone(error: ChannelError) -> io::Error {
    io::Error::other(format!(
        "the backend's helper process does not answer: {}",
        Chain(&error)
    ))
}

fn unexpected() -> io::Error {
    io::Error::other("the backend's helper process has given the answer to another order")
}

/// Serves a backend through `socket` until it ends. `release` unplugs a device from the VM, within a
/// time limit.
///
/// # Errors
/// Those of the socket.
pub fn serve_backend(
    socket: OwnedFd,
    release: fn(&VmName, &DeviceId, Duration),
) -> Result<(), ChannelError> {
    let mut orders = Channel::from_socket(socket);
    let start = match orders.receive(IDLE) {
        Ok((Order::Start(start), _)) => *start,
        // The backend could not start.
        Err(ChannelError::Closed) => return Ok(()),
        other => return other.map(drop),
    };
    let server = Arc::new(Server {
        start,
        peers: Mutex::default(),
        found: Found::default(),
        release,
        releases: Releases::default(),
    });
    let refused = RateLimit::new();
    loop {
        let (order, fds) = match orders.receive::<Order>(IDLE) {
            Ok(received) => received,
            Err(ChannelError::TimedOut(_)) => continue,
            Err(ChannelError::Closed) => return Ok(()),
            Err(error) => return Err(error),
        };
        if Arc::strong_count(&server) > MAX_ORDERS {
            if let Some(held_back) = refused.allow() {
                log::warn!(
                    "the backend has more than {MAX_ORDERS} orders at a time: one is refused{held_back}"
                );
            }
            continue;
        }
        let server = Arc::clone(&server);
        let serve = move || server.serve(order, fds);
        if let Err(error) = std::thread::Builder::new()
            .name("order".into())
            .spawn(serve)
        {
            log::error!("no thread to serve the backend on: {error}");
        }
    }
}

struct Server {
    start: Start,
    /// The addresses of the lenders that were reached by name.
    peers: Mutex<HashSet<std::net::SocketAddr>>,
    found: Found,
    release: fn(&VmName, &DeviceId, Duration),
    releases: Releases,
}

impl Server {
    fn serve(&self, order: Order, fds: Vec<OwnedFd>) {
        let mut opened = None;
        let mut bound = None;
        let answer = match order {
            Order::Greet { lender, timeout } => Ok(match self.greet(&lender, timeout) {
                Ok(Greeted {
                    socket,
                    lender,
                    instance,
                }) => {
                    opened = Some(socket);
                    Answer::Welcome { lender, instance }
                }
                Err(error) => error.into(),
            }),
            Order::Connect { target, timeout } => self.connect(&target, timeout).map(|socket| {
                opened = Some(socket);
                Answer::Opened
            }),
            Order::Bind(name) => self.bind(&name).map(|listener| {
                bound = Some(listener);
                Answer::Opened
            }),
            Order::Certificate(name) => self.certificate(&name).map(|file| {
                opened = Some(file.into());
                Answer::Opened
            }),
            Order::Fence(device) => self.fence(&device).map(Answer::Fence),
            Order::Lenders => {
                let Known { now, before } = self.found.look(self.start.discovery.as_ref());
                Ok(Answer::Lenders { now, before })
            }
            Order::Release { device, limit } => {
                let release = |left| (self.release)(&self.start.vm, &device, left);
                let limit = limit.min(MAX_REVOKE_LIMIT);
                self.releases.run(&device, limit, release);
                Ok(Answer::Done)
            }
            Order::Remove(Removed::Directory) => {
                std::fs::remove_dir(&self.start.directory).map(|()| Answer::Done)
            }
            Order::Remove(Removed::Links) => {
                links::remove_all(&self.start.directory).map(|()| Answer::Done)
            }
            Order::Link(device) => self.link(&device).map(|()| Answer::Done),
            Order::Start(_) => Err(unexpected()),
        };
        // A release is not answered.
        let Some(socket) = fds.into_iter().next() else {
            return;
        };
        let fd = opened.as_ref().map(AsFd::as_fd);
        let fd = fd.or(bound.as_ref().map(AsFd::as_fd));
        let answer = answer.unwrap_or_else(Answer::from);
        let sent = Channel::from_socket(socket).send(&answer, fd.as_slice(), SEND_TIMEOUT);
        match (sent, bound) {
            (Ok(()), Some(bound)) => bound.disown(),
            (Ok(()), None) => {}
            // It has ended, or has given up waiting.
            (Err(error), _) => log::debug!("answer to the backend: {}", Chain(&error)),
        }
    }

    /// Connects to one of the VM's lenders, and binds the connection to the VM. Without that it would
    /// have the rights of this user, so it is not passed on.
    fn greet(&self, lender: &Path, timeout: Duration) -> Result<Greeted, CallError> {
        let address = Address::Unix(lender.to_owned());
        if !self.start.lenders.contains(&address) {
            let source = Errno::ACCESS.into();
            return Err(CallError::Unreachable { address, source });
        }
        let deadline = Instant::now() + timeout.min(MAX_CONNECT_TIMEOUT);
        // A UNIX socket takes no certificates.
        let pki = Path::new("");
        let client = Client::connect_by(&address, Some(&self.start.vm), pki, Some(deadline))?;
        client.into_greeted()
    }

    /// Connects to the VM's lenders at TCP ports alone.
    fn connect(&self, target: &Target, timeout: Duration) -> io::Result<OwnedFd> {
        let found = self.found.all();
        let mut lenders = self.start.lenders.iter().chain(&found);
        let peers = || self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let is_lender = match target {
            Target::Unix(_) => false,
            Target::Peer(address) => peers().contains(address),
            named => lenders.any(|lender| Target::from(lender) == *named),
        };
        if !is_lender {
            return Err(Errno::ACCESS.into());
        }
        let socket = dial(target, timeout.min(MAX_CONNECT_TIMEOUT))?;
        if let Target::Tcp { .. } = target
            && let Some(peer) = getpeername(&socket)?
            && let Ok(peer) = peer.try_into()
        {
            peers().insert(peer);
        }
        Ok(socket)
    }

    fn bind(&self, name: &SocketName) -> io::Result<OwnedListener> {
        let group = self.group()?;
        sockets::bind(&self.start.directory, group.as_ref(), name).map_err(io::Error::other)
    }

    fn link(&self, device: &DeviceId) -> io::Result<()> {
        let group = self.group()?;
        links::add(&self.start.directory, group.as_ref(), device).map_err(io::Error::other)
    }

    fn group(&self) -> io::Result<Option<SocketGroup>> {
        let group = self.start.socket_group.as_deref().map(SocketGroup::named);
        group.transpose().map_err(io::Error::other)
    }

    /// Opens a file of a client's certificates, and not the key of a CA beside them.
    fn certificate(&self, name: &str) -> io::Result<File> {
        let own = Side::Client.files();
        match [CA_CERT, CA_CRL, own.certificate, own.key].contains(&name) {
            true => File::open(self.start.pki.join(name)),
            false => Err(Errno::ACCESS.into()),
        }
    }

    fn fence(&self, device: &DeviceId) -> io::Result<Option<HeldFence>> {
        held_fence(self.start.fences.as_deref(), device)
    }
}

/// The fence for a device in the file at `fences`.
pub(crate) fn held_fence(
    fences: Option<&Path>,
    device: &DeviceId,
) -> io::Result<Option<HeldFence>> {
    let fences = fences.map_or_else(|| Ok(Fences::default()), Fences::load)?;
    Ok(fences.of(device))
}

#[cfg(test)]
mod tests;
