//! The software model that a worker serves.

use std::os::fd::OwnedFd;

use farside_daemon::DeviceId;
use farside_devices::{Device, block::Image, dma_test::DmaTest, nvme::Nvme, virtio::VirtioBlk};

use super::{WorkerError, messages::Model};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Creates a software model, whose image, if it has one, is the next descriptor.
pub(super) fn create(
    id: &DeviceId,
    model: Model,
    next: &mut dyn FnMut() -> Result<OwnedFd, WorkerError>,
) -> Result<Box<dyn Device>, WorkerError> {
    let (config, size, punches_holes, open): (_, _, _, fn(_, &_, _) -> _) = match model {
        Model::DmaTest => return Ok(Box::new(DmaTest::new())),
        Model::Nvme {
            config,
            size,
            punches_holes,
        } => (config, size, punches_holes, nvme),
        Model::VirtioBlk {
            config,
            size,
            punches_holes,
        } => (config, size, punches_holes, virtio_blk),
    };
    let image = Image {
        file: next()?.into(),
        size,
        punches_holes,
    };
    open(id, &config, image).map_err(WorkerError::Device)
}

fn nvme(id: &DeviceId, config: &str, image: Image) -> Result<Box<dyn Device>, Error> {
    let config = serde_json::from_str(config)?;
    Ok(Box::new(Nvme::with_image(id, &config, image)?))
}

fn virtio_blk(id: &DeviceId, config: &str, image: Image) -> Result<Box<dyn Device>, Error> {
    let config = serde_json::from_str(config)?;
    Ok(Box::new(VirtioBlk::with_image(id, &config, image)?))
}

/// An empty file, in place of the medium of a model that has none.
pub(super) fn no_image() -> std::io::Result<OwnedFd> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    Ok(rustix::fs::memfd_create("no-medium", flags)?)
}
