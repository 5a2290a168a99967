//! The device of a server during a lease.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Weak},
    time::Duration,
};

use farside_daemon::VmName;
use farside_fabric::{
    FabricError, Iova, LenderPath, MemoryRange, PeerAddress,
    memory::{HostSlice, SharedMemory},
};
use farside_lender_protocol::{BarMemory, RemoteError};
use farside_pci::{Piece, regs::COMMAND_MASTER};
use farside_vfio::{Composition, Mapper};
use rustix::event::epoll;

use super::{Files, Server};
use crate::{
    refusals::{internal, refused},
    source::{DeviceSource, Irqs, Leased, LeasedDevice, NotLeased, Report},
    state_file::LeasePage,
    vfio::{ConfigAccess, ForwardedRegisters, FunctionIrqs},
};

/// A lent device.
pub(super) struct LeasedServer {
    path: Composition<ServerMapper>,
    irqs: FunctionIrqs<Server>,
    registers: ForwardedRegisters<Server>,
    /// Readable when the server or a relayed interrupt is there.
    wake: OwnedFd,
    server: Arc<Server>,
    /// The lease goes on if this process ends.
    lease_page: Option<LeasePage>,
    owner: Box<dyn DeviceSource>,
}

impl LeasedServer {
    /// The lease of `owner`, if its server was `opened`.
    pub(super) fn lease(
        owner: Box<dyn DeviceSource>,
        vm: &VmName,
        opened: Result<(Arc<Server>, Files), RemoteError>,
        lease_page: Option<LeasePage>,
    ) -> Result<Leased, NotLeased> {
        let description = owner.described().description.clone();
        let begun = opened.and_then(|(server, files)| {
            let irqs = FunctionIrqs::new(&description, Arc::clone(&server))?;
            let wake = either(server.socket(), irqs.wake_fd()).map_err(internal)?;
            let registers = ForwardedRegisters::new(&description, Arc::clone(&server));
            Ok((server, files, irqs, registers, wake))
        });
        let (server, given, irqs, registers, wake) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                return Err(NotLeased {
                    source: owner,
                    error,
                });
            }
        };
        log::debug!("VM {vm} has the device of {}", server.path().display());
        let (mut bars, mut files) = (Vec::new(), Vec::new());
        for (bar, file) in description.bars.iter().zip(given) {
            if bar.as_ref().is_none_or(|bar| bar.mappable.is_empty()) {
                continue;
            }
            bars.push(match file {
                Some((file, offset)) => {
                    files.push(file);
                    BarMemory::File { offset }
                }
                None => BarMemory::Trapped,
            });
        }
        let device = Self {
            path: Composition::new(ServerMapper {
                server: Arc::clone(&server),
                files: Vec::new(),
            }),
            irqs,
            registers,
            wake,
            server,
            lease_page,
            owner,
        };
        Ok(Leased {
            device: Box::new(device),
            bars,
            files,
        })
    }
}

/// Gives guest memory to a server.
#[derive(Debug)]
struct ServerMapper {
    server: Arc<Server>,
    /// The files of the borrower's memory.
    files: Vec<(Weak<SharedMemory>, Arc<File>)>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Server({})", self.path().display())
    }
}

impl ServerMapper {
    fn remember(&mut self, memory: &Arc<SharedMemory>, file: &Arc<File>) {
        self.files.retain(|(memory, _)| memory.strong_count() > 0);
        self.files.push((Arc::downgrade(memory), Arc::clone(file)));
    }
}

impl Mapper for ServerMapper {
    fn map(&mut self, at: Iova, memory: &HostSlice, writable: bool) -> Result<(), FabricError> {
        if memory.function().is_some() {
            // Its descriptor gives all of the function.
            let what = "a vfio-user server gets no function of the host, and so no BAR of one";
            return Err(FabricError::Other(what.into()));
        }
        let of = Arc::as_ptr(memory.memory());
        let mut files = self.files.iter();
        let file = files.find(|(memory, _)| std::ptr::eq(memory.as_ptr(), of));
        // It was remembered before it was mapped.
        let (_, file) = file.ok_or_else(|| FabricError::Other("memory without a file".into()))?;
        self.server.map(at, memory, file, writable)
    }

    fn unmap(&mut self, at: Iova, len: u64) -> Result<(), FabricError> {
        self.server.unmap(at, len)
    }

    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError> {
        match self.server.settle() {
            Err(_) if !enabled && self.server.has_ended() => {}
            settled => settled?,
        }
        let (set, clear) = match enabled {
            true => (COMMAND_MASTER, 0),
            false => (0, COMMAND_MASTER),
        };
        match self.server.set_command(set, clear) {
            // It has no device any more that could be stopped.
            Err(_) if !enabled && self.server.has_ended() => Ok(()),
            changed => changed.map_err(|error| FabricError::Other(error.into())),
        }
    }
}

impl LeasedDevice for LeasedServer {
    fn source(&mut self) -> &mut dyn DeviceSource {
        &mut *self.owner
    }

    fn report(&mut self) -> Report {
        Report {
            bus_master: self.path.bus_master(),
            usage: self.path.usage(),
            ..self.owner.report()
        }
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        self.server.read(bar.into(), offset, data);
    }

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        self.server.write(bar.into(), offset, data);
    }

    fn config_read(&mut self, piece: Piece) -> Option<u32> {
        self.registers.read(piece)
    }

    fn config_write(&mut self, piece: Piece, value: u32) -> bool {
        self.registers.write(piece, value)
    }

    fn accessed(&mut self, count: u64) {
        if let Some(page) = &self.lease_page {
            page.served(count);
        }
    }

    fn is_left_running(&self) -> bool {
        self.lease_page.is_some() && self.server.can_be_adopted()
    }

    fn irqs(&mut self) -> &mut dyn Irqs {
        &mut self.irqs
    }

    fn path(&mut self) -> &mut dyn LenderPath {
        &mut self.path
    }

    fn map_peer(
        &mut self,
        at: PeerAddress,
        range: &MemoryRange,
        memory: Arc<SharedMemory>,
    ) -> Result<(), RemoteError> {
        self.path.mapper_mut().remember(&memory, &range.file);
        self.path.map_shared(at, memory).map_err(refused)
    }

    fn unmap_peer(&mut self, at: PeerAddress, len: u64) -> Result<(), RemoteError> {
        self.path.unmap_peer(at, len).map_err(refused)
    }

    fn is_gone(&self) -> bool {
        self.server.has_ended()
    }

    fn poll(&mut self) -> bool {
        let raised = self.irqs.poll();
        self.server.poll() | raised
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }

    fn quiesce(&mut self, _patience: Duration) -> Result<(), RemoteError> {
        // A server answers DMA_UNMAP when its device uses the memory no more.
        Ok(())
    }

    fn reset(&mut self) -> Result<(), RemoteError> {
        self.server.reset()?;
        self.registers.restore();
        Ok(())
    }

    fn revoke(&mut self, _patience: Duration) -> Result<(), RemoteError> {
        let stopped = self.path.set_bus_master(false);
        let closed = stopped.and(self.path.close_all());
        closed.and(self.path.unmap_peer_all()).map_err(refused)
    }

    fn end(self: Box<Self>) -> Box<dyn DeviceSource> {
        let Self {
            path,
            irqs,
            registers,
            server,
            owner,
            ..
        } = *self;
        drop((path, irqs));
        // One that is gone has nothing to reset: its next connection begins with a reset.
        if !server.has_ended() {
            match server.reset() {
                Ok(()) => registers.restore(),
                Err(error) => log::warn!("{}: {error}", server.path().display()),
            }
        }
        server.end();
        owner
    }
}

/// Readable when one of the two is.
fn either(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (n, fd) in [one, other].into_iter().enumerate() {
        let data = epoll::EventData::new_u64(n as u64);
        epoll::add(&epoll, fd, data, epoll::EventFlags::IN)?;
    }
    Ok(epoll)
}
