//! The broker's part of a device that workers serve.

mod start;

use std::{fs::File, io, path::Path, sync::Arc};

use farside_daemon::{DeviceId, VmName};
use farside_devices::{
    Device,
    block::{GrowError, Image, ImageId, SizeError},
    dma_test, nvme, state,
};
use farside_error_chain::Chain;
use farside_fabric::soft::{Adapter, AdapterTables};
use farside_lender_protocol::{BarOwner, Described, RamRange, RemoteError, STATE_PAGE, Transport};
use farside_pci::Description;

use super::{
    child::{Worker, Workers},
    handle::Handle,
    kept::{Adopted, Record},
    kept_running::Running,
};
use crate::{
    chains::boot_number,
    config,
    lease_owner::LeaseOwner,
    model::{check_model, not_flushed},
    refusals::{failed, invalid, no_disk},
    registry::Shared,
    source::{Available, DeviceSource, Report, Resized},
    vfio::VfioDevice,
    vfio_user::ServerDevice,
};

/// A device whose leases are served by workers.
pub(crate) struct WorkerDevice {
    pub(super) id: DeviceId,
    workers: Workers,
    /// Its lease of the former broker.
    adopted: Option<Adopted>,
    // Closed before the function is unbound.
    pub(super) kept: Option<Running>,
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
    /// Of a network device, with what the configuration has left open.
    model: config::Model,
    /// Locked while it is open. Of a network device, its tap interface.
    image: Option<Image>,
    described: Described,
    adapter: Adapter,
}

impl ModelKind {
    /// Takes the size that the medium of a disk has.
    fn take_size(&mut self) -> Result<Resized, RemoteError> {
        let Self {
            model,
            image,
            described,
            ..
        } = self;
        let (path, block_size, describe): (_, _, &dyn Fn(u64) -> Description) = match model {
            config::Model::Nvme(config) => (&config.image, config.block_size, &|size| {
                config.description(size)
            }),
            config::Model::VirtioBlk(config) => (&config.image, config.block_size, &|size| {
                config.description(size)
            }),
            config::Model::VirtioNet(_) | config::Model::DmaTest(_) => return Err(no_disk()),
        };
        let image = image.as_mut().ok_or_else(no_disk)?;
        let from = image.grow(block_size).map_err(|error| {
            let message = format!(
                "image {}: {}; {}",
                path.display(),
                Chain(&error),
                remedy(&error, path)
            );
            match error {
                GrowError::Io(_) => failed(message),
                GrowError::Size(_) => invalid(message),
            }
        })?;
        let Description { summary, .. } = describe(image.size);
        described.description.summary.clone_from(&summary);
        Ok(Resized {
            from,
            to: image.size,
            summary,
        })
    }

    /// The configuration of a controller that shares its namespace.
    fn reservations(&self) -> Option<&nvme::Config> {
        match &self.model {
            config::Model::Nvme(config) if config.shared.is_some() => Some(config),
            _ => None,
        }
    }
}

/// The remedy for an image that does not grow.
fn remedy(error: &GrowError, path: &Path) -> String {
    let path = path.display();
    match error {
        GrowError::Io(_) => "see the kernel log for errors of the device".to_owned(),
        GrowError::Size(SizeError::Shrinks { from, .. }) => format!(
            "give it its size again (of a file, `truncate -s {from} {path}`), or lend it anew (`farside lend --remove`, then `--add`)"
        ),
        GrowError::Size(SizeError::NotMultiple { block_size, .. }) => {
            format!("make it longer (of a file, `truncate -s %{block_size} {path}`)")
        }
        GrowError::Size(SizeError::TooLarge { .. }) => "make it shorter".to_owned(),
    }
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
        let (mut open, mut adopted, mut has_ended) = (None, adopted, false);
        let mut model = model;
        match adopted.as_mut().map(|it| it.go_on(&model, &adapter)) {
            Some(Ok(image)) => open = image,
            Some(Err(why)) => {
                if let Some(lease) = adopted.take() {
                    has_ended = lease.end(&workers.keeper, Some(adapter.tables()), &why);
                }
            }
            None => {}
        }
        let kept = STATE_PAGE + state::SIZE as u64;
        let (description, image, state) = match &mut model {
            config::Model::Nvme(config) => {
                config.validate()?;
                let image = open.take().map_or_else(|| config.open_image(), Ok)?;
                if let Some(file) = config.open_reservations()? {
                    config.prepare_reservations(&file, id.as_str(), boot_number()?)?;
                    if has_ended {
                        config.leave_reservations(id, false)?;
                    }
                }
                (config.description(image.size), Some(image), kept)
            }
            config::Model::VirtioBlk(config) => {
                config.validate()?;
                let image = open.take().map_or_else(|| config.open_image(), Ok)?;
                (config.description(image.size), Some(image), kept)
            }
            config::Model::VirtioNet(config) => {
                let adopted = adopted.as_ref().and_then(Adopted::network_device);
                let (complete, tap) = match (adopted, open.take()) {
                    (Some(complete), Some(tap)) => (complete, tap),
                    _ => {
                        let (complete, tap) = config.open_tap(id)?;
                        (complete, Image::of_tap(tap.file))
                    }
                };
                *config = complete;
                (config.description(), Some(tap), kept)
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

    /// The device of a vfio-user server, with its lease of the former broker.
    pub(crate) fn server(
        id: &DeviceId,
        server: ServerDevice,
        workers: Workers,
        adopted: Option<Adopted>,
    ) -> Self {
        Self::new(id, Kind::Server(Box::new(server)), workers, adopted)
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
            let has_ended = adopted.end(&self.workers.keeper, self.tables(), why);
            if has_ended && let Err(error) = self.process_gone(false) {
                log::error!("{error}");
            }
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

    /// Whether it goes on as it runs when its worker is gone.
    pub(crate) fn runs_on(&self) -> bool {
        !matches!(self.device, Kind::Model(_))
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
            Kind::Model(kind) => Some(match (&kind.image, &kind.model) {
                (None, _) => Ok(ImageId::None),
                (_, config::Model::VirtioNet(_)) => Ok(ImageId::Tap),
                (Some(image), _) => image.id(),
            }),
            Kind::Function(_) | Kind::Server(_) => None,
        }
    }

    /// The namespace, if it is shared.
    pub(crate) fn shared(&self) -> Option<Shared> {
        let Kind::Model(kind) = &self.device else {
            return None;
        };
        let file = kind.reservations()?.shared.as_ref()?;
        Some(Shared {
            // Other devices may name it by another path.
            file: file.canonicalize().unwrap_or_else(|_| file.clone()),
            size: kind.image.as_ref()?.size,
        })
    }

    /// The lease of `vm` has ended, with this last report and handle on the device.
    pub(crate) fn ended(&mut self, vm: VmName, report: Option<Report>, handle: Option<Handle>) {
        if let Some(report) = report {
            self.last = self.completed(report);
        }
        if let Some(handle) = handle {
            self.close(vm, handle);
        }
    }

    /// The process of a lease is gone, which may be `over`.
    ///
    /// # Errors
    /// The file of reservations cannot be used.
    pub(crate) fn process_gone(&self, over: bool) -> Result<(), RemoteError> {
        let Kind::Model(model) = &self.device else {
            return Ok(());
        };
        let left = model
            .reservations()
            .map_or(Ok(()), |config| config.leave_reservations(&self.id, over));
        left.map_err(|error| failed(format_args!("device {}: {}", self.id, Chain(&error))))
    }

    /// Closes a device that `vm` had.
    pub(super) fn close(&self, vm: VmName, handle: Handle) {
        if let (Kind::Function(function), Handle::Function(handle)) = (&self.device, handle) {
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
        owner: Option<&LeaseOwner>,
        transport: Transport,
        ram: &[RamRange],
    ) -> Result<(), RemoteError> {
        match &self.device {
            Kind::Model(model) => match transport {
                // No adapter is on the way.
                Transport::Network => Ok(()),
                _ => check_model(&model.adapter, transport, ram),
            },
            Kind::Function(function) => function.check(owner, transport, ram),
            Kind::Server(server) => server.check(owner, transport, ram),
        }
    }

    fn flush(&mut self) -> Result<(), RemoteError> {
        let file = match &self.device {
            Kind::Model(kind) if matches!(kind.model, config::Model::VirtioNet(_)) => None,
            _ => self.file(),
        };
        let flushed = file.map_or(Ok(()), File::sync_data);
        flushed.map_err(|error| not_flushed(&self.id, &error))
    }

    fn take_size(&mut self) -> Result<Resized, RemoteError> {
        let Kind::Model(kind) = &mut self.device else {
            return Err(no_disk());
        };
        kind.take_size()
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
        self.let_run_end()
    }
}
