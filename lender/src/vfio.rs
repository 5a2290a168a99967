//! Device source `vfio`: a function of this host, through Linux VFIO.
//!
//! The function is on vfio-pci for as long as the lender runs. Each lease opens it in a new IOMMU
//! domain (but see [`shared`]), which is empty until the borrower enables bus mastering, and destroyed at the end:
//!
//! ```text
//!   start: find, bind, look at it, close
//!   lease: open in a new domain -> reset -> ... windows, DMA ... -> close
//!   end:   back to its former driver
//! ```
//!
//! Within the host a function outlives the worker that has opened it: the lender keeps it open, and the next worker of the lease
//! adopts it as it runs.
//!
//! The data path is the hardware's: the borrower maps the BARs, the kernel signals the VMM's
//! eventfds, the IOMMU translates DMA. What is left, trapped registers, relayed interrupts and
//! configuration changes, is done by a worker process for a borrower on this host, and by the
//! device thread for one across an NTB, whose tables all leases share, and for functions of a shared group.
//!
//! # What the borrower's VMM is trusted with
//!
//! To map the BARs of a function of this host, the VMM receives VFIO's device descriptor, since the
//! kernel has no mmap-able descriptor for a single BAR. With it, a VMM can reset the function and
//! access all of its registers and its configuration space through VFIO, but not the IOMMU domain.
//! It can keep the descriptor indefinitely, so a function is lent again only when the kernel
//! reports that it is not open elsewhere.

mod bind;
mod config_space;
mod dma_path;
mod faults;
mod find;
mod in_worker;
mod irqs;
mod leased;
mod rom;
mod shared;

use std::{
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use farside_daemon::{DeviceId, VmName, Wakeup};
use farside_error_chain::Chain;
use farside_fabric::{FaultLog, Iova, pin::check_memlock};
use farside_host_pci::{Binding, HostPci};
use farside_lender_protocol::{BarOwner, Described, RamRange, RemoteError, STATE_PAGE, Transport};
use farside_ntb::Adapter;
use farside_pci::Bdf;
use farside_vfio::{Api, Domain, Function, UsableIova, VfioError};
use serde::{Deserialize, Serialize};

use crate::{
    lease_owner::LeaseOwner,
    refusals::{invalid, limit, unsupported},
    source::{Available, BorrowerMemory, DeviceSource, Leased, NotLeased, Report},
};
pub use bind::{bind, release};
pub(crate) use config_space::{ConfigAccess, ForwardedRegisters};
use dma_path::adapter;
pub(crate) use faults::FaultWatch;
pub use find::BindError;
pub(crate) use find::{Found, api, create_vfs, find};
pub(crate) use in_worker::{FunctionConfig, WorkerFunction};
pub(crate) use irqs::{FunctionIrqs, Raises};
use leased::{LeasedFunction, Opened, Owner, open_clean, open_clean_by};
use rom::Rom;
pub(crate) use shared::SharedGroup;

/// Why a function is not lent over the network.
const NO_NETWORK: &str = "a physical function is reached through an NTB between the hosts, not over the network: lend its block device instead (`--nvme ID=/dev/nvme0n1`)";

/// Why a function that shares its IOMMU group does not cross an NTB: what is mapped for both would stay for one when the
/// adapter lends its windows to another VM.
const NO_NTB: &str = "it shares its IOMMU group with another device of this lender: VMs of this host can borrow it, and not those across an NTB; lend one function of the group";

/// A physical function. Clones are the same one.
#[derive(Clone)]
pub(crate) struct VfioDevice(Arc<Bound>);

/// A function on vfio-pci.
struct Bound {
    /// None if its group has it.
    _binding: Option<Binding>,
    id: DeviceId,
    host: HostPci,
    probed: Probed,
    /// The function's DMA address width, if its native driver has set it in the kernel.
    address_bits: Option<u32>,
    allow_dirty: bool,
    ntb: Option<Adapter>,
    group: Option<Arc<SharedGroup>>,
    watch: Arc<FaultWatch>,
    stop: Wakeup,
    history: Mutex<History>,
}

/// A function, as it was found when it was not open.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Probed {
    bdf: Bdf,
    api: Api,
    described: Described,
    usable: UsableIova,
    can_reset: bool,
    /// Its expansion ROM. A lender that finds the function open does not have it.
    #[serde(skip)]
    rom: Arc<[u8]>,
}

impl Probed {
    /// Whether it is this function.
    pub(crate) fn is(&self, bdf: Bdf, api: Api) -> bool {
        (self.bdf, self.api) == (bdf, api)
    }
}

/// The leases of a function so far.
struct History {
    /// The VM that used it last, if it could not be reset since. (Functions of a shared group are reset with their bus.)
    left_dirty_by: Option<VmName>,
    /// The VM that used it last.
    last_vm: Option<VmName>,
    /// Faults of the current lease, or of the last one.
    faults: Arc<FaultLog>,
}

impl VfioDevice {
    /// Probes a function that is bound to vfio-pci, unless a worker has it open, which is `known`. Its leases within the
    /// host may `go_on` in another process.
    pub(crate) fn open(
        found: Found,
        api: Api,
        ntb: Option<Adapter>,
        watch: Arc<FaultWatch>,
        stop: Wakeup,
        known: Option<Probed>,
        go_on: bool,
    ) -> Result<Self, VfioError> {
        let Found {
            id,
            bdf,
            binding,
            allow_dirty,
            host,
            rom,
            group,
            ..
        } = found;
        let mut probed = match known.map_or_else(|| look_at(api, bdf), Ok) {
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
        if go_on {
            probed.described.state = STATE_PAGE;
        }
        if let Rom::Fixed(bytes) = rom {
            // At most `rom::MAX`.
            probed.described.rom = bytes.len() as u32;
            probed.rom = bytes;
        }
        if !probed.can_reset && !allow_dirty && group.is_none() {
            log::warn!(
                "device {id} ({bdf}) cannot be reset: it is lent to one VM only, unless it is lent with allow-dirty"
            );
        }
        let address_bits = binding.before().dma_limit_bits();
        let _binding = match &group {
            Some(group) => {
                group.add(binding, probed.bdf, probed.can_reset, allow_dirty);
                None
            }
            None => Some(binding),
        };
        Ok(Self(Arc::new(Bound {
            address_bits,
            _binding,
            history: Mutex::new(History {
                left_dirty_by: None,
                last_vm: None,
                faults: Arc::new(FaultLog::new(&*id)),
            }),
            id,
            probed,
            host,
            allow_dirty,
            ntb,
            group,
            watch,
            stop,
        })))
    }

    /// What a worker needs to open it.
    pub(crate) fn config(&self) -> FunctionConfig {
        FunctionConfig {
            bdf: self.0.probed.bdf,
            api: self.0.probed.api,
            last_vm: self.history().last_vm.clone(),
            described: self.0.probed.described.clone(),
            adopts: None,
        }
    }

    /// What the next lender needs, which cannot probe it while it is open.
    pub(crate) fn probed(&self) -> &Probed {
        &self.0.probed
    }

    /// Refuses to lend it with another VM's state.
    fn check_clean(&self) -> Result<(), RemoteError> {
        match &self.history().left_dirty_by {
            Some(vm) if !self.0.allow_dirty => Err(invalid(format!(
                "device {} ({}) cannot be reset, and VM {vm} has used it: what that left in it \
                 would be the next VM's to find; power-cycle it, or lend it with allow-dirty",
                self.0.id, self.0.probed.bdf
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses a lease with memory for BARs, which a function has of its own, and one with another
    /// VM's state.
    pub(crate) fn check_lease(&self, bar_memory: &[OwnedFd]) -> Result<(), RemoteError> {
        match bar_memory {
            [] => self.check_clean(),
            _ => Err(invalid(format!(
                "device {} has BARs of its own: the borrower brings none",
                self.0.id
            ))),
        }
    }

    /// Opens it for a lease of `owner`, clean.
    fn open_function(
        &self,
        transport: Transport,
        owner: &LeaseOwner,
    ) -> Result<Arc<Function>, RemoteError> {
        let bound = &self.0;
        let config = self.config();
        let Some(group) = &bound.group else {
            return open_clean(&bound.id, &config, &bound.stop);
        };
        match transport {
            Transport::SharedMemory => {}
            Transport::Ntb => return Err(unsupported(NO_NTB)),
            Transport::Network => return Err(unsupported(NO_NETWORK)),
        }
        let open = || group.open(config.api, config.bdf, owner);
        open_clean_by(open, &bound.id, config.last_vm.as_ref(), &bound.stop)
    }

    /// A lease to `vm` has begun.
    pub(crate) fn begun(&self, vm: &VmName) {
        let mut history = self.history();
        history.faults = Arc::new(FaultLog::new(&*self.0.id));
        self.0.watch.watch(self.0.probed.bdf, &history.faults);
        if !self.0.probed.can_reset && self.0.group.is_none() {
            history.left_dirty_by = Some(vm.clone());
        }
    }

    /// The lease of `vm` has ended. `closed` is what the function's last close in the lender returned.
    pub(crate) fn ended(&self, vm: VmName, closed: Result<(), VfioError>) {
        if let Err(error) = closed {
            log::warn!(
                "device {}: VM {vm} has not released it yet: {error}",
                self.0.id,
                error = Chain(&error)
            );
        }
        self.0.watch.forget(self.0.probed.bdf);
        self.history().last_vm = Some(vm);
    }

    /// A report of a worker, with what only this process sees.
    pub(crate) fn completed(&self, report: Report) -> Report {
        let Report {
            interrupts, faults, ..
        } = self.report();
        Report {
            interrupts,
            faults,
            ..report
        }
    }

    fn history(&self) -> MutexGuard<'_, History> {
        // Its fields do not depend on each other.
        (self.0.history.lock()).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Available for VfioDevice {
    fn kind(&self) -> &'static str {
        crate::registry::FUNCTION
    }

    fn described(&self) -> &Described {
        &self.0.probed.described
    }

    fn rom(&self) -> Arc<[u8]> {
        Arc::clone(&self.0.probed.rom)
    }

    fn check(
        &self,
        owner: Option<&LeaseOwner>,
        transport: Transport,
        ram: &[RamRange],
    ) -> Result<(), RemoteError> {
        self.check_clean()?;
        let ranges: Vec<_> = ram.iter().map(|range| (range.start, range.len)).collect();
        let named = |error: &dyn std::fmt::Display| {
            limit(format_args!(
                "device {} ({}): {error}",
                self.0.id, self.0.probed.bdf
            ))
        };
        self.0
            .probed
            .usable
            .check(&ranges)
            .map_err(|error| named(&Chain(&error)))?;
        check_width(self.0.address_bits, ram).map_err(|error| named(&error))?;
        match transport {
            Transport::SharedMemory => {
                let total = ranges
                    .iter()
                    .fold(0u64, |sum, (_, len)| sum.saturating_add(*len));
                check_memlock(total).map_err(|error| named(&error))
            }
            Transport::Ntb if self.0.group.is_some() => Err(named(&NO_NTB)),
            Transport::Ntb => {
                let adapter = adapter(self.0.ntb.as_ref())?;
                let spans: Vec<u64> = ranges.iter().map(|(_, len)| *len).collect();
                adapter.check_link().map_err(|error| named(&error))?;
                let owner = owner.map(LeaseOwner::verified).transpose()?;
                let fits = adapter.check_windows(owner, &spans);
                fits.map(|_| ()).map_err(|error| named(&error))
            }
            Transport::Network => Err(named(&NO_NETWORK)),
        }
    }

    fn flush(&mut self) -> Result<(), RemoteError> {
        // The medium is the function's own, and the guest's driver flushes it.
        Ok(())
    }

    fn report(&self) -> Report {
        Report {
            interrupts: irqs::counts(&self.0.host, self.0.probed.bdf),
            faults: self.history().faults.summary(),
            ..Report::default()
        }
    }
}

impl DeviceSource for VfioDevice {
    fn lease(
        self: Box<Self>,
        transport: Transport,
        owner: &LeaseOwner,
        memory: BorrowerMemory,
    ) -> Result<Leased, NotLeased> {
        let bound = &self.0;
        let opened = self.check_lease(&memory.bars).and_then(|()| {
            let function = self.open_function(transport, owner)?;
            match transport {
                Transport::SharedMemory => Opened::local(&bound.probed.described, function, None),
                Transport::Ntb => {
                    let adapter = adapter(bound.ntb.as_ref())?;
                    Opened::across(adapter, &bound.id, owner, &bound.probed.described, function)
                }
                Transport::Network => Err(unsupported(NO_NETWORK)),
            }
        });
        match opened {
            Ok(opened) => {
                self.begun(owner.vm());
                let id = bound.id.clone();
                Ok(LeasedFunction::lease(id, self, owner.vm(), opened))
            }
            Err(error) => Err(NotLeased {
                source: self,
                error,
            }),
        }
    }
}

impl Owner for VfioDevice {
    fn ended(self: Box<Self>, function: Arc<Function>, vm: VmName) -> Box<dyn DeviceSource> {
        // Closing the descriptor ends its interrupts and mappings; the kernel resets it again.
        let close = |function| match &self.0.group {
            Some(group) => group.close(function),
            None => Function::close(function),
        };
        let closed = Arc::into_inner(function).map(close);
        let closed = closed.unwrap_or_else(|| {
            log::error!("device {}: kept open by a bug in the lender", self.0.id);
            Ok(())
        });
        VfioDevice::ended(&self, vm, closed);
        self
    }
}

/// Opens a function to read its description, its usable IOVA ranges and whether it can be reset,
/// and closes it again.
fn look_at(api: Api, bdf: Bdf) -> Result<Probed, VfioError> {
    let domain = Domain::new(api)?;
    let function = domain.open(bdf)?;
    let rom = rom::of(&function)?;
    let described = Described {
        // At most `rom::MAX`.
        rom: rom.len() as u32,
        ..describe(&function)?
    };
    let found = Probed {
        bdf,
        api,
        described,
        rom,
        usable: domain.usable_iova()?,
        can_reset: function.can_reset(),
    };
    function.close()?;
    Ok(found)
}

fn describe(function: &Function) -> Result<Described, VfioError> {
    Ok(Described {
        description: function.description()?,
        bars: BarOwner::Lender,
        state: 0,
        rom: 0,
    })
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
