//! Device source `model`: a software model behind the `soft` fabric.

mod bars;
mod ports;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use farside_devices::{Bus, Device};
use farside_fabric::{
    FarAddress, FaultSummary, Iova, LenderPath, MemoryRange, fits,
    soft::{Adapter, Path},
};
use farside_irq_relay::{Fire, IrqCounts};
use farside_lender_protocol::{
    BarMemory, BarOwner, Described, IrqUpdate, RamRange, RemoteError, Route, irq_counts,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    borrowable::{Begun, Borrowable, DRAIN_TIMEOUT, Report},
    refusals::{failed, internal, limit, no_lease, refused, unsupported},
};
use ports::{DmaPort, IrqPort};

/// A software model, and its way to the borrower's memory while it is lent.
pub(crate) struct ModelDevice {
    id: String,
    device: Box<dyn Device>,
    described: Described,
    counts: IrqCounts,
    adapter: Adapter,
    lease: Option<Lease>,
    /// Of the last lease, for whoever looks afterwards.
    last_faults: FaultSummary,
}

struct Lease {
    path: Path,
    irq: IrqPort,
}

impl ModelDevice {
    /// `device`, reached through `adapter`.
    pub(crate) fn new(
        id: &str,
        device: Box<dyn Device>,
        adapter: Adapter,
    ) -> Result<Self, RemoteError> {
        let described = Described {
            description: device.description().clone(),
            bars: BarOwner::Borrower,
        };
        Ok(Self {
            id: id.to_owned(),
            counts: irq_counts(&described.description).map_err(internal)?,
            described,
            device,
            adapter,
            lease: None,
            last_faults: FaultSummary::default(),
        })
    }

    fn lease(&mut self) -> Result<&mut Lease, RemoteError> {
        self.lease.as_mut().ok_or_else(no_lease)
    }

    /// Calls the model with its bus; `idle` is what there is without a lease.
    fn with_bus<T>(&mut self, idle: T, call: impl FnOnce(&mut dyn Device, &mut Bus<'_>) -> T) -> T {
        let Some(lease) = &mut self.lease else {
            return idle;
        };
        let mut dma = DmaPort(&mut lease.path);
        let mut bus = Bus {
            dma: &mut dma,
            irq: &mut lease.irq,
        };
        call(&mut *self.device, &mut bus)
    }

    /// Does `change` while no DMA is in flight, then lets the device go on.
    fn drained(
        &mut self,
        change: impl FnOnce(&mut Path) -> Result<(), RemoteError>,
    ) -> Result<(), RemoteError> {
        let changed = self
            .drain(DRAIN_TIMEOUT)
            .and_then(|()| change(&mut self.lease()?.path));
        self.resume();
        changed
    }

    fn drain(&mut self, timeout: Duration) -> Result<(), RemoteError> {
        let deadline = Instant::now() + timeout;
        while !self.with_bus(true, |device, bus| device.quiesce(bus)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed(
                    "DMA is still in flight: the medium has not completed it",
                ));
            }
            let Some(fd) = self.device.wake_fd() else {
                continue;
            };
            let left = Timespec::try_from(left).unwrap_or_default();
            // An interrupted or failed wait is only a shorter one.
            let _ = poll(
                &mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)],
                Some(&left),
            );
        }
        Ok(())
    }
}

impl Borrowable for ModelDevice {
    fn source(&self) -> &'static str {
        "model"
    }

    fn described(&self) -> &Described {
        &self.described
    }

    fn check(&self, route: Route, ram: &[RamRange]) -> Result<(), RemoteError> {
        local(route)?;
        let spans: Vec<u64> = ram.iter().map(|range| range.len).collect();
        fits(&spans, self.adapter.limits()).map_err(limit)?;
        Ok(())
    }

    fn begin(
        &mut self,
        route: Route,
        _vm: &str,
        bar_memory: Vec<OwnedFd>,
    ) -> Result<Begun, RemoteError> {
        local(route)?;
        let path = self.adapter.attach(&self.id).map_err(refused)?;
        let bars = bar_memory.len();
        if let Err(error) = self.take_bar_memory(bar_memory) {
            self.drop_bar_memory();
            return Err(error);
        }
        self.device.reset();
        self.lease = Some(Lease {
            path,
            irq: IrqPort::new(self.counts),
        });
        Ok(Begun {
            bars: vec![BarMemory::Borrowers; bars],
            files: Vec::new(),
        })
    }

    fn end(&mut self) {
        self.device.reset();
        self.drop_bar_memory();
        if let Some(lease) = self.lease.take() {
            self.last_faults = lease.path.faults().summary();
        }
    }

    fn reset(&mut self) -> Result<(), RemoteError> {
        self.device.reset();
        self.lease()?.irq.reset();
        Ok(())
    }

    fn close(&mut self, patience: Duration) -> Result<(), RemoteError> {
        // In this order: what is in flight completes in the guest's memory. What
        // does not, is cut off.
        let drained = self.drain(patience);
        let path = &mut self.lease()?.path;
        path.set_bus_master(false).map_err(internal)?;
        drained?;
        let path = &mut self.lease()?.path;
        path.close_all().map_err(internal)?;
        path.far_unmap_all();
        Ok(())
    }

    fn settle(&mut self) -> Result<(), RemoteError> {
        self.device.settle().map_err(|error| {
            failed(format_args!(
                "device {}: cannot bring its writes onto the medium: {error}",
                self.id
            ))
        })
    }

    fn resume(&mut self) {
        self.with_bus((), |device, bus| device.resume(bus));
    }

    fn enable_bus_master(&mut self) -> Result<(), RemoteError> {
        self.lease()?.path.set_bus_master(true).map_err(internal)
    }

    fn far_map(&mut self, at: FarAddress, memory: MemoryRange) -> Result<(), RemoteError> {
        self.lease()?.path.far_map(at, memory).map_err(refused)
    }

    fn far_unmap(&mut self, at: FarAddress, len: u64) -> Result<(), RemoteError> {
        // Behind a vIOMMU each page of a buffer is unmapped when the guest has the
        // data: to drain for each would stop all other I/O.
        let path = &mut self.lease()?.path;
        if !path.in_use(at, len) {
            return path.far_unmap(at, len).map_err(refused);
        }
        self.drained(|path| path.far_unmap(at, len).map_err(refused))
    }

    fn open_window(&mut self, iova: Iova, far: FarAddress, len: u64) -> Result<u32, RemoteError> {
        let window = self.lease()?.path.open_window(iova, far, len);
        window.map(|window| window.lut_entries).map_err(refused)
    }

    fn close_window(&mut self, iova: Iova) -> Result<(), RemoteError> {
        self.drained(|path| path.close_window(iova).map_err(refused))
    }

    fn set_irqs(&mut self, update: IrqUpdate, fds: Vec<OwnedFd>) -> Result<(), RemoteError> {
        self.lease()?.irq.apply(update, fds)
    }

    fn set_intx_disable(&mut self, disabled: bool) -> Result<(), RemoteError> {
        self.lease()?.irq.set_intx_disable(disabled);
        Ok(())
    }

    fn interrupt_status(&mut self) -> bool {
        // What the guest wrote to memory that the device looks at comes before
        // this, as a posted write would.
        self.poll();
        self.lease
            .as_ref()
            .is_some_and(|lease| lease.irq.intx_asserted())
    }

    fn relay_waits(&self) -> bool {
        self.lease
            .as_ref()
            .is_some_and(|lease| lease.irq.relay_waits())
    }

    fn drain_relay(&mut self, send: &mut dyn FnMut(Fire) -> bool) {
        if let Some(lease) = &self.lease {
            lease.irq.drain_relay(send);
        }
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        self.with_bus((), |device, bus| device.bar_read(bar, offset, data, bus));
    }

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        self.with_bus((), |device, bus| device.bar_write(bar, offset, data, bus));
    }

    fn poll(&mut self) -> bool {
        self.with_bus(false, |device, bus| device.poll(bus))
    }

    fn arm(&mut self) -> bool {
        self.with_bus(true, |device, bus| device.arm(bus))
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.device.wake_fd()
    }

    fn problem(&self) -> Option<&str> {
        self.device.problem()
    }

    fn report(&self) -> Report {
        let counters = self.device.stats().into_iter();
        let counters = counters.map(|(name, value)| (name.to_owned(), value));
        let idle = Report {
            faults: self.last_faults.clone(),
            counters: counters.collect(),
            ..Report::default()
        };
        match &self.lease {
            None => idle,
            Some(Lease { path, irq }) => Report {
                bus_master: path.bus_master(),
                usage: path.usage(),
                interrupts: irq.fired(),
                faults: path.faults().summary(),
                ..idle
            },
        }
    }
}

/// A model is in the lender's process: its DMA ends there.
fn local(route: Route) -> Result<(), RemoteError> {
    match route {
        Route::Memory => Ok(()),
        Route::Ntb => Err(unsupported(
            "a software model cannot be borrowed through an NTB: its DMA is the lender's own \
             copying; borrow it on the lender's machine",
        )),
    }
}

#[cfg(test)]
mod tests;
