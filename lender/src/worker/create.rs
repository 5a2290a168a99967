//! The software model that a worker serves.

use std::{
    fs::File,
    os::fd::{AsRawFd, OwnedFd},
};

use farside_daemon::DeviceId;
use farside_devices::{
    Device,
    block::{BlockQueue, DEPTH, Image},
    dma_test::DmaTest,
    nvme::{self, LentReservations, Nvme, ReservationFile},
    virtio::{VirtioBlk, VirtioNet},
};

use super::{
    WorkerError,
    messages::{Model, ServedMedium},
};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// The next descriptor that the broker has sent.
type Next<'a> = &'a mut dyn FnMut() -> Result<OwnedFd, WorkerError>;

/// Creates a software model, whose image or tap interface, if it has one, is the next descriptor, and the file of
/// reservations of a shared namespace the one after that, which is added to `locks`.
pub(super) fn create(
    id: &DeviceId,
    model: Model,
    next: Next<'_>,
    locks: &mut Vec<u64>,
) -> Result<Box<dyn Device>, WorkerError> {
    let created = match model {
        Model::DmaTest => return Ok(Box::new(DmaTest::new())),
        Model::VirtioNet { config } => virtio_net(id, &config, next()?),
        Model::VirtioBlk {
            config,
            size,
            punches_holes,
        } => virtio_blk(id, &config, image(next()?, size, punches_holes)),
        Model::Nvme {
            config,
            size,
            punches_holes,
        } => {
            let image = image(next()?, size, punches_holes);
            nvme(id, &config, image, (next, locks))
        }
    };
    created.map_err(WorkerError::Device)
}

fn image(file: OwnedFd, size: u64, punches_holes: bool) -> Image {
    Image {
        file: file.into(),
        size,
        punches_holes,
    }
}

fn nvme(
    id: &DeviceId,
    config: &str,
    image: Image,
    (next, locks): (Next<'_>, &mut Vec<u64>),
) -> Result<Box<dyn Device>, Error> {
    let config: nvme::Config = serde_json::from_str(config)?;
    let mut nvme = Nvme::with_image(id, &config, image)?;
    if config.shared.is_some() {
        let file = locked(next()?, locks);
        let file = config.map_reservations(file, id)?;
        nvme = nvme.sharing(&config, file)?;
    }
    Ok(Box::new(nvme))
}

fn virtio_blk(id: &DeviceId, config: &str, image: Image) -> Result<Box<dyn Device>, Error> {
    let config = serde_json::from_str(config)?;
    Ok(Box::new(VirtioBlk::with_image(id, &config, image)?))
}

fn virtio_net(id: &DeviceId, config: &str, tap: OwnedFd) -> Result<Box<dyn Device>, Error> {
    let config = serde_json::from_str(config)?;
    Ok(Box::new(VirtioNet::with_tap(id, &config, tap.into())?))
}

/// Opens the medium of a model whose controller is at the borrower.
pub(super) fn open_medium(served: &ServedMedium, image: OwnedFd) -> std::io::Result<BlockQueue> {
    let block = match served.frames {
        true => BlockQueue::tap(image.into(), DEPTH),
        false => BlockQueue::open(image.into(), served.engine, DEPTH),
    };
    block?.limited(served.limits)
}

/// The part that a borrower's controller has of a shared namespace.
pub(super) fn map_reservations(
    id: &DeviceId,
    file: OwnedFd,
    locks: &mut Vec<u64>,
) -> Result<LentReservations, Error> {
    let file = ReservationFile::map(locked(file, locks), id)?;
    Ok(LentReservations::new(file)?)
}

/// Adds a file to those that may be locked.
fn locked(file: OwnedFd, locks: &mut Vec<u64>) -> File {
    locks.push(file.as_raw_fd().unsigned_abs().into());
    file.into()
}

/// An empty file, in place of the medium of a model that has none.
pub(super) fn no_image() -> std::io::Result<OwnedFd> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    Ok(rustix::fs::memfd_create("no-medium", flags)?)
}
