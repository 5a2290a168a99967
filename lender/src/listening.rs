//! The lender's listeners, and their access rules.
//!
//! A UNIX socket is accessible to this user only, and to every user if a device's borrowers include
//! another one: the peer's credentials then decide. At a TCP port with TLS the peer's certificate does.
//! One without TLS has neither encryption nor authentication, so it is at a loopback address, unless
//! the configuration explicitly allows others.

use std::{
    collections::{BTreeSet, HashMap},
    fs::{Permissions, metadata, set_permissions},
    io,
    net::{SocketAddr, ToSocketAddrs},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use farside_daemon::{Activated, RateLimit, SocketKind, VmName, paths};
use farside_lender_protocol::{Address, Channel, Identity, LimitUse, Listener, Resource};
use farside_pki::{Renewed, Side};

use crate::{
    config::{Borrower, Config},
    server::StartError,
};

/// Maximum number of peers without a lease. Per listener, so that a flood on a TCP port does not
/// lock out this host. Bounds threads.
const MAX_PEERS: usize = 256;

/// How many of these may belong to one user other than root and the lender's own, or to backends of
/// one VM of these two, so that none locks out the others.
const MAX_PEERS_OF_ONE: usize = 64;

/// How many more peers root and the lender's own user may have.
const MAX_OPERATORS: usize = 64;

/// Limits the log lines that peers without a lease cause. Per listener, so that a flood on a TCP
/// port does not suppress lines about this host's peers.
#[derive(Default)]
pub(crate) struct PeerLines {
    /// A connection exceeded the limit, or its thread could not be created.
    pub(crate) refused: RateLimit,
    /// A peer did not send Hello.
    pub(crate) silent: RateLimit,
    /// A peer without a lease did not send a request.
    pub(crate) idle: RateLimit,
    /// A connection failed, or its peer violated the protocol.
    pub(crate) broken: RateLimit,
    /// A peer sent an invalid token.
    pub(crate) token: RateLimit,
    /// A device was handed over.
    pub(crate) handover: RateLimit,
}

/// The shared state of one listener's peers.
#[derive(Default)]
struct Peers {
    connected: AtomicUsize,
    /// Users that a rule names.
    named: BTreeSet<u32>,
    of: Mutex<HashMap<Owner, usize>>,
    lines: PeerLines,
}

/// Whose peers have a limit together.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Owner {
    /// A user that a rule names, by uid.
    User(u32),
    /// All other users, but for root and the lender's own. They are served for the text of their
    /// refusal. (One user may have many uids, `subuid(5)`.)
    Unnamed,
    /// The backends of a VM, of root or the lender's own user.
    Vm(VmName),
}

impl Peers {
    fn of(&self) -> MutexGuard<'_, HashMap<Owner, usize>> {
        // A panic cannot leave a count half changed.
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, owner: &Owner) -> Result<(), String> {
        let mut of = self.of();
        let count = of.entry(owner.clone()).or_default();
        if *count >= MAX_PEERS_OF_ONE {
            return Err(match owner {
                Owner::User(_) | Owner::Unnamed => format!("{MAX_PEERS_OF_ONE} peers of its user"),
                Owner::Vm(vm) => format!("{MAX_PEERS_OF_ONE} peers of VM {vm}"),
            });
        }
        *count += 1;
        Ok(())
    }
}

/// The number of a listener's peers.
pub(crate) struct PeerCount(Arc<Peers>);

impl PeerCount {
    /// How many of them there may be.
    pub(crate) fn in_use(&self) -> LimitUse {
        let connected = self.0.connected.load(Ordering::Relaxed);
        LimitUse::new(Resource::Peers, connected as u64, MAX_PEERS as u64)
    }
}

/// A listener of the lender.
pub(crate) struct PeerListener {
    listener: Listener,
    peers: Arc<Peers>,
}

impl PeerListener {
    /// Opens the listeners in `config`, and takes those of the service manager.
    pub(crate) fn open_all(
        config: &Config,
        mut activated: Activated,
    ) -> Result<Vec<Self>, StartError> {
        let existing = existing_above(&config.socket);
        let socket = open_socket(&config.socket, &mut activated)?;
        let mut listeners = vec![Self::new(socket, named(config))];
        admit_borrowers(config, &existing)?;
        let ports = activated.take_ports();
        let mut certificates = Certificates::new(config);
        for address in &config.listen {
            if !ports.iter().any(|(_, at)| is_there(*at, address)) {
                let port = open_port(address, &mut certificates, config.listen_plain)?;
                listeners.push(Self::new(port, BTreeSet::new()));
            }
        }
        for (socket, at) in ports {
            let listed = config.listen.iter().find(|listed| is_there(at, listed));
            let tls = match listed {
                Some(listed) => matches!(listed, Address::Tls { .. }),
                None => config.tls.is_some(),
            };
            let tls = tls.then(|| certificates.load()).transpose()?;
            let listener = Listener::adopt_tcp(socket, at, tls);
            let address = listener.address();
            let port = checked(listener, &address, config.listen_plain)?;
            listeners.push(Self::new(port, BTreeSet::new()));
        }
        activated.finish(&format!(
            "what this lender listens at ({}, and TCP ports)",
            config.socket.display()
        ))?;
        Ok(listeners)
    }

    fn new(listener: Listener, named: BTreeSet<u32>) -> Self {
        let peers = Peers {
            named,
            ..Peers::default()
        };
        Self {
            listener,
            peers: Arc::new(peers),
        }
    }

    /// A handle on the number of its peers.
    pub(crate) fn count(&self) -> PeerCount {
        PeerCount(Arc::clone(&self.peers))
    }

    /// The listener's address.
    pub(crate) fn address(&self) -> Address {
        self.listener.address()
    }

    /// Accepts the next peer, if any, with a guard that counts it. Closes connections above the
    /// limits.
    pub(crate) fn accept(&self) -> io::Result<Option<(Channel, Counted)>> {
        while let Some(channel) = self.listener.accept()? {
            // A TCP peer is counted before it is known: its handshake takes a thread.
            let user = match channel.is_tcp() {
                true => None,
                false => match channel.identity()? {
                    Identity::User { uid, .. } => Some(uid),
                    Identity::Host { .. } | Identity::Network { .. } => None,
                },
            };
            let limit = match Counted::new(&self.peers, user) {
                Ok(counted) => return Ok(Some((channel, counted))),
                Err(limit) => limit,
            };
            if let Some(held_back) = self.peers.lines.refused.allow() {
                log::warn!(
                    "refusing a connection of {}: {limit} are connected to {} already{held_back}",
                    channel.peer(),
                    self.address()
                );
            }
        }
        Ok(None)
    }
}

impl AsFd for PeerListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Opens the UNIX socket for this host.
fn open_socket(path: &Path, activated: &mut Activated) -> Result<Listener, StartError> {
    if let Some(socket) = activated.take_path(path, SocketKind::SeqPacket)? {
        return Ok(socket.into());
    }
    if let Some(directory) = path.parent() {
        paths::create_directory(directory).map_err(|source| StartError::Directory {
            path: directory.to_owned(),
            source,
        })?;
    }
    Listener::bind(path).map_err(StartError::Listen)
}

/// The lowest directory above `path` that exists.
fn existing_above(path: &Path) -> PathBuf {
    let above = path.ancestors().skip(1);
    let existing = above.filter(|directory| directory.exists());
    existing.map(Path::to_owned).next().unwrap_or_default()
}

/// Lets every user connect to the socket if `borrowers` names a user who otherwise could not. Opens
/// directories that this process created, below `existing`, and the runtime directory, alone: others
/// may hold more than farside's sockets.
fn admit_borrowers(config: &Config, existing: &Path) -> Result<(), StartError> {
    // A member of the directory's group has the rights of the group alone.
    const SEARCH: u32 = 0o011;

    let path = &config.socket;
    let failed = |path: &Path, source| StartError::Admit {
        path: path.to_owned(),
        source,
    };
    let owner = metadata(path).map_err(|source| failed(path, source))?.uid();
    let known = [0, rustix::process::geteuid().as_raw(), owner];
    if named(config).iter().all(|uid| known.contains(uid)) {
        return Ok(());
    }
    const EVERY_USER: u32 = 0o666;
    // A socket of the service manager's may be another user's, who set its mode.
    if metadata(path)
        .map_err(|source| failed(path, source))?
        .mode()
        & EVERY_USER
        != EVERY_USER
    {
        let mode = Permissions::from_mode(EVERY_USER);
        set_permissions(path, mode).map_err(|source| failed(path, source))?;
    }
    let runtime = paths::runtime_dir();
    for directory in path.ancestors().skip(1) {
        // Of a relative path.
        if directory.as_os_str().is_empty() {
            break;
        }
        let created = directory != existing && directory.starts_with(existing);
        if created || directory.starts_with(&runtime) {
            paths::make_searchable(directory).map_err(|source| failed(directory, source))?;
        }
        let meta = metadata(directory).map_err(|source| failed(directory, source))?;
        let mode = meta.mode() & 0o7777;
        if mode & SEARCH != SEARCH {
            return Err(StartError::Unreachable {
                socket: path.clone(),
                directory: directory.to_owned(),
                mode,
            });
        }
    }
    Ok(())
}

/// The users that a rule names.
pub(crate) fn named(config: &Config) -> BTreeSet<u32> {
    let rules = config.device.iter().flat_map(|device| &device.borrowers);
    let uid = |rule: &Borrower| match rule {
        Borrower::User { uid, .. } => Some(*uid),
        Borrower::Host { .. } | Borrower::Network => None,
    };
    rules.filter_map(uid).collect()
}

/// This host's certificates, loaded when the first listener needs them.
struct Certificates {
    directory: PathBuf,
    loaded: Option<Arc<Renewed>>,
}

impl Certificates {
    fn new(config: &Config) -> Self {
        let directory = config.tls.as_ref().and_then(|tls| tls.directory.clone());
        Self {
            directory: directory.unwrap_or_else(paths::pki_dir),
            loaded: None,
        }
    }

    fn load(&mut self) -> Result<Arc<Renewed>, StartError> {
        if let Some(loaded) = &self.loaded {
            return Ok(Arc::clone(loaded));
        }
        let loaded = Arc::new(Renewed::load(&self.directory, Side::Server)?);
        Ok(Arc::clone(self.loaded.insert(loaded)))
    }
}

fn open_port(
    address: &Address,
    certificates: &mut Certificates,
    plain: bool,
) -> Result<Listener, StartError> {
    let (host, port, tls) = match address {
        Address::Tls { host, port } => (host, *port, Some(certificates.load()?)),
        Address::Tcp { host, port } => (host, *port, None),
        Address::Unix(_) => return Err(StartError::NotTcp(address.clone())),
    };
    let listener = Listener::bind_tcp(host, port, tls).map_err(StartError::ListenTcp)?;
    checked(listener, address, plain)
}

/// Whether a socket that listens at `at` is the listener for `address`.
fn is_there(at: SocketAddr, address: &Address) -> bool {
    match address {
        Address::Tcp { host, port } | Address::Tls { host, port } => {
            let resolved = (host.as_str(), *port).to_socket_addrs();
            resolved.is_ok_and(|mut resolved| resolved.any(|one| one == at))
        }
        Address::Unix(_) => false,
    }
}

/// Checks that a listener without TLS is reachable only by this host, unless `plain` allows others.
/// Errors name it as `address`.
fn checked(listener: Listener, address: &Address, plain: bool) -> Result<Listener, StartError> {
    let Some(ip) = listener.plain_ip() else {
        return Ok(listener);
    };
    // The kernel sends to the IPv4 address in an IPv4-mapped one.
    if ip.to_canonical().is_loopback() {
        return Ok(listener);
    }
    if !plain {
        return Err(StartError::Plain(address.clone()));
    }
    log::warn!(
        "{}: every host that reaches this address can borrow the devices with `borrowers = [\"network\"]`, and the connection is not encrypted: use a network that carries nothing else, or tls:HOST:PORT",
        listener.address()
    );
    Ok(listener)
}

/// A guard that counts a connected peer.
pub(crate) struct Counted {
    peers: Arc<Peers>,
    /// It is root, or the lender's own user.
    is_own: bool,
    /// Set if the owner has a limit.
    owner: OnceLock<Owner>,
}

impl Counted {
    /// Counts a peer, or fails with the limit that is reached.
    /// `user` is that of a local peer.
    fn new(peers: &Arc<Peers>, user: Option<u32>) -> Result<Self, String> {
        let own = [0, rustix::process::geteuid().as_raw()];
        let is_own = user.is_some_and(|uid| own.contains(&uid));
        let most = match is_own {
            true => MAX_PEERS + MAX_OPERATORS,
            false => MAX_PEERS,
        };
        let owner = user
            .filter(|_| !is_own)
            .map(|uid| match peers.named.contains(&uid) {
                true => Owner::User(uid),
                false => Owner::Unnamed,
            });
        if peers.connected.load(Ordering::Relaxed) >= most {
            return Err(format!("{most} peers"));
        }
        if let Some(owner) = &owner {
            peers.take(owner)?;
        }
        peers.connected.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            peers: Arc::clone(peers),
            is_own,
            owner: owner.map_or_else(OnceLock::new, OnceLock::from),
        })
    }

    /// Counts the peer as one of the VM that its Hello names, or fails with the limit that is reached.
    /// The places that only root and the lender's own user have are not for VMs.
    pub(crate) fn name(&self, vm: &VmName) -> Result<(), String> {
        if !self.is_own || self.owner.get().is_some() {
            return Ok(());
        }
        if self.peers.connected.load(Ordering::Relaxed) > MAX_PEERS {
            return Err(format!("{MAX_PEERS} peers"));
        }
        let owner = Owner::Vm(vm.clone());
        self.peers.take(&owner)?;
        // Only this thread sets it.
        let _ = self.owner.set(owner);
        Ok(())
    }

    /// The rate limits of log lines about the listener's peers.
    pub(crate) fn lines(&self) -> &PeerLines {
        &self.peers.lines
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.peers.connected.fetch_sub(1, Ordering::Relaxed);
        if let Some(owner) = self.owner.get() {
            let mut of = self.peers.of();
            if let Some(count) = of.get_mut(owner).filter(|count| **count > 1) {
                *count -= 1;
            } else {
                of.remove(owner);
            }
        }
    }
}
