//! Device source `vfio`: a function of this host, through Linux VFIO.
//!
//! The function is on vfio-pci for as long as the lender runs. Each lease opens it in a new IOMMU
//! domain, which is empty until the borrower enables bus mastering, and destroyed at the end:
//!
//! ```text
//!   start: find, bind, look at it, close
//!   lease: open in a new domain -> reset -> ... windows, DMA ... -> close
//!   end:   back to its former driver
//! ```
//!
//! The data path is the hardware's: the borrower maps the BARs, the kernel signals the VMM's
//! eventfds, the IOMMU translates DMA. The device thread only handles trapped registers, relayed
//! interrupts, and configuration changes.
//!
//! # What the borrower's VMM is trusted with
//!
//! To map the BARs of a function of this host, the VMM receives VFIO's device descriptor, since the
//! kernel has no mmap-able descriptor for a single BAR. With it, a VMM can reset the function and
//! access all of its registers and its configuration space through VFIO, but not the IOMMU domain.
//! It can keep the descriptor indefinitely, so a function is lent again only when the kernel
//! reports that it is not open elsewhere.

mod dma_path;
mod faults;
mod find;
mod irqs;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, VmName, Wakeup};
use farside_error_chain::Chain;
use farside_fabric::{
    FaultLog, Iova, LenderPath, PeerAddress, memory::SharedMemory, pin::check_memlock,
};
use farside_host_pci::{Binding, HostPci};
use farside_lender_protocol::{BarMemory, BarOwner, Described, RamRange, RemoteError, Route};
use farside_ntb::Adapter;
use farside_pci::Bdf;
use farside_vfio::{Api, Domain, Function, LocalPath, UsableIova, VfioError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    refusals::{failed, internal, invalid, limit, refused},
    source::{Available, DeviceSource, Irqs, Leased, LeasedDevice, NotLeased, Report},
};
use dma_path::{DmaPath, adapter};
pub(crate) use faults::FaultWatch;
pub(crate) use find::{Found, check_groups, create_vfs, find};
use irqs::FunctionIrqs;

/// Maximum wait for a former borrower's VMM to close the function.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Polling interval for that. The kernel does not send a notification.
const RELEASE_STEP: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// A physical function.
pub(crate) struct VfioDevice {
    _binding: Binding,
    id: DeviceId,
    bdf: Bdf,
    api: Api,
    host: HostPci,
    described: Described,
    usable: UsableIova,
    /// The function's DMA address width, if its native driver has set it in the kernel.
    address_bits: Option<u32>,
    allow_dirty: bool,
    /// The VM that used it last, if it could not be reset since.
    left_dirty_by: Option<VmName>,
    /// The VM that used it last.
    last_vm: Option<VmName>,
    ntb: Option<Adapter>,
    watch: Arc<FaultWatch>,
    /// Faults of the current lease, or of the last one.
    faults: Arc<FaultLog>,
    stop: Wakeup,
}

/// An open physical function.
struct LeasedFunction {
    vm: VmName,
    path: DmaPath,
    irqs: FunctionIrqs,
    function: Arc<Function>,
    // Dropped last: an open function cannot be unbound.
    device: Box<VfioDevice>,
}

impl VfioDevice {
    /// Probes a function that is bound to vfio-pci.
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
                    // Unbinding would wait for its current user, and take the function away from
                    // it.
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

    /// Opens the function, after former users have closed it.
    fn open_when_free(&self) -> Result<Function, RemoteError> {
        let patience = Instant::now() + RELEASE_TIMEOUT;
        let mut stopped = false;
        loop {
            let domain = Domain::new(self.api).map_err(internal)?;
            match domain.open(self.bdf) {
                Ok(function) => return Ok(function),
                Err(VfioError::Busy { .. }) if !stopped && Instant::now() < patience => {
                    let mut stop = [PollFd::new(&self.stop, PollFlags::IN)];
                    let ready = poll(&mut stop, Some(&RELEASE_STEP));
                    stopped = ready.is_ok_and(|ready| ready != 0);
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

    /// Opens the function and resets it. Refuses if another VM has used it and it cannot be reset.
    fn open_clean(&self) -> Result<Arc<Function>, RemoteError> {
        let function = self.open_when_free()?;
        match function.can_reset() {
            true => function.reset().map_err(internal)?,
            false => self.check_clean()?,
        }
        Ok(Arc::new(function))
    }

    /// Refuses to lend it with another VM's state.
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

    /// Creates the DMA path to the borrower's memory, and the borrower's access to the BARs.
    fn dma_path(
        &self,
        route: Route,
        function: &Arc<Function>,
    ) -> Result<(DmaPath, Vec<BarMemory>, Vec<OwnedFd>), RemoteError> {
        let with_areas = (0u8..)
            .zip(&self.described.description.bars)
            .filter(|(_, bar)| bar.as_ref().is_some_and(|bar| !bar.mappable.is_empty()));
        let (mut bars, mut files) = (Vec::new(), Vec::new());
        let path = match route {
            Route::Memory => {
                for (bar, _) in with_areas {
                    let (file, offset) = function.bar_file(bar).map_err(internal)?;
                    files.push(file);
                    bars.push(BarMemory::File { offset });
                }
                DmaPath::Local(LocalPath::new(Arc::clone(function)))
            }
            Route::Ntb => {
                let adapter = adapter(self.ntb.as_ref())?;
                let path = adapter.attach(&self.id, Arc::clone(function));
                let mut path = path.map_err(internal)?;
                let exported = path.export_bars().map_err(internal)?;
                bars.extend(
                    with_areas.map(|(bar, _)| match exported.peer_address_of(bar) {
                        None => BarMemory::Trapped,
                        Some(address) => BarMemory::Peer { address },
                    }),
                );
                DmaPath::Ntb(path)
            }
        };
        Ok((path, bars, files))
    }
}

impl Available for VfioDevice {
    fn kind(&self) -> &'static str {
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
                let adapter = adapter(self.ntb.as_ref())?;
                let spans: Vec<u64> = ranges.iter().map(|(_, len)| *len).collect();
                adapter.check_link().map_err(|error| named(&error))?;
                let fits = adapter.check_windows(&spans);
                fits.map(|_| ()).map_err(|error| named(&error))
            }
        }
    }

    fn flush(&mut self) -> Result<(), RemoteError> {
        // The medium is the function's own, and the guest's driver flushes it.
        Ok(())
    }

    fn report(&self) -> Report {
        Report {
            interrupts: irqs::counts(&self.host, self.bdf),
            faults: self.faults.summary(),
            ..Report::default()
        }
    }
}

impl DeviceSource for VfioDevice {
    fn lease(
        mut self: Box<Self>,
        route: Route,
        vm: &VmName,
        bar_memory: Vec<OwnedFd>,
    ) -> Result<Leased, NotLeased> {
        if !bar_memory.is_empty() {
            let error = invalid(format!(
                "device {} has BARs of its own: the borrower brings none",
                self.id
            ));
            return Err(NotLeased {
                source: self,
                error,
            });
        }
        let opened = self.open_clean().and_then(|function| {
            let path = self.dma_path(route, &function)?;
            let irqs = FunctionIrqs::new(&self.described.description, Arc::clone(&function))?;
            Ok((function, path, irqs))
        });
        let (function, (path, bars, files), irqs) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                return Err(NotLeased {
                    source: self,
                    error,
                });
            }
        };
        self.faults = Arc::new(FaultLog::new(&*self.id));
        self.watch.watch(self.bdf, &self.faults);
        if !function.can_reset() {
            self.left_dirty_by = Some(vm.to_owned());
        }
        let device = Box::new(LeasedFunction {
            vm: vm.to_owned(),
            path,
            irqs,
            function,
            device: self,
        });
        Ok(Leased {
            device,
            bars,
            files,
        })
    }
}

impl LeasedDevice for LeasedFunction {
    fn source(&mut self) -> &mut dyn DeviceSource {
        &mut *self.device
    }

    fn report(&mut self) -> Report {
        Report {
            bus_master: self.function.bus_master().unwrap_or(false),
            usage: self.path.lender().usage(),
            ..self.device.report()
        }
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        if let Err(error) = self.function.bar_read(bar, offset, data) {
            log::debug!("device {}: {error}", self.device.id, error = Chain(&error));
            data.fill(0xff);
        }
    }

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        if let Err(error) = self.function.bar_write(bar, offset, data) {
            log::debug!("device {}: {error}", self.device.id, error = Chain(&error));
        }
    }

    fn irqs(&mut self) -> &mut dyn Irqs {
        &mut self.irqs
    }

    fn path(&mut self) -> &mut dyn LenderPath {
        self.path.lender()
    }

    fn map_peer(&mut self, at: PeerAddress, memory: Arc<SharedMemory>) -> Result<(), RemoteError> {
        self.path.local()?.map_shared(at, memory).map_err(refused)
    }

    fn unmap_peer(&mut self, at: PeerAddress, len: u64) -> Result<(), RemoteError> {
        self.path.local()?.unmap_peer(at, len).map_err(refused)
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
        match self.function.can_reset() {
            true => self.function.reset().map_err(internal),
            // A reset by the guest of a function that cannot be reset.
            false => Ok(()),
        }
    }

    /// Ignores `patience`: unmapping from the IOMMU waits for DMA in flight.
    fn revoke(&mut self, _patience: Duration) -> Result<(), RemoteError> {
        self.path.revoke().map_err(refused)
    }

    fn end(self: Box<Self>) -> Box<dyn DeviceSource> {
        let Self {
            vm,
            path,
            irqs,
            function,
            mut device,
        } = *self;
        drop((path, irqs));
        if function.can_reset()
            && let Err(error) = function.reset()
        {
            log::error!("device {}: {error}", device.id, error = Chain(&error));
        }
        // Closing the descriptor ends its interrupts and mappings; the kernel resets it again.
        match Arc::into_inner(function).map(Function::close) {
            Some(Ok(())) => {}
            Some(Err(error)) => log::warn!(
                "device {}: the VMM of VM {vm} has not released it yet ({error})",
                device.id,
                error = Chain(&error)
            ),
            None => log::error!("device {}: kept open by a bug in the lender", device.id),
        }
        device.watch.forget(device.bdf);
        device.last_vm = Some(vm);
        device
    }
}

/// Opens a function to read its description, its usable IOVA ranges and whether it can be reset,
/// and closes it again.
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

/// Checks that a function with this address width reaches all of a guest's RAM.
fn check_width(bits: Option<u32>, ram: &[RamRange]) -> Result<(), String> {
    let Some(limit) = bits.and_then(|bits| 1u64.checked_shl(bits)) else {
        return Ok(());
    };
    let limit = Iova::new(limit);
    let within = |range: &RamRange| {
        let end = range.start.checked_add(range.len);
        end.is_some_and(|end| end <= limit)
    };
    match ram.iter().find(|range| !within(range)) {
        None => Ok(()),
        Some(RamRange { start, len }) => Err(format!(
            "guest RAM of {len:#x} bytes at {start} is beyond the {} bits of address that the \
             function has (IOVA = GPA, so it reaches RAM below {limit}); give the VM less RAM, \
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
        let ram = |start, len| {
            let start = Iova::new(start);
            [RamRange { start, len }]
        };
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
