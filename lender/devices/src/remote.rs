//! Models that are lent to another host: the controller runs there, next to the guest.
//!
//! The connection of the lease carries operations on the model's medium. A model without one has a medium
//! of 0 bytes: its connection carries none, and says that the lease still holds.

use std::{
    io,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use farside_fabric::memory::HostSlice;
use farside_pci::Description;
use serde::{Deserialize, Serialize};

use crate::{
    Bus, Device,
    block::{BlockQueue, RemoteMedium},
    dma_test::DmaTest,
    nvme::{self, Nvme},
    virtio::{self, VirtioBlk, VirtioNet},
};

/// Time between two looks at the connection of a device that is never idle: less than
/// [`Link::TICK`](farside_medium::Link::TICK).
const LOOK: Duration = Duration::from_millis(200);

/// A model, as the lender of its medium describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Model {
    /// A DMA test device, which has no medium.
    DmaTest(NoMedium),
    /// A virtio-blk device.
    VirtioBlk(Virtio),
    /// A virtio-net device.
    VirtioNet(Net),
    /// An NVMe controller that shares its namespace.
    SharedNvme(Sharing),
    /// An NVMe controller.
    Nvme(nvme::Config),
}

/// A virtio-blk device, by type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Virtio {
    /// A virtio-blk device.
    pub virtio_blk: virtio::Config,
}

/// A virtio-net device, by type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Net {
    /// A virtio-net device, in which the address and the MTU are said.
    pub virtio_net: virtio::net::Config,
}

/// An NVMe controller that shares its namespace, by type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Sharing {
    /// The controller.
    pub shared_nvme: SharedNvme,
}

/// An NVMe controller that shares its namespace with others that the lender knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SharedNvme {
    /// Without the file, which the lender has.
    pub config: nvme::Config,
    /// Its number in the NVM subsystem.
    pub controller: u16,
    /// Of the namespace.
    pub uuid: [u8; 16],
}

/// A model without a medium, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NoMedium {
    /// The DMA test device.
    DmaTest,
}

/// Why the controller of a lent model cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// Its configuration is invalid.
    #[error(transparent)]
    Nvme(#[from] nvme::ConfigError),
    /// As above.
    #[error(transparent)]
    Virtio(#[from] virtio::ConfigError),
    /// As above.
    #[error(transparent)]
    Net(#[from] virtio::net::ConfigError),
    /// The system is out of descriptors.
    #[error("cannot watch the connection of a lease")]
    System(#[source] io::Error),
}

impl Model {
    /// The controller of the device `id`, for a medium that has so many bytes and may read as zeroes where
    /// it is deallocated.
    ///
    /// # Errors
    /// The configuration is invalid, or the system is out of descriptors.
    pub fn controller(
        &self,
        id: &str,
        medium: RemoteMedium,
        size: (u64, bool),
    ) -> Result<Box<dyn Device>, RemoteError> {
        Ok(match self {
            Self::Nvme(config) => Box::new(Nvme::with_remote(id, config, medium, size)?),
            Self::SharedNvme(Sharing { shared_nvme }) => {
                let SharedNvme {
                    config,
                    controller,
                    uuid,
                } = shared_nvme;
                let nvme = Nvme::with_remote(id, config, medium, size)?;
                Box::new(nvme.sharing_remotely(config, (*controller, *uuid)))
            }
            Self::VirtioBlk(Virtio { virtio_blk }) => {
                Box::new(VirtioBlk::with_remote(id, virtio_blk, medium, size)?)
            }
            Self::VirtioNet(Net { virtio_net }) => {
                Box::new(VirtioNet::with_remote(id, virtio_net, medium)?)
            }
            Self::DmaTest(NoMedium::DmaTest) => {
                Box::new(WithoutMedium::new(DmaTest::new(), medium).map_err(RemoteError::System)?)
            }
        })
    }
}

/// A model that has neither a medium nor a descriptor of its own, under a lease of another host. While
/// the lender is out of reach it does no DMA, as a model does none that waits for its medium. Given up, it
/// does none until the guest has released it.
struct WithoutMedium<D> {
    device: D,
    /// No operation is ever started.
    lease: BlockQueue,
    looked: Instant,
    /// Quiesced because the lender is out of reach.
    held: bool,
    /// Quiesced by the owner.
    quiesced: bool,
}

impl<D: Device> WithoutMedium<D> {
    fn new(device: D, lease: RemoteMedium) -> io::Result<Self> {
        debug_assert!(device.wake_fd().is_none());
        Ok(Self {
            device,
            lease: BlockQueue::remote(lease, 1)?,
            looked: Instant::now(),
            held: false,
            quiesced: false,
        })
    }

    /// Looks at the connection. Returns whether there is more to see at once.
    fn look(&mut self, bus: &mut Bus<'_>) -> bool {
        self.looked = Instant::now();
        let busy = self.lease.is_busy();
        self.hold(bus);
        busy
    }

    /// Holds the device while the lender is out of reach.
    fn hold(&mut self, bus: &mut Bus<'_>) {
        let away = !self.lease.is_connected();
        if away == self.held {
            return;
        }
        self.held = away;
        match (away, self.quiesced) {
            (true, _) => {
                self.device.quiesce(bus);
            }
            (false, false) => self.device.resume(bus),
            (false, true) => {}
        }
    }
}

impl<D: Device> Device for WithoutMedium<D> {
    fn description(&self) -> &Description {
        self.device.description()
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8], bus: &mut Bus<'_>) {
        self.device.bar_read(bar, offset, data, bus);
    }

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8], bus: &mut Bus<'_>) {
        // After a reset, which has resumed the device.
        self.hold(bus);
        self.device.bar_write(bar, offset, data, bus);
    }

    fn set_bar_memory(&mut self, bar: u8, area: usize, memory: Option<HostSlice>) {
        self.device.set_bar_memory(bar, area, memory);
    }

    fn poll(&mut self, bus: &mut Bus<'_>) -> bool {
        if self.looked.elapsed() >= LOOK {
            self.look(bus);
        } else {
            self.hold(bus);
        }
        self.device.poll(bus)
    }

    fn enable_notifications(&mut self, bus: &mut Bus<'_>) -> bool {
        let busy = self.look(bus);
        self.device.enable_notifications(bus) && !busy
    }

    fn is_polled(&self) -> bool {
        self.device.is_polled()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.lease.wake_fd())
    }

    fn quiesce(&mut self, bus: &mut Bus<'_>) -> bool {
        self.quiesced = true;
        self.device.quiesce(bus)
    }

    fn resume(&mut self, bus: &mut Bus<'_>) {
        self.quiesced = false;
        if !self.held {
            self.device.resume(bus);
        }
    }

    fn problem(&self) -> Option<&str> {
        self.device.problem()
    }

    fn in_flight(&self) -> Option<(u64, u64)> {
        self.device.in_flight()
    }

    fn stats(&self) -> Vec<(&'static str, u64)> {
        self.device.stats()
    }

    fn reset(&mut self) {
        self.device.reset();
        (self.held, self.quiesced) = (false, false);
    }
}

#[cfg(test)]
mod tests;
