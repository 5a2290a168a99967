//! An open function during a lease.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, VmName, Wakeup};
use farside_error_chain::Chain;
use farside_fabric::{Iova, LenderPath, MemoryRange, PeerAddress, memory::SharedMemory};
use farside_lender_protocol::{BarMemory, Described, LimitUse, RemoteError, Resource};
use farside_ntb::Adapter;
use farside_pci::Piece;
use farside_vfio::{Domain, Function, LocalPath, VfioError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    FunctionConfig, config_space::ForwardedRegisters, dma_path::DmaPath, irqs::FunctionIrqs,
};
use crate::{
    lease_owner::LeaseOwner,
    refusals::{failed, internal, refused},
    source::{DeviceSource, Irqs, Leased, LeasedDevice, Report},
    state_file::LeasePage,
};

/// Maximum wait for a former borrower's VMM to close the function.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Polling interval for that. The kernel does not send a notification.
const RELEASE_STEP: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// A function that is lent, in the process that serves its lease.
pub(super) trait Owner: DeviceSource {
    /// The lease has ended: the function's DMA is stopped, and it was reset.
    fn ended(self: Box<Self>, function: Arc<Function>, vm: VmName) -> Box<dyn DeviceSource>;
}

/// An open physical function.
pub(super) struct LeasedFunction {
    id: DeviceId,
    vm: VmName,
    path: DmaPath,
    irqs: FunctionIrqs<Function>,
    registers: ForwardedRegisters,
    function: Arc<Function>,
    lease_page: Option<LeasePage>,
    // Dropped last: an open function cannot be unbound.
    owner: Box<dyn Owner>,
}

impl LeasedFunction {
    /// The lease of an open function.
    pub(super) fn lease(
        id: DeviceId,
        owner: Box<dyn Owner>,
        vm: &VmName,
        opened: Opened,
    ) -> Leased {
        let Opened {
            function,
            irqs,
            registers,
            path,
            bars,
            files,
            lease_page,
        } = opened;
        let device = Box::new(Self {
            id,
            vm: vm.clone(),
            path,
            irqs,
            registers,
            function,
            lease_page,
            owner,
        });
        Leased {
            device,
            bars,
            files,
        }
    }
}

/// An open function, its DMA path, and the borrower's access to its BARs.
pub(super) struct Opened {
    pub(super) function: Arc<Function>,
    pub(super) irqs: FunctionIrqs<Function>,
    pub(super) registers: ForwardedRegisters,
    pub(super) path: DmaPath,
    pub(super) bars: Vec<BarMemory>,
    pub(super) files: Vec<OwnedFd>,
    /// The lease goes on if this process ends.
    pub(super) lease_page: Option<LeasePage>,
}

impl Opened {
    /// For a borrower on this host: the BARs are files.
    pub(super) fn local(
        described: &Described,
        function: Arc<Function>,
        lease_page: Option<LeasePage>,
    ) -> Result<Self, RemoteError> {
        let (mut bars, mut files) = (Vec::new(), Vec::new());
        for bar in with_areas(described) {
            let (file, offset) = function.bar_file(bar).map_err(internal)?;
            files.push(file);
            bars.push(BarMemory::File { offset });
        }
        Ok(Self {
            irqs: FunctionIrqs::new(&described.description, Arc::clone(&function))?,
            registers: ForwardedRegisters::new(&described.description, Arc::clone(&function)),
            path: DmaPath::Local(LocalPath::new(Arc::clone(&function))),
            function,
            bars,
            files,
            lease_page,
        })
    }

    /// For a borrower across an NTB, which reaches the BARs through it.
    pub(super) fn across(
        adapter: &Adapter,
        id: &DeviceId,
        owner: &LeaseOwner,
        described: &Described,
        function: Arc<Function>,
    ) -> Result<Self, RemoteError> {
        let path = adapter.attach(id, owner.verified()?, Arc::clone(&function));
        let mut path = path.map_err(internal)?;
        let exported = path.export_bars().map_err(internal)?;
        let bars = with_areas(described).map(|bar| match exported.peer_address_of(bar) {
            None => BarMemory::Trapped,
            Some(address) => BarMemory::Peer { address },
        });
        Ok(Self {
            irqs: FunctionIrqs::new(&described.description, Arc::clone(&function))?,
            registers: ForwardedRegisters::new(&described.description, Arc::clone(&function)),
            bars: bars.collect(),
            path: DmaPath::Ntb(path),
            function,
            files: Vec::new(),
            lease_page: None,
        })
    }
}

impl LeasedDevice for LeasedFunction {
    fn source(&mut self) -> &mut dyn DeviceSource {
        &mut *self.owner
    }

    fn report(&mut self) -> Report {
        let usage = self.path.lender().usage();
        let limits = self.path.lut_entries().map(|most| {
            LimitUse::new(
                Resource::NtbLutEntries,
                usage.lut_entries.into(),
                most.into(),
            )
        });
        Report {
            bus_master: self.function.bus_master().unwrap_or(false),
            limits: limits.into_iter().collect(),
            usage,
            ..self.owner.report()
        }
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        if let Err(error) = self.function.bar_read(bar, offset, data) {
            log::debug!("device {}: {error}", self.id, error = Chain(&error));
            data.fill(0xff);
        }
    }

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        if let Err(error) = self.function.bar_write(bar, offset, data) {
            log::debug!("device {}: {error}", self.id, error = Chain(&error));
        }
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
        self.lease_page.is_some()
    }

    fn irqs(&mut self) -> &mut dyn Irqs {
        &mut self.irqs
    }

    fn path(&mut self) -> &mut dyn LenderPath {
        self.path.lender()
    }

    fn reach_bar(
        &mut self,
        iova: Iova,
        exported: PeerAddress,
        len: u64,
    ) -> Result<(), RemoteError> {
        self.path
            .across()?
            .reach_bar(iova, exported, len)
            .map_err(|error| refused(error.into()))
    }

    fn map_peer(
        &mut self,
        at: PeerAddress,
        _range: &MemoryRange,
        memory: Arc<SharedMemory>,
    ) -> Result<(), RemoteError> {
        self.path.local()?.map_shared(at, memory).map_err(refused)
    }

    fn unmap_peer(&mut self, at: PeerAddress, len: u64) -> Result<(), RemoteError> {
        self.path.local()?.unmap_peer(at, len).map_err(refused)
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn poll(&mut self) -> bool {
        let raised = self.irqs.poll();
        if raised {
            self.path.flush();
        }
        raised
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.irqs.wake_fd())
    }

    fn quiesce(&mut self, _patience: Duration) -> Result<(), RemoteError> {
        // The IOMMU's unmapping waits for DMA in flight.
        Ok(())
    }

    fn reset(&mut self) -> Result<(), RemoteError> {
        let reset = match self.function.can_reset() {
            true => self.function.reset().map_err(internal),
            // A reset by the guest of a function that cannot be reset.
            false => Ok(()),
        };
        self.registers.restore();
        reset
    }

    /// Ignores `patience`: unmapping from the IOMMU waits for DMA in flight.
    fn revoke(&mut self, _patience: Duration) -> Result<(), RemoteError> {
        self.path.revoke().map_err(refused)
    }

    fn end(self: Box<Self>) -> Box<dyn DeviceSource> {
        let Self {
            id,
            vm,
            path,
            irqs,
            registers,
            function,
            lease_page: _,
            owner,
        } = *self;
        drop((path, irqs));
        if function.can_reset()
            && let Err(error) = function.reset()
        {
            log::error!("device {id}: {error}", error = Chain(&error));
        }
        registers.restore();
        // It has the function open.
        drop(registers);
        owner.ended(function, vm)
    }
}

/// Opens a function in a new domain, and resets it if it can be reset.
pub(super) fn open_clean(
    id: &DeviceId,
    config: &FunctionConfig,
    stop: &Wakeup,
) -> Result<Arc<Function>, RemoteError> {
    let open = || Domain::new(config.api)?.open(config.bdf);
    open_clean_by(open, id, config.last_vm.as_ref(), stop)
}

/// Opens a function by `open`, and resets it if it can be reset. `last_vm` had it last.
pub(super) fn open_clean_by(
    open: impl Fn() -> Result<Function, VfioError>,
    id: &DeviceId,
    last_vm: Option<&VmName>,
    stop: &Wakeup,
) -> Result<Arc<Function>, RemoteError> {
    let function = open_when_free(open, id, last_vm, stop)?;
    if function.can_reset() {
        function.reset().map_err(internal)?;
    }
    Ok(Arc::new(function))
}

/// Opens a function, after former users have closed it.
fn open_when_free(
    open: impl Fn() -> Result<Function, VfioError>,
    id: &DeviceId,
    last_vm: Option<&VmName>,
    stop: &Wakeup,
) -> Result<Function, RemoteError> {
    let patience = Instant::now() + RELEASE_TIMEOUT;
    let mut stopped = false;
    let named =
        |error: VfioError, last: &str| failed(format_args!("device {id}: {}{last}", Chain(&error)));
    loop {
        match open() {
            Ok(function) => return Ok(function),
            Err(VfioError::Busy { .. }) if !stopped && Instant::now() < patience => {
                let mut stop = [PollFd::new(stop, PollFlags::IN)];
                let ready = poll(&mut stop, Some(&RELEASE_STEP));
                stopped = ready.is_ok_and(|ready| ready != 0);
            }
            Err(error @ VfioError::Busy { .. }) => {
                let last = last_vm.map_or(String::new(), |vm| format!("; VM {vm} had it last"));
                return Err(named(error, &last));
            }
            Err(error) => return Err(named(error, "")),
        }
    }
}

/// The BARs with areas that can be mapped.
fn with_areas(described: &Described) -> impl Iterator<Item = u8> {
    (0u8..)
        .zip(&described.description.bars)
        .filter(|(_, bar)| bar.as_ref().is_some_and(|bar| !bar.mappable.is_empty()))
        .map(|(bar, _)| bar)
}
