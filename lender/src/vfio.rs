//! Device source `vfio`: a function of this host, through Linux VFIO.
//!
//! The function is on vfio-pci for as long as the lender runs. Each lease opens
//! it anew in an IOMMU domain of its own, which is empty until the borrower
//! enables bus mastering, and gone at the end:
//!
//! ```text
//!   start: find, bind, look at it, close
//!   lease: open in a new domain -> reset -> ... windows, DMA ... -> close
//!   end:   back to its former driver
//! ```
//!
//! The data path is the hardware's: the borrower maps the BARs, the kernel
//! signals the VMM's eventfds, the IOMMU translates DMA. What is left for the
//! device's thread are registers that must be trapped, relayed interrupts, and
//! changes of all these.
//!
//! # What the borrower's VMM is trusted with
//!
//! To map the BARs of a function of this machine it gets VFIO's descriptor of
//! the function, since the kernel has none for a BAR alone that can be mapped.
//! With it, a VMM can reset the function, and reach all of its registers and
//! its configuration space as VFIO shows that; not the IOMMU domain. It keeps
//! the descriptor for as long as it likes, so a function is lent on only when
//! the kernel says that nobody else has it open.

mod faults;
mod find;
mod irqs;
mod way;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use farside_daemon::Wakeup;
use farside_error_chain::Chain;
use farside_fabric::{FarAddress, FaultLog, Iova, MemoryRange, pin::check_memlock};
use farside_host_pci::{Binding, HostPci};
use farside_irq_relay::Fire;
use farside_lender_protocol::{
    BarMemory, BarOwner, Described, IrqUpdate, RamRange, RemoteError, Route,
};
use farside_ntb::Adapter;
use farside_pci::Bdf;
use farside_vfio::{Api, Domain, Function, UsableIova, VfioError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    borrowable::{Begun, Borrowable, Report},
    refusals::{failed, internal, invalid, limit, no_lease},
};
pub(crate) use faults::FaultWatch;
pub(crate) use find::{Found, check_groups, create_vfs, find};
use irqs::Irqs;
use way::Way;

/// How long a former borrower's VMM may take to let go of the function.
const LET_GO_TIMEOUT: Duration = Duration::from_secs(2);

/// How often to look whether it has. The kernel tells nobody.
const LET_GO_STEP: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// A physical function, and its lease while it is lent.
pub(crate) struct VfioDevice {
    // Dropped in this order: a function that is open cannot be given back.
    lease: Option<Lease>,
    _binding: Binding,
    id: String,
    bdf: Bdf,
    api: Api,
    host: HostPci,
    described: Described,
    usable: UsableIova,
    /// Bits of an address that the function can put on the bus, where its own
    /// driver told the kernel.
    address_bits: Option<u32>,
    allow_dirty: bool,
    /// The VM that had it, when it could not be reset since.
    left_dirty_by: Option<String>,
    /// The VM that had it last.
    last_vm: Option<String>,
    ntb: Option<Adapter>,
    watch: Arc<FaultWatch>,
    /// Of this lease, or of the last.
    faults: Arc<FaultLog>,
    stop: Wakeup,
}

struct Lease {
    vm: String,
    way: Way,
    irqs: Irqs,
    function: Arc<Function>,
}

impl VfioDevice {
    /// Looks at a function that is bound to vfio-pci.
    pub(crate) fn open(
        found: Found,
        api: Api,
        ntb: Option<Adapter>,
        watch: Arc<FaultWatch>,
        stop: Wakeup,
    ) -> Result<Self, VfioError> {
        let Found {
            id,
            bdf,
            binding,
            allow_dirty,
            host,
        } = found;
        let (described, usable, can_reset) = match look_at(api, bdf) {
            Ok(found) => found,
            Err(error) => {
                if matches!(error, VfioError::Busy { .. }) {
                    // Unbinding would wait for whoever has it, and take it away.
                    binding.leave();
                }
                return Err(error);
            }
        };
        if !can_reset && !allow_dirty {
            log::warn!(
                "device {id} ({bdf}) cannot be reset: it is lent to one VM only, unless it is lent with allow-dirty"
            );
        }
        Ok(Self {
            lease: None,
            address_bits: binding.before().dma_limit_bits(),
            _binding: binding,
            faults: Arc::new(FaultLog::new(&*id)),
            id,
            bdf,
            api,
            host,
            described,
            usable,
            allow_dirty,
            left_dirty_by: None,
            last_vm: None,
            ntb,
            watch,
            stop,
        })
    }

    fn lease(&mut self) -> Result<&mut Lease, RemoteError> {
        self.lease.as_mut().ok_or_else(no_lease)
    }

    /// Opens the function, once those who had it have let go.
    fn open_when_free(&self) -> Result<Function, RemoteError> {
        let patience = Instant::now() + LET_GO_TIMEOUT;
        loop {
            let domain = Domain::new(self.api).map_err(internal)?;
            match domain.open(self.bdf) {
                Ok(function) => return Ok(function),
                Err(VfioError::Busy { .. }) if Instant::now() < patience => {
                    let mut stop = [PollFd::new(&self.stop, PollFlags::IN)];
                    // A lender that stops asks once more, and is refused.
                    let _ = poll(&mut stop, Some(&LET_GO_STEP));
                }
                Err(error @ VfioError::Busy { .. }) => {
                    let last = self.last_vm.as_ref();
                    let last = last.map_or(String::new(), |vm| format!("; VM {vm} had it last"));
                    return Err(failed(format_args!(
                        "device {}: {error}{last}",
                        self.id,
                        error = Chain(&error)
                    )));
                }
                Err(error) => {
                    return Err(failed(format_args!(
                        "device {}: {error}",
                        self.id,
                        error = Chain(&error)
                    )));
                }
            }
        }
    }

    /// Brings the function into its state after power-on, or refuses to lend
    /// it as another VM left it.
    fn clean(&self, function: &Function) -> Result<(), RemoteError> {
        if function.can_reset() {
            return function.reset().map_err(internal);
        }
        self.check_clean()
    }

    /// Refuses to lend it as another VM left it.
    fn check_clean(&self) -> Result<(), RemoteError> {
        match &self.left_dirty_by {
            Some(vm) if !self.allow_dirty => Err(invalid(format!(
                "device {} ({}) cannot be reset, and VM {vm} has used it: what that left in it \
                 would be the next VM's to find; power-cycle it, or lend it with allow-dirty",
                self.id, self.bdf
            ))),
            _ => Ok(()),
        }
    }

    /// The way to the borrower's memory, and what it maps of the BARs.
    fn way(&self, route: Route, function: &Arc<Function>) -> Result<(Way, Begun), RemoteError> {
        let with_areas = (0u8..)
            .zip(&self.described.description.bars)
            .filter(|(_, bar)| bar.as_ref().is_some_and(|bar| !bar.mappable.is_empty()));
        let mut begun = Begun::default();
        let way = match route {
            Route::Memory => {
                for (bar, _) in with_areas {
                    let (file, offset) = function.bar_file(bar).map_err(internal)?;
                    begun.files.push(file);
                    begun.bars.push(BarMemory::File { offset });
                }
                Way::local(Arc::clone(function))
            }
            Route::Ntb => {
                let adapter = way::adapter(self.ntb.as_ref())?;
                let way = Way::ntb(adapter, &self.id, Arc::clone(function))?;
                for (bar, _) in with_areas {
                    let far = way.far_bar(bar);
                    begun
                        .bars
                        .push(far.map_or(BarMemory::Trapped, |far| BarMemory::Far {
                            address: far.get(),
                        }));
                }
                way
            }
        };
        Ok((way, begun))
    }
}

impl Borrowable for VfioDevice {
    fn source(&self) -> &'static str {
        "vfio"
    }

    fn described(&self) -> &Described {
        &self.described
    }

    fn check(&self, route: Route, ram: &[RamRange]) -> Result<(), RemoteError> {
        self.check_clean()?;
        let ranges: Vec<_> = ram.iter().map(|range| (range.start, range.len)).collect();
        let named = |error: &dyn std::fmt::Display| {
            limit(format_args!("device {} ({}): {error}", self.id, self.bdf))
        };
        self.usable
            .check(&ranges)
            .map_err(|error| named(&Chain(&error)))?;
        check_width(self.address_bits, ram).map_err(|error| named(&error))?;
        match route {
            Route::Memory => {
                let total = ranges
                    .iter()
                    .fold(0u64, |sum, (_, len)| sum.saturating_add(*len));
                check_memlock(total).map_err(|error| named(&error))
            }
            Route::Ntb => {
                let adapter = way::adapter(self.ntb.as_ref())?;
                let spans: Vec<u64> = ranges.iter().map(|(_, len)| *len).collect();
                adapter.check_link().map_err(|error| named(&error))?;
                let fits = adapter.check_windows(&spans);
                fits.map(|_| ()).map_err(|error| named(&error))
            }
        }
    }

    fn begin(
        &mut self,
        route: Route,
        vm: &str,
        bar_memory: Vec<OwnedFd>,
    ) -> Result<Begun, RemoteError> {
        if !bar_memory.is_empty() {
            return Err(invalid(format!(
                "device {} has BARs of its own: the borrower brings none",
                self.id
            )));
        }
        let function = self.open_when_free()?;
        self.clean(&function)?;
        let function = Arc::new(function);
        let (way, begun) = self.way(route, &function)?;
        self.faults = Arc::new(FaultLog::new(&*self.id));
        self.watch.watch(self.bdf, &self.faults);
        if !function.can_reset() {
            self.left_dirty_by = Some(vm.to_owned());
        }
        let irqs = Irqs::new(&self.described.description)?;
        self.lease = Some(Lease {
            vm: vm.to_owned(),
            way,
            irqs,
            function,
        });
        Ok(begun)
    }

    fn end(&mut self) {
        let Some(Lease {
            vm,
            way,
            irqs,
            function,
        }) = self.lease.take()
        else {
            return;
        };
        self.last_vm = Some(vm.clone());
        drop((way, irqs));
        if function.can_reset()
            && let Err(error) = function.reset()
        {
            log::error!("device {}: {error}", self.id, error = Chain(&error));
        }
        // Its interrupts and mappings end with the descriptor; the kernel
        // resets it once more.
        match Arc::into_inner(function).map(Function::close) {
            Some(Ok(())) => {}
            Some(Err(error)) => log::warn!(
                "device {}: the VMM of VM {vm} has not let go of it yet ({error})",
                self.id,
                error = Chain(&error)
            ),
            None => log::error!("device {}: kept open by a bug in the lender", self.id),
        }
        self.watch.forget(self.bdf);
    }

    fn reset(&mut self) -> Result<(), RemoteError> {
        let function = Arc::clone(&self.lease()?.function);
        match function.can_reset() {
            true => function.reset().map_err(internal),
            // The guest's own reset of what cannot be reset.
            false => Ok(()),
        }
    }

    /// Drains by itself: the IOMMU's unmapping waits for DMA in flight.
    fn close(&mut self, _patience: Duration) -> Result<(), RemoteError> {
        self.lease()?.way.close()
    }

    fn enable_bus_master(&mut self) -> Result<(), RemoteError> {
        self.lease()?.way.set_bus_master(true)
    }

    fn far_map(&mut self, at: FarAddress, memory: MemoryRange) -> Result<(), RemoteError> {
        self.lease()?.way.far_map(at, memory)
    }

    fn far_unmap(&mut self, at: FarAddress, len: u64) -> Result<(), RemoteError> {
        self.lease()?.way.far_unmap(at, len)
    }

    fn open_window(&mut self, iova: Iova, far: FarAddress, len: u64) -> Result<u32, RemoteError> {
        self.lease()?.way.open_window(iova, far, len)
    }

    fn close_window(&mut self, iova: Iova) -> Result<(), RemoteError> {
        self.lease()?.way.close_window(iova)
    }

    fn set_irqs(&mut self, update: IrqUpdate, fds: Vec<OwnedFd>) -> Result<(), RemoteError> {
        let lease = self.lease()?;
        lease.irqs.apply(&lease.function, update, fds)
    }

    fn set_intx_disable(&mut self, disabled: bool) -> Result<(), RemoteError> {
        let lease = self.lease()?;
        irqs::set_intx_disable(&lease.function, disabled)
    }

    fn interrupt_status(&mut self) -> bool {
        let Some(lease) = &self.lease else {
            return false;
        };
        irqs::interrupt_status(&lease.function).unwrap_or_else(|error| {
            log::debug!("device {}: {error}", self.id, error = Chain(&error));
            false
        })
    }

    fn relay_waits(&self) -> bool {
        self.lease
            .as_ref()
            .is_some_and(|lease| lease.irqs.relay_waits())
    }

    fn drain_relay(&mut self, send: &mut dyn FnMut(Fire) -> bool) {
        if let Some(lease) = &mut self.lease
            && lease.irqs.relay_waits()
        {
            // What the device wrote before the interrupt must be there first.
            lease.way.flush();
            lease.irqs.drain_relay(send);
        }
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        if let Some(lease) = &self.lease
            && let Err(error) = lease.function.bar_read(bar, offset, data)
        {
            log::debug!("device {}: {error}", self.id, error = Chain(&error));
            data.fill(0xff);
        }
    }

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        if let Some(lease) = &self.lease
            && let Err(error) = lease.function.bar_write(bar, offset, data)
        {
            log::debug!("device {}: {error}", self.id, error = Chain(&error));
        }
    }

    fn poll(&mut self) -> bool {
        self.lease.as_mut().is_some_and(|lease| lease.irqs.poll())
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.lease.as_ref().map(|lease| lease.irqs.wake_fd())
    }

    fn report(&self) -> Report {
        let lease = self.lease.as_ref();
        Report {
            bus_master: lease.is_some_and(|lease| lease.function.bus_master().unwrap_or(false)),
            usage: lease.map(|lease| lease.way.usage()).unwrap_or_default(),
            interrupts: irqs::counts(&self.host, self.bdf),
            faults: self.faults.summary(),
            counters: Vec::new(),
        }
    }
}

/// What a function looks like, what it may use as IOVA, and whether it can be
/// reset. It is closed again.
fn look_at(api: Api, bdf: Bdf) -> Result<(Described, UsableIova, bool), VfioError> {
    let domain = Domain::new(api)?;
    let function = domain.open(bdf)?;
    let described = Described {
        description: function.description()?,
        bars: BarOwner::Lender,
    };
    let found = (described, domain.usable_iova()?, function.can_reset());
    function.close()?;
    Ok(found)
}

/// Whether a function with so many address bits reaches all of a guest's RAM.
fn check_width(bits: Option<u32>, ram: &[RamRange]) -> Result<(), String> {
    let Some(limit) = bits.and_then(|bits| 1u64.checked_shl(bits)) else {
        return Ok(());
    };
    let beyond = |range: &&RamRange| range.start.saturating_add(range.len) > limit;
    match ram.iter().find(beyond) {
        None => Ok(()),
        Some(RamRange { start, len }) => Err(format!(
            "guest RAM of {len:#x} bytes at {start:#x} is beyond the {} bits of address that the \
             function has (IOVA = GPA, so it reaches RAM below {limit:#x}); give the VM less RAM, \
             or a chipset that puts it lower",
            bits.unwrap_or(64)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_beyond_the_functions_address_width_is_named() {
        let ram = |start, len| [RamRange { start, len }];
        let high = ram(4 << 30, 1 << 30);
        assert_eq!(check_width(None, &high), Ok(()));
        assert_eq!(check_width(Some(64), &high), Ok(()));
        assert_eq!(check_width(Some(33), &high), Ok(()));
        assert_eq!(check_width(Some(32), &ram(0, 4 << 30)), Ok(()));
        let error = check_width(Some(32), &high).unwrap_err();
        for named in ["0x100000000", "0x40000000", "32 bits"] {
            assert!(error.contains(named), "{error}");
        }
    }
}
