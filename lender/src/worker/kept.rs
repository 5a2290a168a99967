//! A lease that outlives its broker, as the keeper has it.

use std::{
    fs::{self, File},
    io::PipeReader,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use farside_daemon::{DeviceId, VmName, cgroup};
use farside_devices::{
    block::{Image, Tap},
    state, virtio,
};
use farside_error_chain::Chain;
use farside_fabric::{
    LutRange, PeerAddress,
    soft::{Adapter, AdapterTables},
};
use farside_hand_over::FARSIDE;
use farside_lender_protocol::{Channel, Generation, Identity, Secret};
use farside_pci::Bdf;
use farside_vfio::{Api, HandleParts};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Signal, pidfd_send_signal},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    child::Worker,
    handle::{Connection, KeptHandle},
    messages::{CallReply, Model, Numbered},
};
use crate::{
    config,
    keeper::{Found, Keeper, LEASES},
    lease_owner::LeaseOwner,
    vfio::Probed,
    vfio_user::ServerConfig,
};

/// Timeout for a worker to end that is not adopted; then it is killed.
const END_TIMEOUT: Duration = Duration::from_secs(4);

/// Why a lease does not go on.
pub(crate) const ANOTHER_KIND: &str = "it is another device now";

/// Orders of a broker are numbered above those of the former one, which were fewer.
const ORDERS: u64 = 1 << 32;

/// What the next broker needs to know. See [`LEASES`] before changing it: a new field has a default that means that it is
/// absent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct KeptLease {
    pub(crate) device: DeviceId,
    pub(crate) vm: VmName,
    pub(crate) generation: Generation,
    pub(crate) since: SystemTime,
    /// The chain's secret, and whether the lease is not its first.
    pub(crate) chain: Option<(Secret, bool)>,
    pub(crate) pid: u32,
    pub(crate) group: Option<PathBuf>,
    pub(crate) served: KeptDevice,
    /// The number of the broker's first order.
    pub(crate) first_order: u64,
    /// It has a requester entry of the adapter.
    pub(crate) requester: bool,
    pub(crate) windows: Vec<OpenWindow>,
    /// The last reply to a call that changed something, and its number.
    pub(crate) replied: Option<Numbered<CallReply>>,
    /// The version of the worker's messages, which is its own for as long as it runs: send it nothing of a later one.
    #[serde(default = "first")]
    pub(crate) worker: u32,
    /// The version of the state of the model that the worker writes.
    #[serde(default)]
    pub(crate) state: Option<u32>,
}

/// Version 1 has no version.
fn first() -> u32 {
    1
}

/// A lease as it is recorded since version 2. In version 1 it is recorded alone. All versions have the keys beside it.
#[derive(Serialize, Deserialize)]
struct Recorded<T> {
    /// Of [`LEASES`].
    version: u32,
    /// The farside that has written it.
    farside: String,
    device: DeviceId,
    vm: VmName,
    worker: u32,
    state: Option<u32>,
    lease: T,
}

/// Whether a broker is needed for the end of a lease's DMA, in whose record this is.
pub(crate) fn needs_broker(lease: &[u8]) -> bool {
    let lease = KeptLease::read(lease);
    lease.is_some_and(|lease| {
        matches!(
            lease.served,
            KeptDevice::Function(_, Some(_)) | KeptDevice::Server(_)
        )
    })
}

/// What a worker serves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum KeptDevice {
    Model(Model),
    /// A function, and the broker's handle on it once the worker has opened it.
    Function(Box<Probed>, Option<HandleParts>),
    /// The device of a vfio-user server, with the connection to it.
    Server(Box<ServerConfig>),
}

/// A window of the adapter that a worker has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OpenWindow {
    pub(crate) range: LutRange,
    pub(crate) peer_address: PeerAddress,
    pub(crate) bytes: u64,
}

/// A lease of a former broker, until it is resumed or ended.
pub(crate) struct Adopted {
    pub(crate) number: u64,
    pub(crate) lease: KeptLease,
    /// Its entry in the requester table, if it has one.
    pub(crate) requester: Option<usize>,
    pub(crate) pidfd: OwnedFd,
    pub(crate) orders: OwnedFd,
    pub(crate) calls: OwnedFd,
    pub(crate) log: OwnedFd,
    /// The borrower's, unless the worker has ended without a broker.
    pub(crate) connection: Option<OwnedFd>,
    /// Of a model with a medium, unless its worker has ended.
    image: Option<File>,
    /// The broker's handle on a device that runs.
    pub(crate) handle: Option<KeptHandle>,
}

impl Adopted {
    /// The leases of the former broker, by device. Of two, of which the earlier is about to end, the later.
    pub(crate) fn all(found: Vec<Found>, keeper: &Keeper) -> Vec<Self> {
        let mut adopted: Vec<Self> = Vec::new();
        for found in found {
            let number = found.id;
            let Some(lease) = Self::from_found(found) else {
                log::error!("a lease of the former lender is not readable: its worker ends");
                keeper.forget(number);
                continue;
            };
            let same = |other: &Self| other.lease.device == lease.lease.device;
            if let Some(earlier) = adopted.iter().position(same) {
                let earlier = adopted.swap_remove(earlier);
                earlier.end(keeper, None, "another lease follows it");
            }
            adopted.push(lease);
        }
        adopted
    }

    fn from_found(found: Found) -> Option<Self> {
        let lease = KeptLease::read(&found.lease)?;
        let mut fds = found.fds.into_iter();
        let (pidfd, orders) = (fds.next()?, fds.next()?);
        let (calls, log, connection) = (fds.next()?, fds.next()?, fds.next());
        let (image, handle) = match &lease.served {
            KeptDevice::Model(_) => (fds.next().map(File::from), None),
            KeptDevice::Function(_, None) => (None, None),
            KeptDevice::Function(_, Some(parts)) => {
                let fds = [fds.next()?, fds.next()?];
                (None, Some(KeptHandle::Function(parts.clone(), fds)))
            }
            KeptDevice::Server(config) => {
                let connection = Connection::new(config.clone(), fds.next()?);
                (None, Some(KeptHandle::Server(connection)))
            }
        };
        Some(Self {
            number: found.id,
            lease,
            requester: None,
            pidfd,
            orders,
            calls,
            log,
            connection,
            image,
            handle,
        })
    }

    /// Checks that the lease goes on with the device `model`, and records what it has of `adapter`. Returns the
    /// image if the worker has it: it is locked, so it cannot be opened.
    ///
    /// # Errors
    /// Why the lease does not go on.
    pub(crate) fn go_on(
        &mut self,
        model: &config::Model,
        adapter: &Adapter,
    ) -> Result<Option<Image>, String> {
        let image = self.image(model)?;
        self.restore(adapter.tables())?;
        Ok(image)
    }

    fn image(&self, config: &config::Model) -> Result<Option<Image>, String> {
        if self.connection.is_none() {
            // It has ended.
            return Ok(None);
        }
        let KeptDevice::Model(model) = &self.lease.served else {
            return Err(ANOTHER_KIND.into());
        };
        let (same, path, size, punches_holes) = match (config, model) {
            (config::Model::VirtioNet(now), Model::VirtioNet { .. }) => return self.tap(now),
            (config::Model::DmaTest(_), Model::DmaTest) if self.image.is_none() => {
                return Ok(None);
            }
            (
                config::Model::Nvme(now),
                Model::Nvme {
                    config,
                    size,
                    punches_holes,
                },
            ) => (is_same(now, config), &now.image, size, punches_holes),
            (
                config::Model::VirtioBlk(now),
                Model::VirtioBlk {
                    config,
                    size,
                    punches_holes,
                },
            ) => (is_same(now, config), &now.image, size, punches_holes),
            _ => return Err(ANOTHER_KIND.into()),
        };
        let Some(image) = &self.image else {
            return Err(ANOTHER_KIND.into());
        };
        if !same {
            return Err("its configuration has changed".into());
        }
        if !is_at(image, path) {
            return Err(format!("{} is another file now", path.display()));
        }
        let file = image.try_clone().map_err(|error| error.to_string())?;
        Ok(Some(Image {
            file,
            size: *size,
            punches_holes: *punches_holes,
        }))
    }

    /// The configuration of a network device, in which all is said.
    pub(crate) fn network_device(&self) -> Option<virtio::net::Config> {
        match &self.lease.served {
            KeptDevice::Model(Model::VirtioNet { config }) => serde_json::from_str(config).ok(),
            _ => None,
        }
    }

    fn tap(&self, now: &virtio::net::Config) -> Result<Option<Image>, String> {
        let complete = self.network_device();
        if !complete.is_some_and(|complete| now.is_met_by(&complete)) {
            return Err("its configuration has changed".into());
        }
        let file = self.image.as_ref().ok_or(ANOTHER_KIND)?;
        let file = file.try_clone().map_err(|error| error.to_string())?;
        if !Tap::is_at(&file, &now.tap) {
            return Err(format!("{} is another interface now", now.tap));
        }
        Ok(Some(Image::of_tap(file)))
    }

    /// The function, if the worker has this one open.
    pub(crate) fn function(&self, bdf: Bdf, api: Api) -> Option<Probed> {
        match &self.lease.served {
            KeptDevice::Function(probed, _) if probed.is(bdf, api) => Some((**probed).clone()),
            _ => None,
        }
    }

    /// The server at `path`, if the worker is connected to it.
    pub(crate) fn server(&self, path: &Path) -> Option<ServerConfig> {
        match &self.lease.served {
            KeptDevice::Server(config) if config.path() == path => Some((**config).clone()),
            _ => None,
        }
    }

    /// Whose the lease is, as far as it can be known.
    pub(crate) fn owner(&self) -> LeaseOwner {
        LeaseOwner::new(self.lease.vm.clone(), self.borrower().as_ref())
    }

    fn restore(&mut self, tables: &dyn AdapterTables) -> Result<(), String> {
        let owner = self.owner();
        let KeptLease {
            device,
            requester,
            windows,
            ..
        } = &self.lease;
        // A worker that has ended has none open.
        if !requester || self.connection.is_none() {
            return Ok(());
        }
        let owner = owner.verified().map_err(|error| error.message)?;
        let entry = tables.take_requester(device, owner);
        let entry = entry.map_err(|error| error.to_string())?;
        self.requester = Some(entry);
        let mut windows = windows.iter();
        let restored = windows.all(|window| {
            tables.restore_window(entry, window.peer_address, window.bytes, window.range)
        });
        match restored {
            true => Ok(()),
            false => Err("the adapter ([fabric]) has no place for its windows any more".into()),
        }
    }

    /// The borrower, as far as it can be known.
    pub(crate) fn borrower(&self) -> Option<Identity> {
        let connection = self.connection.as_ref()?.try_clone().ok()?;
        Channel::from_socket(connection).identity().ok()
    }

    /// When the lease has begun.
    pub(crate) fn began(&self) -> Instant {
        let ago = self.lease.since.elapsed().unwrap_or_default();
        let now = Instant::now();
        now.checked_sub(ago).unwrap_or(now)
    }

    /// Ends the lease in order, and waits until its worker is gone. Returns whether it is.
    pub(crate) fn end(
        self,
        keeper: &Keeper,
        tables: Option<&dyn AdapterTables>,
        why: &str,
    ) -> bool {
        let KeptLease {
            device,
            vm,
            generation,
            pid,
            windows,
            ..
        } = &self.lease;
        log::warn!(
            "device {device}: ending its lease (VM {vm}, generation {generation}, worker process {pid}): {why}"
        );
        // If this fails, it is killed.
        let _ = Channel::from_socket(self.orders).shut_down_sending();
        let _ = wait(&self.pidfd, Some(END_TIMEOUT));
        // Fails if it has ended.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let has_ended = wait(&self.pidfd, Some(END_TIMEOUT));
        if !has_ended {
            log::error!("device {device}: its worker process {pid} does not end");
        }
        if let Some(handle) = self.handle.map(KeptHandle::into_handle)
            && let Err(error) = handle.take_down()
        {
            log::error!("device {device}: {}", Chain(&error));
        }
        if let (Some(tables), Some(entry)) = (tables, self.requester) {
            for window in windows {
                tables.give_back_window(entry, window.range);
            }
            tables.give_back_requester(entry);
        }
        keeper.forget(self.number);
        has_ended
    }
}

impl KeptLease {
    /// The version of the state that workers of this farside write for what is served.
    pub(crate) fn state(served: &KeptDevice) -> Option<u32> {
        match served {
            KeptDevice::Model(
                Model::Nvme { .. } | Model::VirtioBlk { .. } | Model::VirtioNet { .. },
            ) => Some(state::FORMAT.version()),
            KeptDevice::Model(Model::DmaTest)
            | KeptDevice::Function(..)
            | KeptDevice::Server(_) => None,
        }
    }

    /// For the keeper.
    fn recorded(&self) -> impl Serialize {
        Recorded {
            version: LEASES.version(),
            farside: FARSIDE.to_owned(),
            device: self.device.clone(),
            vm: self.vm.clone(),
            worker: self.worker,
            state: self.state,
            lease: self,
        }
    }

    /// What [`recorded`](Self::recorded) of this version or the one before has written.
    fn read(record: &[u8]) -> Option<Self> {
        if let Ok(Recorded { lease, .. }) = serde_json::from_slice::<Recorded<Self>>(record) {
            return Some(lease);
        }
        let mut lease: Self = serde_json::from_slice(record).ok()?;
        if matches!(lease.served, KeptDevice::Model(Model::Nvme { .. })) {
            lease.state = Some(1);
        }
        Some(lease)
    }

    /// Has the keeper keep it: see [`Keeper::keep`].
    pub(crate) fn keep(
        &self,
        keeper: &Keeper,
        fds: &[BorrowedFd<'_>],
        with_worker: usize,
    ) -> Option<u64> {
        keeper.keep(&self.recorded(), fds, with_worker)
    }

    /// Has the keeper keep it in place of the lease `number`.
    pub(crate) fn replace(&self, keeper: &Keeper, number: u64, fds: &[BorrowedFd<'_>]) {
        keeper.replace(number, &self.recorded(), fds);
    }

    /// As its next broker has it.
    pub(crate) fn resumed(mut self) -> Self {
        self.first_order = self.first_order.saturating_add(ORDERS);
        self
    }
}

/// What a broker's keeper has of a lease: updated before a call is replied to.
pub(crate) struct Record {
    pub(crate) keeper: Arc<Keeper>,
    /// None if it is not kept.
    pub(crate) number: Option<u64>,
    pub(crate) lease: KeptLease,
}

impl Record {
    pub(crate) fn update(&self) {
        if let Some(number) = self.number {
            self.keeper.update(number, &self.lease.recorded());
        }
    }

    /// The disk has so many bytes, from now on.
    pub(crate) fn resized(&mut self, bytes: u64) {
        if let KeptDevice::Model(Model::Nvme { size, .. } | Model::VirtioBlk { size, .. }) =
            &mut self.lease.served
        {
            *size = bytes;
            self.update();
        }
    }

    /// The worker has opened its function. From now on a broker is needed for the end of its DMA.
    pub(crate) fn opened(
        &mut self,
        worker: &Worker,
        connection: Option<BorrowedFd<'_>>,
        parts: &HandleParts,
        handle: &[OwnedFd; 2],
    ) {
        if let KeptDevice::Function(_, handle) = &mut self.lease.served {
            *handle = Some(parts.clone());
        }
        if let (Some(number), Some(connection)) = (self.number, connection) {
            let (mut fds, _) = descriptors(worker, connection, None);
            fds.extend(handle.iter().map(AsFd::as_fd));
            self.keeper.replace(number, &self.lease.recorded(), &fds);
        }
    }

    /// The lease has ended.
    pub(crate) fn forget(&mut self) {
        if let Some(number) = self.number.take() {
            self.keeper.forget(number);
        }
    }
}

/// The descriptors of a worker for its keeper.
pub(crate) fn descriptors<'a>(
    worker: &'a Worker,
    connection: BorrowedFd<'a>,
    image: Option<&'a File>,
) -> (Vec<BorrowedFd<'a>>, usize) {
    let with_worker: Vec<_> = [connection]
        .into_iter()
        .chain(image.map(AsFd::as_fd))
        .collect();
    let fds = [
        worker.pidfd.as_fd(),
        worker.orders.as_fd(),
        worker.calls.as_fd(),
        worker.log.as_fd(),
    ];
    let count = with_worker.len();
    (fds.into_iter().chain(with_worker).collect(), count)
}

/// Waits for a process to end. Returns whether it has.
pub(super) fn wait(pidfd: &OwnedFd, timeout: Option<Duration>) -> bool {
    let until = timeout.map(|timeout| Instant::now() + timeout);
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec::try_from(left).unwrap_or_default());
        let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
        match poll(&mut fds, left.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Whether the configuration is the one that was recorded as JSON. A later version may write keys that an earlier one has
/// left out. Other limits are the next worker's, and the image is looked at itself.
fn is_same<C: Serialize + DeserializeOwned>(now: &C, then: &str) -> bool {
    let written = |config: &C| {
        let mut config = serde_json::to_value(config).ok()?;
        for key in ["image", "limits"] {
            config.as_object_mut()?.remove(key);
        }
        Some(config)
    };
    let then = serde_json::from_str::<C>(then);
    let then = then.ok().and_then(|then| written(&then));
    then.is_some() && then == written(now)
}

fn is_at(file: &File, path: &Path) -> bool {
    let identity = |meta: fs::Metadata| (meta.dev(), meta.ino(), meta.len());
    let there = fs::metadata(path).map(identity);
    let here = file.metadata().map(identity);
    matches!((here, there), (Ok(here), Ok(there)) if here == there)
}

/// As [`Worker`] has them.
impl Adopted {
    /// The worker, whose parent is gone.
    pub(crate) fn into_worker(self, groups: Option<&cgroup::Delegated>) -> Worker {
        let group = self.lease.group.as_deref();
        let group = group.and_then(|path| groups?.find(path));
        Worker::adopted(
            self.lease.pid,
            self.pidfd,
            Channel::from_socket(self.orders),
            Channel::from_socket(self.calls),
            PipeReader::from(self.log),
            group,
        )
    }
}

#[cfg(test)]
mod tests;
