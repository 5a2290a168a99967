//! Opens the devices of a configuration.

use std::{collections::BTreeSet, convert::identity, sync::Arc, thread::JoinHandle};

use farside_daemon::{DeviceId, Wakeup};
use farside_devices::{Device, dma_test, nvme, virtio};
use farside_error_chain::Chain;
use farside_fabric::soft::Adapter;
use farside_host_pci::{CreatedVfs, HostPci};
use farside_ntb::HostEndpoint;
use farside_vfio::{Api, SecondHandle, VfioError};

use crate::{
    config::{Borrower, Config, Model, Source, VfioUserConfig},
    device_loop::Lendable,
    model::ModelDevice,
    registry::Group,
    server::StartError,
    vfio::{self, FaultWatch, VfioDevice},
    vfio_user::{ServerDevice, ServerError},
    worker::{ANOTHER_KIND, Adopted, WorkerDevice, Workers},
};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// A device, ready to be lent.
pub(crate) struct OpenedDevice {
    pub(crate) id: DeviceId,
    pub(crate) device: Lendable,
    /// Who may borrow it.
    pub(crate) borrowers: Vec<Borrower>,
    /// The IOMMU group that it shares with others of this lender.
    pub(crate) group: Option<Arc<Group>>,
}

/// The devices of a lender.
pub(crate) struct Opened {
    pub(crate) devices: Vec<OpenedDevice>,
    /// The thread that reads the kernel log until the lender stops.
    pub(crate) fault_reader: Option<JoinHandle<()>>,
    /// This host's NTB endpoint: released after all devices are closed.
    pub(crate) ntb: Option<HostEndpoint>,
    /// The created virtual functions: removed after all devices are closed.
    pub(crate) vfs: Vec<CreatedVfs>,
}

/// Opens all devices. On error, all changes are rolled back; a volume that cannot be opened is left out, unless a VM
/// has it.
pub(crate) fn open(
    config: &Config,
    volumes: &BTreeSet<DeviceId>,
    adapter: &Adapter,
    workers: Option<&Workers>,
    mut adopted: Vec<Adopted>,
    stop: &Wakeup,
) -> Result<Opened, StartError> {
    let host = HostPci::new();
    let ntb = config
        .ntb
        .map(|ntb| HostEndpoint::open(ntb.function, ntb.per_vm));
    let ntb = ntb.transpose().map_err(StartError::Ntb)?;
    let vfs = vfio::create_vfs(&host, config)?;
    let mut devices: Vec<OpenedDevice> = Vec::new();
    for device in &config.device {
        if let Source::Model(model) = &device.source {
            let lease = take(&mut adopted, &device.id);
            let may_fail = lease.is_none() && volumes.contains(&device.id);
            let opened = match open_model(&device.id, model, adapter, workers, lease) {
                Err(error) if may_fail => {
                    log::error!("volume {} is not lent: {}", device.id, Chain(&*error));
                    continue;
                }
                opened => opened.map_err(|source| StartError::Device {
                    id: device.id.clone(),
                    source,
                })?,
            };
            devices.push(OpenedDevice {
                id: device.id.clone(),
                device: opened,
                borrowers: device.borrowers.clone(),
                group: None,
            });
        }
    }
    for device in &config.device {
        if let Source::VfioUser(server) = &device.source {
            let lease = take(&mut adopted, &device.id);
            let lendable = open_server(&device.id, server, workers, lease);
            devices.push(OpenedDevice {
                id: device.id.clone(),
                device: lendable.map_err(|source| StartError::Device {
                    id: device.id.clone(),
                    source: source.into(),
                })?,
                borrowers: device.borrowers.clone(),
                group: None,
            });
        }
    }
    let found = vfio::find(&host, config, identity)?;
    let mut fault_reader = None;
    if !found.is_empty() {
        let api = vfio::api(config).map_err(vfio::BindError::from)?;
        log::info!("physical devices are reached through VFIO {api}");
        let (watch, reader) = FaultWatch::start(stop.clone());
        fault_reader = reader;
        for found in &found {
            let Some(group) = &found.group else { continue };
            log::info!(
                "device {} shares IOMMU group {} with others of this lender: one VM at a time has them",
                found.id,
                group.members.number
            );
            // Before any of the group is opened.
            if let (Some(lease), Some(workers)) = (take(&mut adopted, &found.id), workers) {
                let why = "it shares its IOMMU group with another device now";
                lease.end(&workers.keeper, None, why);
            }
        }
        for found in found {
            let (id, borrowers) = (found.id.clone(), found.borrowers.clone());
            let lease = take(&mut adopted, &id);
            let known = lease.as_ref().and_then(|it| it.function(found.bdf, api));
            let lease = match (lease, &known, workers) {
                (Some(lease), None, Some(workers)) => {
                    lease.end(&workers.keeper, None, ANOTHER_KIND);
                    None
                }
                (lease, ..) => lease,
            };
            let group = found.group.clone();
            let workers = workers.filter(|_| group.is_none() && SecondHandle::can_take_down(api));
            let device = VfioDevice::open(
                found,
                api,
                ntb.as_ref().map(|ntb| ntb.adapter().clone()),
                Arc::clone(&watch),
                stop.clone(),
                known,
                workers.is_some(),
            );
            let device = match device {
                Err(error @ VfioError::Busy { .. }) if group.is_some() => {
                    log::error!(
                        "device {id} is not lent until this lender is started again: {}",
                        Chain(&error)
                    );
                    continue;
                }
                // iommufd's answer while another process has another function of the group.
                Err(error @ VfioError::NoInterruptRemapping { .. })
                    if group.is_some() && api == Api::Iommufd =>
                {
                    log::error!(
                        "device {id} is not lent until this lender is started again: another process has a function of its IOMMU group, or {}",
                        Chain(&error)
                    );
                    continue;
                }
                opened => opened.map_err(|source| StartError::Device {
                    id: id.clone(),
                    source: source.into(),
                })?,
            };
            let device = match workers {
                Some(workers) => {
                    let device = WorkerDevice::function(&id, device, workers.clone(), lease);
                    Lendable::InWorker(Box::new(device))
                }
                None => Lendable::Here(Box::new(device)),
            };
            devices.push(OpenedDevice {
                id,
                device,
                borrowers,
                group: group.map(|group| Arc::clone(&group.members)),
            });
        }
    }
    if let Some(workers) = workers {
        for lease in adopted {
            lease.end(
                &workers.keeper,
                None,
                "the device is not configured any more",
            );
        }
    }
    let mut ids = BTreeSet::new();
    for OpenedDevice { id, device, .. } in &mut devices {
        // The ids of several functions have a number appended.
        if !ids.insert(id.clone()) {
            return Err(StartError::Device {
                id: id.clone(),
                source: "another device has that id".into(),
            });
        }
        let summary = &device.available().described().description.summary;
        log::info!("lending {id} ({summary})");
    }
    Ok(Opened {
        devices,
        fault_reader,
        ntb,
        vfs,
    })
}

/// Takes the lease of a device.
fn take(adopted: &mut Vec<Adopted>, id: &DeviceId) -> Option<Adopted> {
    let found = adopted.iter().position(|it| it.lease.device == *id);
    found.map(|n| adopted.swap_remove(n))
}

/// Connects to a vfio-user server.
pub(crate) fn open_server(
    id: &DeviceId,
    server: &VfioUserConfig,
    workers: Option<&Workers>,
    adopted: Option<Adopted>,
) -> Result<Lendable, ServerError> {
    let known = adopted.as_ref().and_then(|it| it.server(&server.socket));
    let adopted = match (adopted, &known, workers) {
        (Some(lease), None, Some(workers)) => {
            lease.end(&workers.keeper, None, ANOTHER_KIND);
            None
        }
        (lease, ..) => lease,
    };
    let device = ServerDevice::open(&server.socket, known, workers.is_some())?;
    Ok(match workers {
        Some(workers) => {
            let device = WorkerDevice::server(id, device, workers.clone(), adopted);
            Lendable::InWorker(Box::new(device))
        }
        None => Lendable::Here(Box::new(device)),
    })
}

/// Opens a software model.
pub(crate) fn open_model(
    id: &DeviceId,
    model: &Model,
    adapter: &Adapter,
    workers: Option<&Workers>,
    adopted: Option<Adopted>,
) -> Result<Lendable, AnyError> {
    if let Some(workers) = workers {
        let (adapter, workers) = (adapter.clone(), workers.clone());
        let device = WorkerDevice::open(id, model.clone(), adapter, workers, adopted)?;
        return Ok(Lendable::InWorker(Box::new(device)));
    }
    let device: Box<dyn Device> = match model {
        Model::Nvme(config) => Box::new(nvme::Nvme::open(id, config)?),
        Model::VirtioBlk(config) => Box::new(virtio::VirtioBlk::open(id, config)?),
        Model::VirtioNet(config) => Box::new(virtio::VirtioNet::open(id, config)?),
        Model::DmaTest(_) => Box::new(dma_test::DmaTest::new()),
    };
    let model = ModelDevice::new(id, device, adapter.clone())?;
    Ok(Lendable::Here(Box::new(model)))
}
