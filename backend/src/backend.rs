//! Assembles a backend: looks up devices, creates sockets and runs the event loop.

use std::{
    io,
    os::fd::AsRawFd,
    path::PathBuf,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use farside_daemon::{
    Activated, ActivationError, DeviceId, GroupError, ListenError, SocketGroup, VmName, Wakeup,
    confine::ConfineError, paths, raise_open_files,
};
use farside_discovery::Discovery;
use farside_error_chain::Chain;
use farside_fabric::{VmShare, pin::PinPolicy};
use farside_irq_relay::Interrupts;
use farside_lender_protocol::{Address, CallError, FindError, RamRange};
use farside_ntb::{HostEndpoint, NtbError};
use farside_pci::Bdf;

use crate::{
    admin::AdminServer,
    confine,
    directory::Directory,
    helper::{self, Helper},
    lookup::Lookup,
    records::Past,
    served::{Served, ServedState},
    sockets::{SocketName, Sockets},
    status::StatusServer,
};

/// Maximum time for the peer host to bring the NTB link up.
const LINK_TIMEOUT: Duration = Duration::from_secs(10);

/// A VM and the devices that it borrows.
#[derive(Clone, Debug)]
pub struct Config {
    /// The VM's name.
    pub vm: VmName,
    /// The directory of its sockets, exclusive to this backend; conventionally
    /// [`farside_daemon::paths::vm_dir`]. Created if missing.
    pub directory: PathBuf,
    /// Device ids. May be empty: devices can be attached later.
    pub devices: Vec<DeviceId>,
    /// The lenders to search, in this order.
    pub lenders: Vec<Address>,
    /// How more of them are found, by the helper process.
    pub discovery: Option<Discovery>,
    /// The directory of this host's certificates, for lenders at `tls:HOST:PORT`.
    pub pki: PathBuf,
    /// This host's NTB endpoint, for devices of other hosts.
    pub ntb: Option<Bdf>,
    /// The file with the [fences](farside_lender_protocol::Fences) of a VM that was moved to this
    /// host; the file may be missing.
    pub fences: Option<PathBuf>,
    /// How interrupts reach the VMM.
    pub interrupts: Interrupts,
    /// What to do when the memlock limit is too small for the VM's RAM.
    pub pin_policy: PinPolicy,
    /// Bytes of the VM's memory, if known, with all that can be plugged in: no more is pinned.
    pub memory: Option<u64>,
    /// Where the VM's RAM will be, if known, so that a device that cannot reach it is refused
    /// before the VM boots.
    pub ram: Vec<RamRange>,
    /// Time after which a bus-master enable is logged as late. It is refused after this or four
    /// fifths of `message_timeout`, whichever is longer.
    pub open_timeout: Duration,
    /// The VMM's request timeout: QEMU's `x-msg-timeout`.
    pub message_timeout: Duration,
    /// Time for which I/O waits for a lender of another host that is out of reach. Then the guest is asked
    /// to release the device.
    pub lost_after: Duration,
    /// Group whose members may connect to the devices' sockets, in addition to this user.
    pub socket_group: Option<String>,
    /// The names of the devices' sockets.
    pub layout: paths::SocketLayout,
    /// Asks the guest to release a device that its lender takes back.
    pub release: Option<ReleaseHook>,
    /// What outlives this process, and what another one has left.
    pub past: Past,
    /// With a helper process the backend's process confines itself when its sockets are open.
    pub helper: Option<Helper>,
}

/// Asks the guest to release a device within a time limit, for a client that has set no eventfd for
/// VFIO's request interrupt: QEMU up to 11.1 has none for `vfio-user-pci`. Called on the event loop,
/// so it must not block.
#[derive(Clone)]
pub struct ReleaseHook(Arc<Release>);

type Release = dyn Fn(&DeviceId, Duration) + Send + Sync;

impl ReleaseHook {
    /// Makes a hook of a function.
    pub fn new(hook: impl Fn(&DeviceId, Duration) + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    pub(crate) fn call(&self, device: &DeviceId, limit: Duration) {
        (self.0)(device, limit);
    }
}

impl std::fmt::Debug for ReleaseHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReleaseHook")
    }
}

/// An error that prevents a backend from starting.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum StartError {
    /// The device was not found at one lender.
    #[error(transparent)]
    Find(#[from] FindError),
    /// A call to a lender failed.
    #[error(transparent)]
    Lender(#[from] CallError),
    /// The NTB cannot be used.
    #[error(transparent)]
    Ntb(#[from] NtbError),
    /// The lender is on another host, and no NTB is configured.
    #[error(
        "device {device} is a physical function at {lender}, on another host, whose DMA reaches this one only through an NTB: name this host's endpoint with --ntb BDF (or `ntb = true` in the VM's file, and its address in /etc/farside/host.toml), or have the function's block device lent instead, which is borrowed over the network"
    )]
    NoNtb { device: DeviceId, lender: Address },
    /// A device is listed twice.
    #[error("{0}")]
    Devices(String),
    /// The lender's description of the device is invalid.
    #[error("cannot serve device {device}")]
    Device {
        device: DeviceId,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Another backend serves the VM.
    #[error("VM {vm} has a backend already ({directory} is locked): stop it, or choose another --vm", directory = directory.display())]
    Running { vm: VmName, directory: PathBuf },
    /// A socket or directory cannot be created.
    #[error("cannot make or use {path}", path = path.display())]
    Path { path: PathBuf, source: io::Error },
    /// A socket cannot be created.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The service manager's sockets are not those of this VM.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// The group of the sockets cannot be changed.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The process cannot be confined.
    #[error("cannot confine the backend")]
    Confine(#[from] ConfineError),
    /// The helper process cannot create a socket.
    #[error(transparent)]
    Helper(io::Error),
    /// A system call failed.
    #[error("cannot start")]
    System(#[from] io::Error),
    /// The event loop cannot be created.
    #[error("cannot start the event loop")]
    EventLoop(#[from] event_manager::Error),
}

pub(crate) type Subscriber = Arc<Mutex<dyn MutEventSubscriber + Send>>;

/// A running backend.
pub struct Backend {
    manager: EventManager<Subscriber>,
    served: Served,
    vm: VmName,
    helper: Option<Helper>,
    /// Released after the devices.
    _ntb: Option<HostEndpoint>,
    _directory: Directory,
}

impl Backend {
    /// Looks the devices up and creates their sockets. Borrows nothing yet.
    pub fn start(config: &Config) -> Result<Self, StartError> {
        Self::start_activated(config, Activated::default(), || Ok(()))
    }

    /// As [`Backend::start`], with sockets from the service manager. Fails if any of them does not
    /// belong to this VM. Calls `confined` when this process has given up its privileges, before it waits
    /// for anybody: a thread that was started before would have kept them.
    pub fn start_activated(
        config: &Config,
        activated: Activated,
        confined: impl FnOnce() -> io::Result<()>,
    ) -> Result<Self, StartError> {
        check_devices(&config.devices)?;
        // A client may bring thousands of eventfds.
        raise_open_files();
        let group = config.socket_group.as_deref().map(SocketGroup::named);
        let group = group.transpose()?;
        let ntb = config.ntb.map(|bdf| HostEndpoint::open(bdf, VmShare::ALL));
        let ntb = ntb.transpose()?;
        let directory = Directory::hold(
            &config.vm,
            &config.directory,
            config.layout,
            config.helper.clone(),
        )?;
        if let Some(helper) = &config.helper {
            helper.configure(helper::Start::new(config))?;
            confine::give_up_privileges(config)?;
        }
        confined()?;
        if let Some(ntb) = &ntb {
            ntb.adapter().wait_link(LINK_TIMEOUT)?;
        }
        let helper = config.helper.clone();
        let made = Sockets::new(&config.directory, group, config.layout, activated, helper);
        let adapter = ntb.as_ref().map(|ntb| ntb.adapter().clone());
        let lookup = Arc::new(Lookup::new(config, adapter, made));
        let mut manager = EventManager::new()?;
        let served = Served::default();
        let left = config.past.take();
        let goes_on = !left.is_empty();
        for left in left {
            match lookup.go_on(left) {
                Ok((id, server)) => served.add(&id, server, !config.devices.contains(&id)),
                Err(error) => log::error!(
                    "a device of VM {} is lost until QEMU is started again: {}",
                    config.vm,
                    Chain(&error)
                ),
            }
        }
        let mut found = Vec::new();
        for id in &config.devices {
            if served.state(id) != ServedState::NotServed {
                continue;
            }
            match lookup.find(id) {
                Ok(device) => found.push((id, device)),
                // The VM would lose the devices that it has.
                Err(error) if goes_on => {
                    log::error!(
                        "device {id} is not served until `farside attach {} {id}`: {}",
                        config.vm,
                        Chain(&error)
                    );
                }
                Err(error) => return Err(error),
            }
        }
        for (id, device) in found {
            served.add(id, lookup.serve(id, device)?, false);
        }
        served.apply(&mut manager);
        let mut made = lookup.sockets();
        let status = made.open(&SocketName::Status)?;
        let problem = Arc::<OnceLock<&'static str>>::default();
        if let Some(helper) = config.helper.clone() {
            let watch = HelperWatch {
                helper,
                vm: config.vm.clone(),
                problem: Arc::clone(&problem),
            };
            manager.add_subscriber(Arc::new(Mutex::new(watch)) as Subscriber);
        }
        let status = StatusServer::new(
            &config.vm,
            status,
            served.clone(),
            problem,
            config.past.kept().clone(),
        );
        manager.add_subscriber(Arc::new(Mutex::new(status)) as Subscriber);
        // Created last, so that a client that can connect to it finds all other sockets.
        let control = made.open(&SocketName::Control)?;
        made.check_all_taken(&config.vm)?;
        drop(made);
        let admin = AdminServer::new(control, lookup, served.clone())?;
        manager.add_subscriber(Arc::new(Mutex::new(admin)) as Subscriber);
        let devices: Vec<_> = config.devices.iter().map(DeviceId::as_str).collect();
        let (devices, vm) = (devices.join(", "), &config.vm);
        let serves = format!("serving {devices} to VM {vm}");
        config.past.kept().ready(&serves);
        farside_daemon::ready(&serves);
        if config.helper.is_some() {
            farside_daemon::end_notices();
            confine::restrict_system_calls(config)?;
        }
        Ok(Self {
            manager,
            served,
            vm: config.vm.clone(),
            helper: config.helper.clone(),
            _ntb: ntb,
            _directory: directory,
        })
    }

    /// Device ids and their vfio-user sockets.
    pub fn sockets(&self) -> Vec<(DeviceId, PathBuf)> {
        self.served.sockets()
    }

    /// Serves until `stop` is raised; then returns every device and unlinks the sockets. While a
    /// VMM uses a device, the first raise waits for the VMM to disconnect, because VMMs do not
    /// reconnect and the guest would lose the device; a second raise does not wait.
    pub fn run(mut self, stop: Wakeup) -> Result<(), StartError> {
        let asked = Arc::new(AtomicU64::new(0));
        self.manager.add_subscriber(Arc::new(Mutex::new(Stop {
            wakeup: stop,
            asked: Arc::clone(&asked),
        })) as Subscriber);
        let mut waits = false;
        loop {
            let asked = asked.load(Ordering::Relaxed);
            if asked > 0 {
                let in_use = self.served.in_use();
                if in_use.is_empty() || asked > 1 {
                    break;
                }
                if !waits {
                    self.report_stop_waits(&in_use.join(", "));
                    waits = true;
                }
            }
            self.manager.run()?;
            self.served.apply(&mut self.manager);
        }
        farside_daemon::stopping("returning the devices");
        if let Some(helper) = &self.helper {
            helper.stop_waiting();
        }
        let vm = self.vm.clone();
        drop(self);
        log::info!("backend of VM {vm} stopped");
        Ok(())
    }

    fn report_stop_waits(&self, devices: &str) {
        let vm = &self.vm;
        log::warn!(
            "not stopping yet: VM {vm} is connected to {devices}, and would lose these devices: QEMU \
             does not reconnect to a vfio-user server. Stop the VM (`farside stop {vm}`): this backend ends when the VM \
             disconnects. A second SIGTERM or SIGINT ends it now"
        );
        farside_daemon::status(&format!(
            "stops when VM {vm} disconnects from {devices}; a second SIGTERM stops it now"
        ));
    }
}

/// Ends [`Backend::run`].
struct Stop {
    wakeup: Wakeup,
    /// Number of stop requests.
    asked: Arc<AtomicU64>,
}

impl MutEventSubscriber for Stop {
    fn init(&mut self, ops: &mut EventOps) {
        let events = Events::new_raw(self.wakeup.as_raw_fd(), EventSet::IN);
        if let Err(error) = ops.add(events) {
            log::error!(
                "the backend cannot be stopped by a signal: {error}",
                error = Chain(&error)
            );
        }
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        self.asked.fetch_add(self.wakeup.take(), Ordering::Relaxed);
    }
}

/// What a backend without its helper process cannot do any more, and the remedy.
const NO_HELPER: &str = "its helper process has ended: its devices go on, but it can neither attach one, nor borrow from a lender again, nor ask the guest to release one; stop the VM when that suits, and restart the backend";

/// Notices the end of the helper process.
struct HelperWatch {
    helper: Helper,
    vm: VmName,
    /// For the status.
    problem: Arc<OnceLock<&'static str>>,
}

impl HelperWatch {
    fn events(&self, set: EventSet) -> Events {
        Events::new_raw(self.helper.socket().as_raw_fd(), set)
    }
}

impl MutEventSubscriber for HelperWatch {
    fn init(&mut self, ops: &mut EventOps) {
        // A hang-up is reported in any case. The helper sends nothing.
        if let Err(error) = ops.add(self.events(EventSet::empty())) {
            log::error!("the end of the helper process will not be noticed: event loop: {error}");
        }
    }

    fn process(&mut self, _events: Events, ops: &mut EventOps) {
        log::error!("backend of VM {}: {NO_HELPER}", self.vm);
        let _ = self.problem.set(NO_HELPER);
        // It would be reported in each round.
        if let Err(error) = ops.remove(self.events(EventSet::empty())) {
            log::error!("backend of VM {}: event loop: {error}", self.vm);
        }
    }
}

fn check_devices(devices: &[DeviceId]) -> Result<(), StartError> {
    for (n, device) in devices.iter().enumerate() {
        if devices[..n].contains(device) {
            return Err(StartError::Devices(format!(
                "device {device} is named twice; a VM borrows a device once"
            )));
        }
    }
    Ok(())
}
