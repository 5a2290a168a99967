//! Starts and stops the lender: threads, devices.

mod devices;
mod threads;

use std::{io, sync::Arc, thread::JoinHandle, time::Duration};

use farside_daemon::{
    Activated, ActivationError, DeviceId, ListenError, RateLimit, VmName, Wakeup, raise_open_files,
};
use farside_discovery::{AnnounceError, MdnsError};
use farside_error_chain::Chain;
use farside_fabric::{LimitError, soft::Adapter};
use farside_host_pci::CreatedVfs;
use farside_lender_protocol::{Address, Channel};
use farside_ntb::HostEndpoint;
use farside_pki::PkiError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use crate::keeper::TakeError;
pub(crate) use devices::Devices;

use crate::{
    announced::Announced,
    config::{Config, ConfigError},
    connection::{self, About},
    device_loop::Stopped,
    fences::FenceBook,
    keeper::Keeper,
    listening::{Counted, PeerListener},
    open::open,
    registry::Registry,
    worker::{Adopted, Workers},
};

/// Pause after a failed accept, which limits the rate of log lines.
const ACCEPT_PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 500_000_000,
};

/// Timeout for the device threads to end their leases. Longer than they wait for DMA in flight, and
/// short enough for a lender to end within 5 s.
const STOP_TIMEOUT: Duration = Duration::from_millis(4500);

/// An error that prevents a lender from starting.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The state file of an earlier run cannot be read.
    #[error("{0}")]
    State(io::Error),
    /// The fabric's limits are invalid.
    #[error("the limits in [fabric] are invalid")]
    Fabric(#[from] LimitError),
    /// A device cannot be opened.
    #[error("cannot lend device {id}")]
    Device {
        /// Its id.
        id: DeviceId,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A function of this host cannot be lent.
    #[error(transparent)]
    Bind(#[from] crate::vfio::BindError),
    /// This host's NTB endpoint cannot be used.
    #[error("the endpoint in [ntb] cannot be used")]
    Ntb(#[source] farside_ntb::NtbError),
    /// The socket's directory cannot be created.
    #[error(
        "cannot use directory {path} for the socket that backends of this host connect to: name another with --socket, or `socket` in lender.toml",
        path = path.display()
    )]
    Directory {
        /// The directory.
        path: std::path::PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The users that `borrowers` names cannot be allowed to connect.
    #[error(
        "cannot allow the users in `borrowers` to connect to {path}: give the socket mode 0666 (SocketMode= of its systemd unit)",
        path = path.display()
    )]
    Admit {
        /// The socket or its directory.
        path: std::path::PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The users that `borrowers` names cannot reach the socket. Farside did not create the
    /// directory, which may hold more than its sockets.
    #[error(
        "the users in `borrowers` cannot connect to {socket}: {directory} has mode {mode:04o}; `chmod go+x {directory}`, or name a socket elsewhere (`socket`, --socket)",
        socket = socket.display(), directory = directory.display()
    )]
    Unreachable {
        /// The socket.
        socket: std::path::PathBuf,
        /// The directory above it.
        directory: std::path::PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The socket cannot be created.
    #[error("cannot listen for backends")]
    Listen(#[source] ListenError),
    /// The TCP port cannot be opened.
    #[error("cannot listen for backends")]
    ListenTcp(#[source] io::Error),
    /// The service manager's sockets do not belong to this lender.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// `listen` is for TCP.
    #[error(
        "cannot listen at {0}: `listen` takes tls:HOST:PORT; the socket for this host is `socket`"
    )]
    NotTcp(Address),
    /// This host's certificates cannot be used.
    #[error("cannot listen with TLS")]
    Certificates(#[from] PkiError),
    /// A device cannot be announced.
    #[error(transparent)]
    Announce(AnnounceError),
    /// The lender cannot be announced on the LAN.
    #[error("cannot announce the lender")]
    Mdns(#[from] MdnsError),
    /// `announce` is for TLS.
    #[error(
        "cannot announce {0}: only tls:HOST:PORT can be announced, where the lender's certificate proves who it is"
    )]
    NotTls(Address),
    /// Other hosts cannot connect to the address.
    #[error(
        "cannot announce {0}: other hosts do not reach this host by that address; name the one by which they do, and for which its certificate is, with `announce = \"{hint}\"` in lender.toml (--announce)",
        hint = announce_hint(.0)
    )]
    AnnounceWhere(Address),
    /// There is nothing to announce in.
    #[error(
        "cannot announce {0}: host.toml has neither `[etcd]` nor `mdns = true`; configure one, or leave out `announce`"
    )]
    NowhereToAnnounce(Address),
    /// Other hosts can reach the address.
    #[error(
        "cannot listen at {0}: without TLS, connections are neither encrypted nor authenticated, so only loopback addresses are allowed; use tls:HOST:PORT with certificates (`farside pki`), or set `listen-plain = true` (--listen-plain) on a network that carries nothing else"
    )]
    Plain(Address),
    /// Another lender lives.
    #[error("cannot go on for a former lender")]
    Take(#[from] TakeError),
    /// A thread or an eventfd cannot be created.
    #[error("cannot start")]
    System(#[from] io::Error),
}

fn announce_hint(address: &Address) -> String {
    let port = match address {
        Address::Tls { port, .. } | Address::Tcp { port, .. } => *port,
        Address::Unix(_) => 0,
    };
    format!("tls:NAME:{port}")
}

/// A running lender.
pub struct Lender {
    listeners: Vec<PeerListener>,
    about: Arc<About>,
    registry: Arc<Registry>,
    keeper: Arc<Keeper>,
    fault_reader: Option<JoinHandle<()>>,
    /// Released after the devices are closed.
    ntb: Option<HostEndpoint>,
    /// Removed after the devices are closed.
    vfs: Vec<CreatedVfs>,
    stop: Wakeup,
    /// Limits the log lines on peers whose thread could not be created.
    no_thread: RateLimit,
}

impl Lender {
    /// Opens all devices, starts their threads, and listens.
    pub fn start(config: Config) -> Result<Self, StartError> {
        Self::start_activated(config, Activated::default())
    }

    /// As [`Lender::start`], with sockets from the service manager. Connections to them wait until
    /// the devices are open.
    pub fn start_activated(mut config: Config, activated: Activated) -> Result<Self, StartError> {
        // `farside volume` goes on once it can connect.
        let mut volumes = config.add_volumes()?;
        config.check()?;
        // Thirty functions with 2048 eventfds each exceed the usual limit.
        raise_open_files();
        let stop = Wakeup::new()?;
        let fences = FenceBook::load(config.state.clone()).map_err(StartError::State)?;
        let at_most = Duration::from_secs(config.keep_at_most);
        let registry = Arc::new(Registry::new(fences).keeping(at_most));
        let adapter = Adapter::new(config.fabric.clone())?;
        let (keeper, found) = Keeper::find(&config.socket, config.worker.clone())?;
        let adopted = Adopted::all(found, &keeper);
        for lease in &adopted {
            // Else the lease would end.
            if let Some(error) = volumes.unusable.remove(&lease.lease.device) {
                return Err(ConfigError::Volume(error).into());
            }
        }
        for (id, error) in &volumes.unusable {
            log::error!("volume {id} is not lent: {}", Chain(error));
        }
        let keeper = Arc::new(keeper);
        let workers = config.worker.clone().map(|program| Workers {
            program,
            keeper: Arc::clone(&keeper),
        });
        let opened = open(
            &config,
            &volumes.lent,
            &adapter,
            workers.as_ref(),
            adopted,
            &stop,
        )?;
        let devices = Devices::new(
            &config,
            Arc::clone(&registry),
            adapter.clone(),
            workers,
            stop.clone(),
        );
        let listeners = PeerListener::open_all(&config, activated)?;
        let listening: Vec<Address> = listeners.iter().map(PeerListener::address).collect();
        let ids = opened.devices.iter().map(|device| device.id.clone());
        let announced = Announced::start(&config, &listening, ids.collect(), &registry)?;
        devices.set_announced(announced);
        let lender = Self {
            about: Arc::new(About {
                name: config.name.clone(),
                limits: match &opened.ntb {
                    Some(ntb) => ntb.adapter().limits().clone(),
                    None => config.fabric.clone(),
                },
                devices,
                adapter,
                ntb: opened.ntb.as_ref().map(|ntb| ntb.adapter().clone()),
                peers: listeners.iter().map(PeerListener::count).collect(),
            }),
            listeners,
            registry,
            keeper,
            fault_reader: opened.fault_reader,
            ntb: opened.ntb,
            vfs: opened.vfs,
            stop,
            no_thread: RateLimit::new(),
        };
        let devices = &lender.about.devices;
        let ids: Vec<_> = opened.devices.iter().map(|it| it.id.clone()).collect();
        for device in opened.devices {
            devices.start(device)?;
        }
        for id in &ids {
            if let Err(error) = devices.make_sizes_equal(id) {
                log::error!("the controllers of a shared namespace have different sizes: {error}");
            }
        }
        for listener in &lender.listeners {
            log::info!(
                "lender {} listens at {}",
                lender.about.name,
                listener.address()
            );
        }
        Ok(lender)
    }

    /// The addresses that it listens at: first the UNIX socket, then the TCP ports.
    pub fn addresses(&self) -> Vec<Address> {
        self.listeners.iter().map(PeerListener::address).collect()
    }

    /// The wakeup that stops [`Lender::run`].
    pub fn stop_handle(&self) -> Wakeup {
        self.stop.clone()
    }

    /// Serves until stopped; then ends all leases and unlinks the socket.
    pub fn run(self) -> io::Result<()> {
        loop {
            let (started, keeper) = self.keeper.watched();
            let mut fds = vec![
                PollFd::new(&self.stop, PollFlags::IN),
                PollFd::new(started, PollFlags::IN),
            ];
            let listeners = self.listeners.iter();
            fds.extend(listeners.map(|listener| PollFd::new(listener, PollFlags::IN)));
            fds.extend(
                keeper
                    .iter()
                    .map(|keeper| PollFd::new(keeper, PollFlags::IN)),
            );
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            if !fds[0].revents().is_empty() {
                return Ok(());
            }
            drop(fds);
            self.keeper.look_after();
            for listener in &self.listeners {
                self.accept_all(listener);
            }
        }
    }

    /// Accepts and serves all pending connections of a listener.
    fn accept_all(&self, listener: &PeerListener) {
        loop {
            match listener.accept() {
                Ok(Some((channel, counted))) => self.serve(channel, counted),
                Ok(None) => return,
                Err(error) => {
                    // E.g. EMFILE. Leases are unaffected, and the connection stays in the backlog.
                    log::error!("cannot accept a connection: {error}", error = Chain(&error));
                    let mut stop = [PollFd::new(&self.stop, PollFlags::IN)];
                    // The caller checks `stop`.
                    let _ = poll(&mut stop, Some(&ACCEPT_PAUSE));
                    return;
                }
            }
        }
    }

    /// Serves a peer on its own thread.
    fn serve(&self, channel: Channel, counted: Counted) {
        let (about, registry) = (Arc::clone(&self.about), Arc::clone(&self.registry));
        let stop = self.stop.clone();
        let started = std::thread::Builder::new()
            .name("peer".into())
            .spawn(move || {
                let lines = counted.lines();
                let name = |vm: &VmName| counted.name(vm);
                connection::serve(channel, &about, &registry, &stop, lines, &name);
            });
        if let Err(error) = started
            && let Some(held_back) = self.no_thread.allow()
        {
            log::error!("refusing a connection: no thread for it: {error}{held_back}");
        }
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.stop.raise();
        // Meanwhile, in two seconds at most.
        let announced = self.about.devices.take_announced();
        let withdrawn = std::thread::Builder::new().spawn(move || drop(announced));
        let stopped = self.about.devices.join(STOP_TIMEOUT);
        self.keeper.close();
        if withdrawn.is_ok_and(|thread| thread.join().is_err()) {
            log::error!("the thread that withdraws announcements has panicked");
        }
        if self
            .fault_reader
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            log::error!("the thread that reads the kernel's log has panicked");
        }
        if stopped == Stopped::Unclosed {
            // Releasing these would block: the kernel waits until the open device is closed.
            std::mem::forget((self.ntb.take(), std::mem::take(&mut self.vfs)));
        }
        log::info!("lender {} stopped", self.about.name);
    }
}
