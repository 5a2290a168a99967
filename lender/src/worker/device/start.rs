//! A worker, and its lease.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::Stdio,
    sync::Arc,
    time::{Duration, SystemTime},
};

use farside_daemon::{VmName, cgroup};
use farside_devices::{nvme, remote, virtio};
use farside_lender_protocol::{
    Channel, DeviceEntry, Generation, MediumLease, Reply, Secret, Transport,
};
use farside_medium::Secrets;

use super::{Kind, WorkerDevice};
use crate::{
    config,
    keeper::LEASES,
    registry::{GrantedChain, Lease},
    worker::{
        borrower::Borrower,
        child::Worker,
        handle::{Connection, Handle},
        kept::{KeptDevice, KeptLease, Record, descriptors},
        kept_running::Running,
        messages::{Model, Order, Served, ServedMedium, Start},
        start_error::StartError,
    },
};

/// Timeout for handing the lease to a new worker, whose queue is empty.
const START_TIMEOUT: Duration = Duration::from_secs(2);

impl WorkerDevice {
    /// Starts a worker and hands the lease to it. On error the borrower gets its connection back, unless
    /// it was told of the lease.
    pub(crate) fn start(
        &mut self,
        entry: DeviceEntry,
        poll_us: u64,
        mut lease: Lease,
    ) -> Result<Started, (Option<Channel>, StartError)> {
        let mut worker = match self.spawn(lease.owner.vm()) {
            Ok(worker) => worker,
            Err(error) => return Err((Some(lease.connection), error)),
        };
        let kept = lease
            .chain
            .filter(|_| lease.transport != Transport::Network);
        let served = match lease.chain.filter(|_| kept.is_none()) {
            Some(chain) => {
                let replied = self.open_reservations().and_then(|file| {
                    self.reply(&mut lease, chain.secret, file.as_ref())?;
                    Ok(file)
                });
                let file = match replied {
                    Ok(file) => file,
                    Err(error) => return Err((Some(lease.connection), error)),
                };
                let data = lease.connection.into_link(START_TIMEOUT);
                let (socket, secrets) = match data {
                    Ok(data) => data,
                    Err(error) => return Err((None, StartError::Reply(error))),
                };
                let medium = self.served_medium(secrets, file.is_some());
                let open = file.map(OwnedFd::from).into_iter().collect();
                (Borrower::Lent(socket), medium.map(|it| (it, open)))
            }
            None => (
                Borrower::Asking(lease.connection),
                self.served(lease.owner.vm()),
            ),
        };
        let (borrower, served, open) = match served {
            (borrower, Ok((served, open))) => (borrower, served, open),
            (borrower, Err(error)) => return Err((borrower.channel(), error)),
        };
        // Leases over the network and over an NTB end with this process.
        let device = match (&served, &self.device) {
            _ if lease.transport != Transport::SharedMemory => None,
            (Served::Model { model, .. }, _) => Some(KeptDevice::Model(model.clone())),
            (Served::Function(config), Kind::Function(function)) => {
                let probed = Box::new(function.probed().clone());
                Some(KeptDevice::Function(probed, config.adopts.clone()))
            }
            (Served::Server { config, .. }, _) => Some(KeptDevice::Server(config.clone())),
            _ => None,
        };
        let of = (lease.owner.vm(), lease.generation);
        let record = device.map(|device| {
            // A model's next worker opens the file of its reservations anew.
            let runs = match &self.device {
                Kind::Model(_) => &[],
                Kind::Function(_) | Kind::Server(_) => &*open,
            };
            let with = (borrower.as_fd(), runs);
            self.record(&worker.worker, with, of, device, kept)
        });
        let start = Order::Start(Box::new(Start {
            entry,
            device: served,
            poll_us,
            vm: lease.owner.vm().clone(),
            generation: lease.generation,
            transport: lease.transport,
            chain: kept.map(|chain| (chain.secret, chain.goes_on)),
        }));
        let state = lease.state.filter(|_| kept.is_some());
        let fds: Vec<BorrowedFd<'_>> = [worker.their_calls.as_fd(), borrower.as_fd()]
            .into_iter()
            .chain(self.file().map(AsFd::as_fd))
            .chain(open.iter().map(AsFd::as_fd))
            .chain(state.iter().map(AsFd::as_fd))
            .chain(lease.bar_memory.iter().map(AsFd::as_fd))
            .collect();
        match worker.worker.orders.send(&(0, start), &fds, START_TIMEOUT) {
            Ok(()) => Ok((worker.worker, borrower, record)),
            Err(error) => {
                match (&mut self.kept, record) {
                    (Some(kept), record @ Some(_)) => kept.record = record,
                    (_, record) => {
                        let _ = record.map(|mut record| record.forget());
                    }
                }
                if !kept.is_some_and(|chain| chain.goes_on) {
                    self.let_run_end();
                }
                Err((borrower.channel(), StartError::Send(error)))
            }
        }
    }

    /// Has the keeper keep the lease that begins, with the descriptors of a device that runs.
    fn record(
        &self,
        worker: &Worker,
        (connection, open): (BorrowedFd<'_>, &[OwnedFd]),
        (vm, generation): (&VmName, Generation),
        served: KeptDevice,
        chain: Option<GrantedChain>,
    ) -> Record {
        let state = KeptLease::state(&served);
        let kept = KeptLease {
            device: self.id.clone(),
            vm: vm.clone(),
            generation,
            since: SystemTime::now(),
            chain: chain.map(|chain| (chain.secret, chain.goes_on)),
            pid: worker.pid(),
            group: worker.group.as_ref().map(|group| group.path().to_owned()),
            served,
            first_order: 1,
            requester: false,
            windows: Vec::new(),
            replied: None,
            worker: LEASES.version(),
            state,
        };
        let keeper = Arc::clone(&self.workers.keeper);
        let (mut fds, mut with_worker) = descriptors(worker, connection, self.file());
        if !open.is_empty() {
            // A broker is needed for the end of its DMA.
            fds.extend(open.iter().map(AsFd::as_fd));
            with_worker = 0;
        }
        let before = self.kept.as_ref().and_then(|it| it.record.as_ref());
        let number = match before.and_then(|record| record.number) {
            // What runs has a record at any time.
            Some(number) => {
                kept.replace(&keeper, number, &fds);
                Some(number)
            }
            None => kept.keep(&keeper, &fds, with_worker),
        };
        Record {
            number,
            keeper,
            lease: kept,
        }
    }

    /// Tells the borrower of the medium's lease, before frames follow.
    fn reply(
        &self,
        lease: &mut Lease,
        chain: Secret,
        reservations: Option<&File>,
    ) -> Result<(), StartError> {
        let Kind::Model(kind) = &self.device else {
            return Err(StartError::NoMedium);
        };
        let model = match &kind.model {
            // Paths, and the names of interfaces, are this host's.
            config::Model::Nvme(config) => {
                let theirs = nvme::Config {
                    image: self.id.as_str().into(),
                    shared: None,
                    ..config.clone()
                };
                match reservations {
                    None => remote::Model::Nvme(theirs),
                    Some(file) => {
                        let identity = config.reservations_identity(file, self.id.as_str());
                        let (controller, uuid) = identity.map_err(StartError::Reservations)?;
                        remote::Model::SharedNvme(remote::Sharing {
                            shared_nvme: remote::SharedNvme {
                                config: theirs,
                                controller,
                                uuid,
                            },
                        })
                    }
                }
            }
            config::Model::VirtioBlk(config) => remote::Model::VirtioBlk(remote::Virtio {
                virtio_blk: virtio::Config {
                    image: self.id.as_str().into(),
                    ..config.clone()
                },
            }),
            config::Model::VirtioNet(config) => remote::Model::VirtioNet(remote::Net {
                virtio_net: virtio::net::Config {
                    tap: self.id.to_string(),
                    ..config.clone()
                },
            }),
            config::Model::DmaTest(_) => remote::Model::DmaTest(remote::NoMedium::DmaTest),
        };
        let image = kind.image.as_ref();
        let reply = Reply::Medium(Box::new(MediumLease {
            generation: lease.generation,
            chain,
            model: serde_json::to_string(&model).map_err(StartError::Config)?,
            size: image.map_or(0, |image| image.size),
            punches_holes: image.is_some_and(|image| image.punches_holes),
        }));
        let sent = lease.connection.send(&reply, &[], START_TIMEOUT);
        sent.map_err(StartError::Reply)
    }

    fn served_medium(&self, secrets: Option<Secrets>, shared: bool) -> Result<Served, StartError> {
        let Kind::Model(kind) = &self.device else {
            return Err(StartError::NoMedium);
        };
        let (engine, limits, read_only) = kind.model.medium();
        Ok(Served::Medium(Box::new(ServedMedium {
            engine,
            limits,
            size: kind.image.as_ref().map_or(0, |image| image.size),
            read_only,
            frames: matches!(kind.model, config::Model::VirtioNet(_)),
            shared,
            secrets,
        })))
    }

    /// What a worker serves, and what of it is open: the connection to its server, or the function that is kept.
    fn served(&mut self, vm: &VmName) -> Result<(Served, Vec<OwnedFd>), StartError> {
        let kind = match &self.device {
            Kind::Model(kind) => kind,
            Kind::Function(function) => {
                let mut config = function.config();
                let mut open = Vec::new();
                if let Some(Handle::Function(handle)) = self.kept.as_ref().map(|it| &it.handle) {
                    let (parts, fds) = handle.share().map_err(StartError::Channel)?;
                    config.adopts = Some(parts);
                    open.extend(fds);
                }
                return Ok((Served::Function(Box::new(config)), open));
            }
            Kind::Server(server) => {
                let kept = self.kept.as_ref().map(|it| &it.handle);
                let (adopts, config, socket) = match kept {
                    Some(Handle::Server(connection)) => {
                        let socket = connection.share().map_err(StartError::Channel)?;
                        (true, connection.config.clone(), socket)
                    }
                    _ => {
                        let (config, socket) = server.for_worker().map_err(StartError::Server)?;
                        let config = Box::new(config);
                        let ours = socket.try_clone().map_err(StartError::Channel)?;
                        self.kept = Some(Running {
                            vm: vm.clone(),
                            handle: Handle::Server(Connection::new(config.clone(), ours)),
                            record: None,
                        });
                        (false, config, socket)
                    }
                };
                let served = Served::Server { config, adopts };
                return Ok((served, vec![socket]));
            }
        };
        let model = match (&kind.model, &kind.image) {
            (config::Model::Nvme(config), Some(image)) => Model::Nvme {
                config: serde_json::to_string(config).map_err(StartError::Config)?,
                size: image.size,
                punches_holes: image.punches_holes,
            },
            (config::Model::VirtioBlk(config), Some(image)) => Model::VirtioBlk {
                config: serde_json::to_string(config).map_err(StartError::Config)?,
                size: image.size,
                punches_holes: image.punches_holes,
            },
            (config::Model::VirtioNet(config), Some(_)) => Model::VirtioNet {
                config: serde_json::to_string(config).map_err(StartError::Config)?,
            },
            _ => Model::DmaTest,
        };
        let limits = kind.adapter.limits().clone();
        let file = self.open_reservations()?;
        let open = file.map(OwnedFd::from).into_iter().collect();
        Ok((Served::Model { model, limits }, open))
    }

    /// The file of reservations, of a model that shares its namespace.
    fn open_reservations(&self) -> Result<Option<File>, StartError> {
        let Kind::Model(kind) = &self.device else {
            return Ok(None);
        };
        let file = kind.reservations().map(nvme::Config::open_reservations);
        Ok(file
            .transpose()
            .map_err(StartError::Reservations)?
            .flatten())
    }

    fn spawn(&self, vm: &VmName) -> Result<Spawned, StartError> {
        let (orders, their_orders) = Channel::pair().map_err(StartError::Channel)?;
        let (calls, their_calls) = Channel::pair().map_err(StartError::Channel)?;
        let (log, their_log) = io::pipe().map_err(StartError::Channel)?;
        // Nobody reads what a worker without a broker logs: it must not wait for that.
        for end in [log.as_fd(), their_log.as_fd()] {
            rustix::io::ioctl_fionbio(end, true)
                .map_err(|errno| StartError::Channel(errno.into()))?;
        }
        let program = &self.workers.program;
        let child = program
            .command()
            .args(&program.args)
            .args([self.id.as_str(), vm.as_str()])
            .stdin(Stdio::from(their_orders.into_socket()))
            .stderr(their_log)
            .spawn()
            .map_err(|source| StartError::Spawn {
                program: program.path.clone(),
                source,
            })?;
        let mut worker = Worker::new(child, orders, calls, log).map_err(StartError::Channel)?;
        worker.group = self.place(worker.pid())?;
        Ok(Spawned {
            worker,
            their_calls: their_calls.into_socket(),
        })
    }

    /// The control group of a new worker, which does without one if nothing limits its memory.
    fn place(&self, pid: u32) -> Result<Option<cgroup::Group>, StartError> {
        let Some(groups) = &self.workers.program.cgroup else {
            return Ok(None);
        };
        // A worker that is killed may have its successor before it is gone.
        match groups.place(&format!("worker-{}-{pid}", self.id), pid) {
            Ok(group) => Ok(Some(group)),
            Err(error) if groups.limits_memory() => Err(StartError::Group(error)),
            Err(error) => {
                log::warn!(
                    "device {}: the worker has no control group of its own in {}: {error}",
                    self.id,
                    groups.path().display()
                );
                Ok(None)
            }
        }
    }
}

/// A worker with its lease, and what is kept of that.
type Started = (Worker, Borrower, Option<Record>);

/// A process without its lease.
struct Spawned {
    worker: Worker,
    their_calls: OwnedFd,
}
