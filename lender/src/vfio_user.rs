//! Device source `vfio-user`: the device of another vfio-user server of this host, by its socket.
//!
//! The server has the device; farside has the borrow. Guest memory goes to the server by descriptor when a window
//! opens, at the IOVA of the window, so after the guest has enabled bus mastering and not before; the VMM's eventfds
//! go there, and the server's descriptors of BARs go to the VMM. So nothing here is on the data path.
//!
//! # What the server is trusted with
//!
//! It is started by the lender's owner. With the descriptor of a window's memory it can reach all of that file, and
//! for as long as it keeps it: the memory is the VM's until the last descriptor is closed, so it never becomes
//! another's. Its answers are limited and have deadlines
//! ([`farside_vfio_user_client`]); one that is late or invalid ends the connection, and the device is lost to its
//! guest as by surprise removal.
//!
//! # When a worker is killed
//!
//! The lender has the connection, too, so the server does not notice. It goes on with DMA, interrupts and mapped BARs, and
//! the next worker with the connection: it drops a reply that the former one did not take, and sets up again what has
//! changed since ([`record`]).

mod bars;
mod leased;
mod messages;
mod record;
mod server;

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use farside_daemon::{DeviceId, VmName};
use farside_error_chain::Chain;
use farside_fabric::PAGE_SIZE;
use farside_irq_relay::{IrqCounts, IrqIndex};
use farside_lender_protocol::{BarOwner, Described, RamRange, RemoteError, STATE_PAGE, Transport};
use farside_vfio::{Region, config_size, describe};
use farside_vfio_user_client::{Client, ClientError, Limits};
use serde::{Deserialize, Serialize};

use crate::{
    chains,
    lease_owner::LeaseOwner,
    refusals::{failed, invalid, unsupported},
    source::{Available, BorrowerMemory, DeviceSource, Leased, NotLeased, Report},
    state_file::{LeasePage, StateFile},
};
use leased::LeasedServer;
use server::Server;

/// Regions of a PCI device that matter: BARs, expansion ROM and configuration space.
const REGIONS: u32 = 8;

/// Why a server's device cannot be lent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServerError {
    #[error("vfio-user server {path}", path = path.display())]
    Client { path: PathBuf, source: ClientError },
    #[error("vfio-user server {path}: {problem}", path = path.display())]
    Unsupported { path: PathBuf, problem: String },
}

/// The device of a server, for one lease at a time.
pub(crate) struct ServerDevice {
    path: PathBuf,
    described: Described,
    /// The connection on which it was described, until a lease takes it: a server may end with its first one.
    first: Mutex<Option<Client>>,
}

/// A server that a worker is connected to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ServerConfig {
    path: PathBuf,
    limits: Limits,
    described: Described,
}

impl ServerConfig {
    /// Where the server is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl ServerDevice {
    /// Connects to the server at `path`, and reads what its device is, unless a worker is connected to it, which is `known`. Its
    /// leases may `go_on` in another process.
    pub(crate) fn open(
        path: &Path,
        known: Option<ServerConfig>,
        go_on: bool,
    ) -> Result<Self, ServerError> {
        if let Some(ServerConfig {
            path, described, ..
        }) = known
        {
            return Ok(Self {
                path,
                described,
                first: Mutex::default(),
            });
        }
        let failed = |source| ServerError::Client {
            path: path.to_owned(),
            source,
        };
        let mut client = Client::connect(path).map_err(failed)?;
        let device = Device::read(&mut client).map_err(failed)?;
        let described = device.describe(path);
        let mut described = described.map_err(|problem| ServerError::Unsupported {
            path: path.to_owned(),
            problem,
        })?;
        if go_on {
            described.state = STATE_PAGE;
        }
        Ok(Self {
            path: path.to_owned(),
            described,
            first: Mutex::new(Some(client)),
        })
    }

    /// A connection for a lease.
    fn connect(&self) -> Result<Client, RemoteError> {
        // Replaced as a whole.
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        match { first }.take() {
            Some(client) => Ok(client),
            None => Client::connect(&self.path).map_err(|error| {
                failed(format_args!(
                    "vfio-user server {}: {}",
                    self.path.display(),
                    Chain(&error)
                ))
            }),
        }
    }

    /// A connection for a lease in a worker.
    pub(crate) fn for_worker(&self) -> Result<(ServerConfig, OwnedFd), RemoteError> {
        let (socket, limits) = self.connect()?.into_socket();
        let config = ServerConfig {
            path: self.path.clone(),
            limits,
            described: self.described.clone(),
        };
        Ok((config, socket))
    }
}

/// What a server says of its device.
struct Device {
    can_reset: bool,
    config: Vec<u8>,
    regions: Vec<Region>,
    counts: IrqCounts,
    /// The files of BARs that can be mapped.
    files: [Option<(OwnedFd, u64)>; 6],
}

impl Device {
    fn read(client: &mut Client) -> Result<Self, ClientError> {
        let info = client.device_info()?;
        let mut regions = Vec::new();
        let mut files = [const { None }; 6];
        for index in 0..info.regions.min(REGIONS) {
            let region = client.region_info(index)?;
            let areas = region.areas.map(|areas| {
                let areas = areas.into_iter();
                areas.map(|area| (area.offset, area.size)).collect()
            });
            regions.push(Region {
                // What is no whole pages of the file cannot be mapped where it belongs.
                can_map: matches!(&region.file, Some((_, offset)) if offset % PAGE_SIZE == 0),
                size: region.size,
                file_offset: region.file.as_ref().map_or(0, |(_, offset)| *offset),
                sparse: areas,
            });
            if let Some(file) = files.get_mut(index as usize) {
                *file = region.file;
            }
        }
        let mut config = vec![0; config_size(&regions)];
        client.config_read(0, &mut config)?;
        let mut vectors = [0; IrqIndex::ALL.len()];
        for (index, vectors) in (0..info.irqs).zip(&mut vectors) {
            *vectors = client.irq_count(index)?;
        }
        Ok(Self {
            can_reset: info.can_reset,
            config,
            regions,
            counts: counts_of(vectors),
            files,
        })
    }

    fn describe(&self, path: &Path) -> Result<Described, String> {
        if !self.can_reset {
            return Err(
                "its device cannot be reset: what one VM leaves in it would be the next VM's to find".into(),
            );
        }
        let config = self.config.clone();
        let description = describe(path.display(), config, &self.regions, self.counts)?;
        Ok(Described {
            description,
            bars: BarOwner::Lender,
            state: 0,
            rom: 0,
        })
    }
}

/// The vectors of each interrupt type, as far as a function may have them; `describe` compares them with
/// configuration space.
fn counts_of(mut vectors: [u32; 5]) -> IrqCounts {
    for (index, most) in [
        (IrqIndex::Msi, IrqCounts::MAX_MSI),
        (IrqIndex::Msix, IrqCounts::MAX_MSIX),
    ] {
        let vectors = &mut vectors[index as usize];
        *vectors = (*vectors).min(most.into());
    }
    // They fit now.
    IrqCounts::of(vectors).unwrap_or_default()
}

impl Available for ServerDevice {
    fn kind(&self) -> &'static str {
        "vfio-user"
    }

    fn described(&self) -> &Described {
        &self.described
    }

    fn check(
        &self,
        _: Option<&LeaseOwner>,
        transport: Transport,
        _: &[RamRange],
    ) -> Result<(), RemoteError> {
        local(transport)
    }

    fn flush(&mut self) -> Result<(), RemoteError> {
        // The medium is the server's, and the guest's driver flushes it.
        Ok(())
    }

    fn report(&self) -> Report {
        Report::default()
    }
}

impl DeviceSource for ServerDevice {
    fn lease(
        self: Box<Self>,
        transport: Transport,
        owner: &LeaseOwner,
        memory: BorrowerMemory,
    ) -> Result<Leased, NotLeased> {
        let opened = local(transport)
            .and_then(|()| no_bar_memory(&memory.bars))
            .and_then(|()| Server::open(self.connect()?, &self.path, &self.described));
        LeasedServer::lease(self, owner.vm(), opened, None)
    }
}

/// The device of a server, in the worker process that serves its lease.
pub(crate) struct WorkerServer {
    id: DeviceId,
    described: Described,
    opened: Option<(Arc<Server>, Files)>,
}

/// The files of BARs, by BAR, with the offset of the BAR's start.
type Files = [Option<(OwnedFd, u64)>; 6];

impl WorkerServer {
    /// Resets the device, and takes the files of its BARs. With `adopts`, goes on with a device as a worker before has left
    /// it.
    pub(crate) fn open(
        (id, vm): (&DeviceId, &VmName),
        config: ServerConfig,
        socket: OwnedFd,
        adopts: bool,
    ) -> Result<Self, RemoteError> {
        let ServerConfig {
            path,
            limits,
            described,
        } = config;
        let opened = match adopts {
            true => Server::adopt(socket, limits, &path, &described)
                .map_err(|error| chains::ended(id, vm, &error.message))?,
            false => Server::open(Client::resume(socket, limits), &path, &described)?,
        };
        Ok(Self {
            id: id.clone(),
            described,
            opened: Some(opened),
        })
    }

    /// The page of a lease that goes on.
    fn keep(&self, vm: &VmName, state: StateFile) -> Result<LeasePage, RemoteError> {
        let goes_on = state.goes_on;
        let (page, _) = state.map(&self.id, self.described.state)?;
        let server = self.opened.as_ref().map(|(server, _)| server);
        match server.is_none_or(|server| server.record_in(page.page(), goes_on)) {
            true => Ok(page),
            false => Err(chains::ended(
                &self.id,
                vm,
                "its server does DMA by messages, or has too many mappings",
            )),
        }
    }
}

impl Available for WorkerServer {
    fn kind(&self) -> &'static str {
        "vfio-user"
    }

    fn described(&self) -> &Described {
        &self.described
    }

    fn check(
        &self,
        _: Option<&LeaseOwner>,
        _: Transport,
        _: &[RamRange],
    ) -> Result<(), RemoteError> {
        Err(unsupported("the lender's process checks that"))
    }

    fn flush(&mut self) -> Result<(), RemoteError> {
        Ok(())
    }

    fn report(&self) -> Report {
        Report::default()
    }
}

impl DeviceSource for WorkerServer {
    fn lease(
        mut self: Box<Self>,
        transport: Transport,
        owner: &LeaseOwner,
        memory: BorrowerMemory,
    ) -> Result<Leased, NotLeased> {
        let page = local(transport)
            .and_then(|()| no_bar_memory(&memory.bars))
            .and_then(|()| memory.state.map(|it| self.keep(owner.vm(), it)).transpose());
        let (page, opened) = match page {
            Ok(page) => (page, self.opened.take()),
            Err(error) => {
                return Err(NotLeased {
                    source: self,
                    error,
                });
            }
        };
        let opened = opened.ok_or_else(|| failed("this process has served its lease"));
        LeasedServer::lease(self, owner.vm(), opened, page)
    }
}

/// Refuses memory for BARs, which the server has.
pub(crate) fn no_bar_memory(memory: &[OwnedFd]) -> Result<(), RemoteError> {
    match memory {
        [] => Ok(()),
        _ => Err(invalid(
            "the device has BARs of its own: the borrower brings none".into(),
        )),
    }
}

/// Refuses transports without descriptors.
fn local(transport: Transport) -> Result<(), RemoteError> {
    match transport {
        Transport::SharedMemory => Ok(()),
        Transport::Ntb | Transport::Network => Err(unsupported(
            "the device of another vfio-user server is lent to VMs of the lender's host only: it takes guest memory by descriptor",
        )),
    }
}
