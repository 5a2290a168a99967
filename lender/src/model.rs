//! Device source `model`: a software model behind the `soft` fabric.

mod bars;
mod ports;
mod state;

use std::{
    io,
    os::fd::BorrowedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use farside_daemon::DeviceId;
use farside_devices::{Bus, Device, Waiting};
use farside_fabric::{
    FaultSummary, LenderPath, MAX_MAPPINGS, MemoryRange, PeerAddress, fits,
    memory::SharedMemory,
    soft::{Adapter, Path},
};
use farside_irq_relay::IrqCounts;
use farside_lender_protocol::{
    BarMemory, BarOwner, Counter, Described, LimitUse, RamRange, RemoteError, Resource, STATE_PAGE,
    Transport, irq_counts,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    lease_owner::LeaseOwner,
    refusals::{failed, internal, invalid, limit, no_medium, refused, unsupported},
    source::{
        Available, BorrowerMemory, DRAIN_TIMEOUT, DeviceSource, Irqs, Leased, LeasedDevice,
        NotLeased, Report, Resized,
    },
    state_file::LeasePage,
};
use ports::{DmaPort, IrqPort};

/// A software model.
pub(crate) struct ModelDevice {
    id: DeviceId,
    device: Box<dyn Device>,
    described: Described,
    counts: IrqCounts,
    adapter: Adapter,
    /// The faults of the last lease.
    last_faults: FaultSummary,
}

/// A software model and its DMA path to the borrower's memory.
struct LeasedModel {
    path: Path,
    irq: IrqPort,
    model: Box<ModelDevice>,
    /// The first page of the state that outlives this process.
    lease_page: Option<LeasePage>,
}

impl ModelDevice {
    /// Creates a source for `device` behind `adapter`.
    pub(crate) fn new(
        id: &DeviceId,
        device: Box<dyn Device>,
        adapter: Adapter,
    ) -> Result<Self, RemoteError> {
        let described = Described {
            description: device.description().clone(),
            bars: BarOwner::Borrower,
            rom: 0,
            state: match device.state_bytes() {
                0 => 0,
                bytes => STATE_PAGE + bytes,
            },
        };
        Ok(Self {
            id: id.to_owned(),
            counts: irq_counts(&described.description).map_err(internal)?,
            described,
            device,
            adapter,
            last_faults: FaultSummary::default(),
        })
    }

    /// Attaches the device to the fabric, with the borrower's memory as its BARs.
    fn attach(
        &mut self,
        transport: Transport,
        owner: &LeaseOwner,
        memory: BorrowerMemory,
    ) -> Result<(Path, Option<LeasePage>), RemoteError> {
        local(transport)?;
        let path = self
            .adapter
            .attach(&self.id, owner.verified()?)
            .map_err(refused)?;
        if let Err(error) = self.take_bar_memory(memory.bars) {
            self.drop_bar_memory();
            return Err(error);
        }
        self.device.reset();
        let page = memory.state.map(|state| self.take_state(state));
        Ok((path, page.transpose()?))
    }
}

impl Available for ModelDevice {
    fn kind(&self) -> &'static str {
        "model"
    }

    fn described(&self) -> &Described {
        &self.described
    }

    fn check(
        &self,
        _: Option<&LeaseOwner>,
        transport: Transport,
        ram: &[RamRange],
    ) -> Result<(), RemoteError> {
        check_model(&self.adapter, transport, ram)
    }

    fn flush(&mut self) -> Result<(), RemoteError> {
        let settled = self.device.flush();
        settled.map_err(|error| not_flushed(&self.id, &error))
    }

    fn problem(&self) -> Option<&str> {
        self.device.problem()
    }

    fn take_size(&mut self) -> Result<Resized, RemoteError> {
        Err(unsupported("its leases have no process of their own"))
    }

    fn resize(&mut self, to: u64) -> Result<(), RemoteError> {
        let resized = self.device.resize(to);
        resized.map_err(|error| invalid(error.to_string()))
    }

    fn report(&self) -> Report {
        let counters = self.device.stats().into_iter();
        let counters = counters.map(|(name, value)| Counter {
            name: name.to_owned(),
            value,
        });
        Report {
            faults: self.last_faults.clone(),
            counters: counters.collect(),
            ..Report::default()
        }
    }
}

impl DeviceSource for ModelDevice {
    fn lease(
        mut self: Box<Self>,
        transport: Transport,
        owner: &LeaseOwner,
        memory: BorrowerMemory,
    ) -> Result<Leased, NotLeased> {
        let bars = vec![BarMemory::Borrowers; memory.bars.len()];
        match self.attach(transport, owner, memory) {
            Ok((path, lease_page)) => Ok(Leased {
                device: Box::new(LeasedModel {
                    path,
                    lease_page,
                    irq: IrqPort::new(self.counts),
                    model: self,
                }),
                bars,
                files: Vec::new(),
            }),
            Err(error) => Err(NotLeased {
                source: self,
                error,
            }),
        }
    }
}

impl LeasedModel {
    /// Calls the model with its bus.
    fn with_bus<T>(&mut self, call: impl FnOnce(&mut dyn Device, &mut Bus<'_>) -> T) -> T {
        let mut bus = Bus {
            dma: &mut DmaPort(&mut self.path),
            irq: &mut self.irq,
        };
        call(&mut *self.model.device, &mut bus)
    }
}

impl LeasedDevice for LeasedModel {
    fn source(&mut self) -> &mut dyn DeviceSource {
        &mut *self.model
    }

    fn report(&mut self) -> Report {
        let usage = self.path.usage();
        let of = |resource, used: u32, limit| LimitUse::new(resource, used.into(), limit);
        let (mappings, most) = (self.path.mappings() as u32, MAX_MAPPINGS as u64);
        let lut_entries = self.model.adapter.limits().lut_entries_per_vm().into();
        let commands = self.model.device.in_flight();
        let mut limits = vec![
            of(Resource::Mappings, mappings, most),
            of(Resource::Windows, usage.windows, most),
            of(Resource::LutEntries, usage.lut_entries, lut_entries),
            self.irq.eventfds(),
        ];
        limits.extend(commands.map(|(used, most)| LimitUse::new(Resource::Commands, used, most)));
        Report {
            limits,
            bus_master: self.path.bus_master(),
            usage,
            interrupts: self.irq.raised(),
            faults: self.path.faults().summary(),
            ..self.model.report()
        }
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        self.with_bus(|device, bus| device.bar_read(bar, offset, data, bus));
    }

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        self.with_bus(|device, bus| device.bar_write(bar, offset, data, bus));
    }

    fn accessed(&mut self, count: u64) {
        if let Some(page) = &self.lease_page {
            page.served(count);
        }
    }

    fn leave_state(&mut self) -> bool {
        self.model.device.detach_state();
        self.lease_page.take().is_some()
    }

    fn irqs(&mut self) -> &mut dyn Irqs {
        &mut self.irq
    }

    fn path(&mut self) -> &mut dyn LenderPath {
        &mut self.path
    }

    fn map_peer(
        &mut self,
        at: PeerAddress,
        _range: &MemoryRange,
        memory: Arc<SharedMemory>,
    ) -> Result<(), RemoteError> {
        self.path.map_shared(at, memory).map_err(refused)
    }

    fn unmap_peer(&mut self, at: PeerAddress, len: u64) -> Result<(), RemoteError> {
        // Drain only if needed: behind a vIOMMU the guest unmaps each page of a buffer after its
        // I/O, and a drain stops all other I/O.
        if !self.path.in_use(at, len) {
            return self.path.unmap_peer(at, len).map_err(refused);
        }
        let unmapped = match self.quiesce(DRAIN_TIMEOUT) {
            Ok(()) => self.path.unmap_peer(at, len),
            // The I/O in flight fails when the medium completes it.
            Err(_) => self.path.seize_peer(at, len),
        };
        self.resume();
        unmapped.map_err(refused)
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn poll(&mut self) -> bool {
        self.with_bus(|device, bus| device.poll(bus))
    }

    fn prepare_to_block(&mut self) -> bool {
        self.with_bus(|device, bus| device.enable_notifications(bus))
    }

    fn is_polled(&self) -> bool {
        self.path.bus_master() && self.model.device.is_polled()
    }

    fn looks_again(&self) -> Option<Duration> {
        let looks_again = self.model.device.looks_again();
        looks_again.filter(|_| self.path.bus_master())
    }

    fn waiting(&self) -> Waiting {
        self.model.device.waiting()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.model.device.wake_fd()
    }

    fn quiesce(&mut self, patience: Duration) -> Result<(), RemoteError> {
        let deadline = Instant::now() + patience;
        while !self.with_bus(|device, bus| device.quiesce(bus)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed(
                    "DMA is still in flight: the medium has not completed it",
                ));
            }
            let Some(fd) = self.wake_fd() else {
                continue;
            };
            let left = Timespec::try_from(left).unwrap_or_default();
            // An interrupted or failed wait is only shorter.
            let _ = poll(
                &mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)],
                Some(&left),
            );
        }
        Ok(())
    }

    fn resume(&mut self) {
        self.with_bus(|device, bus| device.resume(bus));
    }

    fn reset(&mut self) -> Result<(), RemoteError> {
        self.model.device.reset();
        self.irq.reset();
        Ok(())
    }

    fn revoke(&mut self, patience: Duration) -> Result<(), RemoteError> {
        // Quiesce first, so that DMA in flight completes in guest memory. Clearing bus-master
        // enable then blocks the rest.
        let drained = self.quiesce(patience);
        self.path.set_bus_master(false).map_err(internal)?;
        if drained.is_err() {
            self.path.seize_peer_all().map_err(internal)?;
        }
        self.path.close_all().map_err(internal)?;
        self.path.unmap_peer_all();
        // Without its memory; the medium has yet to let the device go.
        drained
    }

    fn end(mut self: Box<Self>) -> Box<dyn DeviceSource> {
        self.model.device.reset();
        self.model.device.detach_state();
        self.model.drop_bar_memory();
        self.model.last_faults = self.path.faults().summary();
        self.model
    }
}

/// Whether a guest with this RAM could borrow a model behind `adapter`.
pub(crate) fn check_model(
    adapter: &Adapter,
    transport: Transport,
    ram: &[RamRange],
) -> Result<(), RemoteError> {
    local(transport)?;
    let spans: Vec<u64> = ram.iter().map(|range| range.len).collect();
    fits(&spans, adapter.limits()).map_err(limit)?;
    Ok(())
}

/// A failed flush of a device's writes.
pub(crate) fn not_flushed(id: &DeviceId, error: &io::Error) -> RemoteError {
    failed(format_args!(
        "device {id}: cannot bring its writes onto the medium: {error}"
    ))
}

/// Refuses NTBs: a model's DMA consists of copies by the lender's process.
fn local(transport: Transport) -> Result<(), RemoteError> {
    match transport {
        Transport::SharedMemory => Ok(()),
        Transport::Ntb => Err(unsupported(
            "a software model cannot be borrowed through an NTB: its DMA is the lender's own \
             copying; borrow it on the lender's machine, or an NVMe model over the network",
        )),
        Transport::Network => Err(no_medium()),
    }
}

#[cfg(test)]
mod tests;
