//! The broker's part of a device that workers serve.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    process::Stdio,
    sync::Arc,
    time::{Duration, SystemTime},
};

use farside_daemon::{DeviceId, VmName, cgroup};
use farside_devices::{
    Device,
    block::{Image, ImageId},
    dma_test, nvme, remote, state, virtio,
};
use farside_fabric::soft::{Adapter, AdapterTables};
use farside_lender_protocol::{
    BarOwner, Channel, Described, DeviceEntry, Generation, MediumLease, RamRange, RemoteError,
    Reply, STATE_PAGE, Secret, Transport,
};
use farside_medium::Secrets;
use farside_vfio::SecondHandle;
use rustix::fd::BorrowedFd;

use super::{
    borrower::Borrower,
    child::{Worker, Workers},
    kept::{Adopted, KeptDevice, KeptLease, Record, descriptors},
    kept_function::KeptFunction,
    messages::{Model, Order, Served, ServedMedium, Start},
    start_error::StartError,
};
use crate::{
    config,
    keeper::LEASES,
    model::{check_model, not_flushed},
    registry::{GrantedChain, Lease},
    source::{Available, DeviceSource, Report},
    vfio::VfioDevice,
    vfio_user::ServerDevice,
};

/// Timeout for handing the lease to a new worker, whose queue is empty.
const START_TIMEOUT: Duration = Duration::from_secs(2);

/// A device whose leases are served by workers.
pub(crate) struct WorkerDevice {
    pub(super) id: DeviceId,
    workers: Workers,
    /// Its lease of the former broker.
    adopted: Option<Adopted>,
    // Closed before the function is unbound.
    pub(super) kept: Option<KeptFunction>,
    pub(super) device: Kind,
    /// Of the leases before the current one.
    pub(super) last: Report,
}

pub(super) enum Kind {
    Model(Box<ModelKind>),
    Function(VfioDevice),
    Server(Box<ServerDevice>),
}

pub(super) struct ModelKind {
    model: config::Model,
    /// Locked while it is open.
    image: Option<Image>,
    described: Described,
    adapter: Adapter,
}

impl WorkerDevice {
    /// Opens a software model, with its lease of the former broker.
    pub(crate) fn open(
        id: &DeviceId,
        model: config::Model,
        adapter: Adapter,
        workers: Workers,
        adopted: Option<Adopted>,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let (mut open, mut adopted) = (None, adopted);
        match adopted.as_mut().map(|it| it.go_on(&model, &adapter)) {
            Some(Ok(image)) => open = image,
            Some(Err(why)) => {
                if let Some(lease) = adopted.take() {
                    lease.end(&workers.keeper, Some(adapter.tables()), &why);
                }
            }
            None => {}
        }
        let kept = STATE_PAGE + state::SIZE as u64;
        let (description, image, state) = match &model {
            config::Model::Nvme(config) => {
                config.validate()?;
                let image = open.take().map_or_else(|| config.open_image(), Ok)?;
                (config.description(image.size), Some(image), kept)
            }
            config::Model::VirtioBlk(config) => {
                config.validate()?;
                let image = open.take().map_or_else(|| config.open_image(), Ok)?;
                (config.description(image.size), Some(image), kept)
            }
            config::Model::DmaTest(_) => (dma_test::DmaTest::new().description().clone(), None, 0),
        };
        let described = Described {
            description,
            bars: BarOwner::Borrower,
            state,
            rom: 0,
        };
        let device = Kind::Model(Box::new(ModelKind {
            model,
            image,
            described,
            adapter,
        }));
        Ok(Self::new(id, device, workers, adopted))
    }

    /// A function of this host, with its lease of the former broker.
    pub(crate) fn function(
        id: &DeviceId,
        function: VfioDevice,
        workers: Workers,
        adopted: Option<Adopted>,
    ) -> Self {
        Self::new(id, Kind::Function(function), workers, adopted)
    }

    /// The device of a vfio-user server.
    pub(crate) fn server(id: &DeviceId, server: ServerDevice, workers: Workers) -> Self {
        Self::new(id, Kind::Server(Box::new(server)), workers, None)
    }

    fn new(id: &DeviceId, device: Kind, workers: Workers, adopted: Option<Adopted>) -> Self {
        Self {
            id: id.to_owned(),
            workers,
            adopted,
            kept: None,
            device,
            last: Report::default(),
        }
    }

    /// Its lease of the former broker.
    pub(crate) fn adopted(&self) -> Option<&Adopted> {
        self.adopted.as_ref()
    }

    /// Takes that lease, to resume it.
    pub(crate) fn take_adopted(&mut self) -> Option<Adopted> {
        self.adopted.take()
    }

    /// Ends that lease.
    pub(crate) fn end_adopted(&mut self, why: &str) {
        if let Some(adopted) = self.adopted.take() {
            adopted.end(&self.workers.keeper, self.tables(), why);
        }
    }

    /// The worker of a lease of the former broker, and what is kept of it.
    pub(crate) fn adopt(&self, adopted: Adopted) -> (Worker, Record) {
        let record = Record {
            keeper: Arc::clone(&self.workers.keeper),
            number: Some(adopted.number),
            lease: adopted.lease.clone().resumed(),
        };
        record.update();
        let groups = self.workers.program.cgroup.as_ref();
        (adopted.into_worker(groups), record)
    }

    /// The device for the device thread, if that serves leases by this transport.
    pub(crate) fn in_thread(&self, transport: Transport) -> Option<Box<dyn DeviceSource>> {
        match (&self.device, transport) {
            // The adapter's registers are mapped into this process.
            (Kind::Function(function), Transport::Ntb) => Some(Box::new(function.clone())),
            _ => None,
        }
    }

    /// The adapter's tables, of which a model's worker takes entries.
    pub(crate) fn tables(&self) -> Option<&dyn AdapterTables> {
        match &self.device {
            Kind::Model(model) => Some(model.adapter.tables()),
            Kind::Function(_) | Kind::Server(_) => None,
        }
    }

    /// Whether it is a function of this host.
    pub(crate) fn is_function(&self) -> bool {
        matches!(self.device, Kind::Function(_))
    }

    /// A worker has opened a function for `vm`. Returns false if this is none.
    pub(crate) fn opened(&self, vm: &VmName) -> bool {
        match &self.device {
            Kind::Model(_) | Kind::Server(_) => false,
            Kind::Function(function) => {
                function.begun(vm);
                true
            }
        }
    }

    /// The medium, if it can be lent over the network.
    pub(crate) fn medium(&self) -> Option<io::Result<ImageId>> {
        match &self.device {
            Kind::Model(kind) => Some(match &kind.image {
                Some(image) => image.id(),
                None => Ok(ImageId::None),
            }),
            Kind::Function(_) | Kind::Server(_) => None,
        }
    }

    /// Starts a worker and hands the lease to it. On error the borrower gets its connection back, unless
    /// it was told of the lease.
    pub(crate) fn start(
        &mut self,
        entry: DeviceEntry,
        poll_us: u64,
        mut lease: Lease,
    ) -> Result<Started, (Option<Channel>, StartError)> {
        let mut worker = match self.spawn(&lease.vm) {
            Ok(worker) => worker,
            Err(error) => return Err((Some(lease.connection), error)),
        };
        let kept = lease
            .chain
            .filter(|_| lease.transport != Transport::Network);
        let served = match lease.chain.filter(|_| kept.is_none()) {
            Some(chain) => {
                let replied = self.reply(&mut lease, chain.secret);
                if let Err(error) = replied {
                    return Err((Some(lease.connection), error));
                }
                let data = lease.connection.into_link(START_TIMEOUT);
                let (socket, secrets) = match data {
                    Ok(data) => data,
                    Err(error) => return Err((None, StartError::Reply(error))),
                };
                let medium = self.served_medium(secrets);
                (Borrower::Lent(socket), medium.map(|it| (it, Vec::new())))
            }
            None => (Borrower::Asking(lease.connection), self.served()),
        };
        let (borrower, served, open) = match served {
            (borrower, Ok((served, open))) => (borrower, served, open),
            (borrower, Err(error)) => return Err((borrower.channel(), error)),
        };
        // Leases over the network, over an NTB and of a server's device end with this process.
        let device = match (&served, &self.device) {
            _ if lease.transport != Transport::SharedMemory => None,
            (Served::Model { model, .. }, _) => Some(KeptDevice::Model(model.clone())),
            (Served::Function(config), Kind::Function(function)) => {
                let probed = Box::new(function.probed().clone());
                Some(KeptDevice::Function(probed, config.adopts.clone()))
            }
            _ => None,
        };
        let of = (&lease.vm, lease.generation);
        let record = device.map(|device| {
            let with = (borrower.as_fd(), &*open);
            self.record(&worker.worker, with, of, device, kept)
        });
        let start = Order::Start(Box::new(Start {
            entry,
            device: served,
            poll_us,
            vm: lease.vm,
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
                Err((borrower.channel(), StartError::Send(error)))
            }
        }
    }

    /// Has the keeper keep the lease that begins, with the descriptors of a function that is kept.
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
            // The function has a record at any time.
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
    fn reply(&self, lease: &mut Lease, chain: Secret) -> Result<(), StartError> {
        let Kind::Model(kind) = &self.device else {
            return Err(StartError::NoMedium);
        };
        let model = match &kind.model {
            // The path is this host's.
            config::Model::Nvme(config) => remote::Model::Nvme(nvme::Config {
                image: self.id.as_str().into(),
                ..config.clone()
            }),
            config::Model::VirtioBlk(config) => remote::Model::VirtioBlk(remote::Virtio {
                virtio_blk: virtio::Config {
                    image: self.id.as_str().into(),
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

    fn served_medium(&self, secrets: Option<Secrets>) -> Result<Served, StartError> {
        let Kind::Model(kind) = &self.device else {
            return Err(StartError::NoMedium);
        };
        let (engine, limits, read_only) = kind.model.medium();
        Ok(Served::Medium(Box::new(ServedMedium {
            engine,
            limits,
            size: kind.image.as_ref().map_or(0, |image| image.size),
            read_only,
            secrets,
        })))
    }

    /// What a worker serves, and what of it is open: the connection to its server, or the function that is kept.
    fn served(&self) -> Result<(Served, Vec<OwnedFd>), StartError> {
        let kind = match &self.device {
            Kind::Model(kind) => kind,
            Kind::Function(function) => {
                let mut config = function.config();
                let mut open = Vec::new();
                if let Some(kept) = &self.kept {
                    let (parts, fds) = kept.handle.share().map_err(StartError::Channel)?;
                    config.adopts = Some(parts);
                    open.extend(fds);
                }
                return Ok((Served::Function(Box::new(config)), open));
            }
            Kind::Server(server) => {
                let (config, socket) = server.for_worker().map_err(StartError::Server)?;
                return Ok((Served::Server(Box::new(config)), vec![socket]));
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
            _ => Model::DmaTest,
        };
        let limits = kind.adapter.limits().clone();
        Ok((Served::Model { model, limits }, Vec::new()))
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

    /// The lease of `vm` has ended, with this last report and handle on the function.
    pub(crate) fn ended(
        &mut self,
        vm: VmName,
        report: Option<Report>,
        handle: Option<SecondHandle>,
    ) {
        if let Some(report) = report {
            self.last = self.completed(report);
        }
        if let (Kind::Function(function), Some(handle)) = (&self.device, handle) {
            function.ended(vm, handle.close());
        }
    }

    /// A worker's report with what this process sees of a function, and with the counters of former
    /// leases: each worker counts from zero.
    pub(crate) fn completed(&self, report: Report) -> Report {
        let mut report = report.bounded();
        if let Kind::Function(function) = &self.device {
            report = function.completed(report);
        }
        for counter in &mut report.counters {
            let mut former = self.last.counters.iter();
            let former = former.find(|former| former.name == counter.name);
            counter.value = counter.value.saturating_add(former.map_or(0, |c| c.value));
        }
        report
    }

    fn file(&self) -> Option<&File> {
        match &self.device {
            Kind::Model(model) => model.image.as_ref().map(|image| &image.file),
            Kind::Function(_) | Kind::Server(_) => None,
        }
    }
}

impl Drop for WorkerDevice {
    fn drop(&mut self) {
        if let (Some(_), Kind::Function(function)) = (&self.adopted, &self.device) {
            // The lender does not start. Unbinding the function would wait for its worker.
            std::mem::forget(function.clone());
        }
    }
}

impl Available for WorkerDevice {
    fn kind(&self) -> &'static str {
        match &self.device {
            Kind::Model(_) => "model",
            Kind::Function(function) => function.kind(),
            Kind::Server(server) => server.kind(),
        }
    }

    fn rom(&self) -> Arc<[u8]> {
        match &self.device {
            Kind::Model(_) | Kind::Server(_) => Arc::default(),
            Kind::Function(function) => function.rom(),
        }
    }

    fn described(&self) -> &Described {
        match &self.device {
            Kind::Model(model) => &model.described,
            Kind::Function(function) => function.described(),
            Kind::Server(server) => server.described(),
        }
    }

    fn check(
        &self,
        vm: Option<&VmName>,
        transport: Transport,
        ram: &[RamRange],
    ) -> Result<(), RemoteError> {
        match &self.device {
            Kind::Model(model) => match transport {
                // No adapter is on the way.
                Transport::Network => Ok(()),
                _ => check_model(&model.adapter, transport, ram),
            },
            Kind::Function(function) => function.check(vm, transport, ram),
            Kind::Server(server) => server.check(vm, transport, ram),
        }
    }

    fn flush(&mut self) -> Result<(), RemoteError> {
        let flushed = self.file().map_or(Ok(()), File::sync_data);
        flushed.map_err(|error| not_flushed(&self.id, &error))
    }

    fn report(&self) -> Report {
        match &self.device {
            Kind::Model(_) | Kind::Server(_) => Report {
                faults: self.last.faults.clone(),
                counters: self.last.counters.clone(),
                ..Report::default()
            },
            Kind::Function(function) => function.report(),
        }
    }

    fn let_go(&mut self) -> bool {
        self.let_function_go()
    }
}

/// A worker with its lease, and what is kept of that.
type Started = (Worker, Borrower, Option<Record>);

/// A process without its lease.
struct Spawned {
    worker: Worker,
    their_calls: OwnedFd,
}
