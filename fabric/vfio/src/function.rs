//! An open vfio-pci function.

mod open;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farside_error_chain::Chain;
use farside_fabric::PAGE_SIZE;
use farside_irq_relay::{IrqCounts, IrqIndex, IrqInfo, SetIrqs};
use farside_pci::regs::{COMMAND, COMMAND_IO, COMMAND_MASTER, COMMAND_MEMORY};
use farside_pci::{Bdf, Description, rom};
use vfio_bindings::bindings::vfio::{VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_ROM_REGION_INDEX};

use crate::description::{self, Region};
use crate::iommu::Space;
use crate::irqs::Irqs;
use crate::second_handle::{FunctionInfo, HandleParts};
use crate::{Domain, RegionMemory, VfioError, ioctl};

pub(crate) use open::Handle;
use open::irq_counts;
pub use open::{check_free, nodes, reset_bus};

/// A PCI function that is bound to vfio-pci and open in this process. Dropping it
/// stops its DMA and interrupts and closes it; the kernel resets it when no process
/// has it open any more.
///
/// Calls may come from any thread.
#[derive(Debug)]
pub struct Function {
    // Dropped in this order: a handle lives in its domain.
    handle: Arc<Handle>,
    domain: Domain,
    irqs: Mutex<Irqs>,
    counts: IrqCounts,
    info: FunctionInfo,
    /// Two read-modify-writes of the command register at once would lose one.
    command: Mutex<()>,
}

impl Function {
    pub(crate) fn open(domain: &Domain, bdf: Bdf) -> Result<Self, VfioError> {
        let (handle, info) = Handle::open(domain.iommu(), bdf)?;
        let function = Self::with(domain, handle, info, false)?;
        // The guest's command register is the backend's; the device's always
        // decodes, or accesses through a mapping would end this process.
        function.change_command(COMMAND_MEMORY | COMMAND_IO, COMMAND_MASTER)?;
        Ok(function)
    }

    /// Goes on with a function that a process had open which is gone, in its domain: with its registers, mappings and
    /// interrupts. `parts` and the descriptors are those of a [`SecondHandle`](crate::SecondHandle).
    ///
    /// Until [`Function::settle`], mapping what that process has mapped has no effect but that it stays mapped.
    ///
    /// # Errors
    /// [`VfioError::Unsupported`]: `parts` are of a version that did not support this.
    pub fn adopt(parts: HandleParts, [device, space]: [OwnedFd; 2]) -> Result<Self, VfioError> {
        let HandleParts {
            bdf, iommu, info, ..
        } = parts;
        let info = info.ok_or_else(|| VfioError::Unsupported {
            bdf,
            problem: "the farside that has opened it hands no functions over".to_owned(),
        })?;
        let domain = Domain::adopt(Space::from_parts(space, iommu));
        Self::with(&domain, Handle::adopt(bdf, device), info, true)
    }

    /// In its domain.
    fn with(
        domain: &Domain,
        handle: Handle,
        info: FunctionInfo,
        inherited: bool,
    ) -> Result<Self, VfioError> {
        let counts = irq_counts(handle.bdf(), &info.irqs)?;
        domain.joined();
        // From here on, dropping it rolls back.
        Ok(Self {
            irqs: Mutex::new(Irqs::new(handle.bdf(), info.irqs, inherited)),
            handle: Arc::new(handle),
            domain: domain.clone(),
            counts,
            info,
            command: Mutex::default(),
        })
    }

    /// Of a function that was [adopted](Function::adopt), once what the former process had set up and is still wanted is
    /// set up again: takes down what else there is of that one, mappings and interrupts. Returns false if that was done
    /// before, or the function was opened here.
    ///
    /// # Errors
    /// [`VfioError::Unmap`]. Call it again.
    pub fn settle(&self) -> Result<bool, VfioError> {
        let settles = self.domain.settle()?;
        if settles {
            self.irqs_state().settle(&*self.handle);
        }
        Ok(settles)
    }

    /// Signals each interrupt, of which one may have been lost when the function was [adopted](Function::adopt).
    ///
    /// # Errors
    /// [`VfioError::Irqs`].
    pub fn signal_interrupts(&self) -> Result<(), VfioError> {
        self.irqs_state().signal_all(&*self.handle)
    }

    /// Where it is.
    pub fn bdf(&self) -> Bdf {
        self.handle.bdf()
    }

    /// The domain that its DMA goes through.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Its description for a borrower. Configuration space is as after a reset.
    ///
    /// # Errors
    /// [`VfioError::Access`], [`VfioError::Unsupported`].
    pub fn description(&self) -> Result<Description, VfioError> {
        let mut config = vec![0; description::config_size(&self.info.regions)];
        self.config_read(0, &mut config)?;
        let bdf = self.bdf();
        description::describe(bdf, config, &self.info.regions, self.counts)
            .map_err(|problem| VfioError::Unsupported { bdf, problem })
    }

    /// Reads configuration space through VFIO, which fills in a VF's ids and virtualizes BARs and
    /// interrupts.
    ///
    /// # Errors
    /// [`VfioError::BadAccess`], [`VfioError::Access`].
    pub fn config_read(&self, offset: u64, data: &mut [u8]) -> Result<(), VfioError> {
        self.read(VFIO_PCI_CONFIG_REGION_INDEX, offset, data)
    }

    /// Writes configuration space through VFIO, which blocks writes that would harm the host. Leave
    /// decoding on and the function in D0; see [`RegionMemory`].
    ///
    /// # Errors
    /// As [`Function::config_read`].
    pub fn config_write(&self, offset: u64, data: &[u8]) -> Result<(), VfioError> {
        self.write(VFIO_PCI_CONFIG_REGION_INDEX, offset, data)
    }

    /// Its expansion ROM; empty if it has none that the kernel finds valid, or one that is too large.
    ///
    /// # Errors
    /// [`VfioError::Access`].
    pub fn rom(&self) -> Result<Vec<u8>, VfioError> {
        let region = self.info.regions.get(VFIO_PCI_ROM_REGION_INDEX as usize);
        let size = region.map_or(0, |region| region.size);
        let size = usize::try_from(size).ok().filter(|&size| size <= rom::MAX);
        let mut data = vec![0; size.unwrap_or(0)];
        if !data.is_empty() {
            self.read(VFIO_PCI_ROM_REGION_INDEX, 0, &mut data)?;
        }
        Ok(data)
    }

    /// Reads 1, 2, 4 or 8 bytes, naturally aligned, at `offset` of BAR `bar`.
    ///
    /// # Errors
    /// As [`Function::config_read`].
    pub fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) -> Result<(), VfioError> {
        self.check_access(bar, offset, data.len())?;
        self.read(bar.into(), offset, data)
    }

    /// Writes 1, 2, 4 or 8 bytes, naturally aligned, at `offset` of BAR `bar`.
    ///
    /// # Errors
    /// As [`Function::config_read`].
    pub fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) -> Result<(), VfioError> {
        self.check_access(bar, offset, data.len())?;
        self.write(bar.into(), offset, data)
    }

    /// Maps `len` bytes at `offset` of BAR `bar` into this process: whole
    /// pages, in what the kernel allows.
    ///
    /// # Errors
    /// [`VfioError::BadAccess`], [`VfioError::MapRegion`].
    pub fn map_region(
        &self,
        bar: u8,
        offset: u64,
        len: u64,
    ) -> Result<Arc<RegionMemory>, VfioError> {
        let (region, bytes) = self.mappable(bar, offset, len)?;
        RegionMemory::new(
            Arc::clone(&self.handle),
            bar,
            offset,
            bytes,
            region.file_offset,
        )
        .map(Arc::new)
        .map_err(|source| VfioError::MapRegion {
            bdf: self.bdf(),
            bar,
            offset,
            len,
            source,
        })
    }

    /// A descriptor to map BAR `bar` from, and the BAR's offset in it, for another process (a VMM).
    ///
    /// It is the function's own descriptor: its holder can access every register, reset the
    /// function and change its interrupts, and blocks the function from being opened again until it
    /// is closed and unmapped. Send it only to trusted processes; the function's DMA stays confined
    /// to its domain.
    ///
    /// # Errors
    /// [`VfioError::BadAccess`], [`VfioError::MapRegion`].
    pub fn bar_file(&self, bar: u8) -> Result<(OwnedFd, u64), VfioError> {
        let (region, _) = self.mappable(bar, 0, PAGE_SIZE)?;
        let file = self.handle.file().try_clone();
        let file = file.map_err(|source| VfioError::MapRegion {
            bdf: self.bdf(),
            bar,
            offset: 0,
            len: region.size,
            source,
        })?;
        Ok((file.into(), region.file_offset))
    }

    /// What another process needs for a [`SecondHandle`](crate::SecondHandle) on it.
    ///
    /// # Errors
    /// [`VfioError::Open`].
    pub fn share(&self) -> Result<(HandleParts, [OwnedFd; 2]), VfioError> {
        let shared = || {
            let device = self.handle.file().try_clone()?;
            let (container, iommu) = self.domain.iommu().share()?;
            Ok((iommu, [device.into(), container]))
        };
        let (iommu, fds) = shared().map_err(|source| VfioError::Open {
            bdf: self.bdf(),
            step: "duplicating its descriptors",
            source,
        })?;
        let parts = HandleParts {
            bdf: self.bdf(),
            config_offset: self.file_offset(VFIO_PCI_CONFIG_REGION_INDEX, 0, 0)?,
            iommu,
            info: Some(self.info.clone()),
        };
        Ok((parts, fds))
    }

    /// Whether [`Function::reset`] can work.
    pub fn can_reset(&self) -> bool {
        self.info.can_reset
    }

    /// Resets the function by the best method that does not affect others: function-level, by power
    /// state, or its bus. Its registers are then as after power-on, but for decoding, bus mastering
    /// and what VFIO set up, which are as before. Takes 100 ms and more.
    ///
    /// # Errors
    /// [`VfioError::NoReset`], [`VfioError::Reset`].
    pub fn reset(&self) -> Result<(), VfioError> {
        let bdf = self.bdf();
        if !self.info.can_reset {
            return Err(VfioError::NoReset { bdf });
        }
        ioctl::reset(self.handle.file().as_fd()).map_err(|source| VfioError::Reset { bdf, source })
    }

    /// Enables or disables bus mastering.
    ///
    /// # Errors
    /// [`VfioError::Access`].
    pub fn set_bus_master(&self, enabled: bool) -> Result<(), VfioError> {
        match enabled {
            true => self.change_command(COMMAND_MASTER, 0),
            false => self.change_command(0, COMMAND_MASTER),
        }
    }

    /// Whether bus mastering is enabled.
    ///
    /// # Errors
    /// [`VfioError::Access`].
    pub fn bus_master(&self) -> Result<bool, VfioError> {
        let mut command = [0; 2];
        self.config_read(COMMAND as u64, &mut command)?;
        Ok(u16::from_le_bytes(command) & COMMAND_MASTER != 0)
    }

    /// Its vector counts.
    pub fn irq_counts(&self) -> IrqCounts {
        self.counts
    }

    /// What the kernel reports for an interrupt index, `VFIO_IRQ_INFO_NORESIZE`
    /// included. ([`Function::set_irqs`] copes with that.)
    pub fn irq_info(&self, index: IrqIndex) -> IrqInfo {
        self.info.irqs[index as usize]
    }

    /// Executes a `VFIO_DEVICE_SET_IRQS` whose triggers are eventfds. The kernel signals them
    /// directly from then on.
    ///
    /// More can be requested than of the kernel: vectors may be added where the index cannot be
    /// resized (then it is disabled and set up again, within which an interrupt may be lost),
    /// disabling twice is no error, and MSI and MSI-X vectors can be masked: an interrupt meanwhile
    /// stays pending and is signalled on unmask.
    ///
    /// # Errors
    /// [`VfioError::NotAnEventFd`], [`VfioError::Irqs`].
    pub fn set_irqs(&self, request: &SetIrqs) -> Result<(), VfioError> {
        self.irqs_state().apply(&*self.handle, request)
    }

    /// Closes the function, and checks that no other process still has it open.
    ///
    /// # Errors
    /// [`VfioError::Busy`]: another process has a descriptor or a mapping of it, so it must not be
    /// lent again. It is closed here nevertheless. (While handles on its [`Domain`] are left, those
    /// keep its group open then.)
    pub fn close(self) -> Result<(), VfioError> {
        let (bdf, api) = (self.bdf(), self.domain.api());
        drop(self);
        check_free(bdf, api)
    }

    /// Disables bus mastering and interrupts; logs failures.
    pub fn stop(&self) {
        let stopped = self.set_bus_master(false);
        self.irqs_state().disable_all(&*self.handle);
        if let Err(error) = stopped {
            log::error!("{error}", error = Chain(&error));
        }
    }

    fn irqs_state(&self) -> MutexGuard<'_, Irqs> {
        // `Irqs` records each change right after the kernel has made it.
        self.irqs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change_command(&self, set: u16, clear: u16) -> Result<(), VfioError> {
        let _one_at_a_time = self.command.lock().unwrap_or_else(PoisonError::into_inner);
        let mut command = [0; 2];
        self.config_read(COMMAND as u64, &mut command)?;
        let old = u16::from_le_bytes(command);
        let new = (old | set) & !clear;
        self.config_write(COMMAND as u64, &new.to_le_bytes())
    }

    /// The region and length of a part of a BAR that can be mapped.
    fn mappable(&self, bar: u8, offset: u64, len: u64) -> Result<(&Region, usize), VfioError> {
        let region = self.bar_region(bar, offset, len)?;
        let refused = |text: &str| VfioError::MapRegion {
            bdf: self.bdf(),
            bar,
            offset,
            len,
            source: io::Error::new(io::ErrorKind::InvalidInput, text.to_owned()),
        };
        if !region.can_map {
            return Err(refused(
                "the kernel does not let it be mapped (it is I/O space, or shares its page with \
                 other registers)",
            ));
        }
        let whole = offset.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE);
        match usize::try_from(len) {
            Ok(bytes) if whole && bytes != 0 => Ok((region, bytes)),
            _ => Err(refused("it is not whole pages")),
        }
    }

    /// The region of a BAR that has `len` bytes at `offset`.
    fn bar_region(&self, bar: u8, offset: u64, len: u64) -> Result<&Region, VfioError> {
        let region = self.info.regions.get(usize::from(bar)).filter(|_| bar < 6);
        let size = region.map_or(0, |region| region.size);
        let end = offset.checked_add(len).filter(|&end| end <= size);
        match (region, end) {
            (Some(region), Some(_)) => Ok(region),
            _ => Err(VfioError::BadAccess {
                bdf: self.bdf(),
                region: format!("BAR {bar}"),
                offset,
                len: usize::try_from(len).unwrap_or(usize::MAX),
                size,
            }),
        }
    }

    fn check_access(&self, bar: u8, offset: u64, len: usize) -> Result<(), VfioError> {
        let natural = matches!(len, 1 | 2 | 4 | 8) && offset.is_multiple_of(len as u64);
        let region = self.bar_region(bar, offset, len as u64)?;
        if natural {
            return Ok(());
        }
        Err(VfioError::BadAccess {
            bdf: self.bdf(),
            region: format!("BAR {bar} (1, 2, 4 or 8 bytes, naturally aligned)"),
            offset,
            len,
            size: region.size,
        })
    }

    fn read(&self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), VfioError> {
        let at = self.file_offset(index, offset, data.len())?;
        self.handle
            .file()
            .read_exact_at(data, at)
            .map_err(|source| self.access_error("read", index, offset, data.len(), source))
    }

    fn write(&self, index: u32, offset: u64, data: &[u8]) -> Result<(), VfioError> {
        let at = self.file_offset(index, offset, data.len())?;
        self.handle
            .file()
            .write_all_at(data, at)
            .map_err(|source| self.access_error("write", index, offset, data.len(), source))
    }

    fn file_offset(&self, index: u32, offset: u64, len: usize) -> Result<u64, VfioError> {
        let region = self.info.regions.get(index as usize);
        let size = region.map_or(0, |region| region.size);
        let end = offset.checked_add(len as u64).filter(|&end| end <= size);
        match (region, end) {
            (Some(region), Some(_)) => Ok(region.file_offset + offset),
            _ => Err(VfioError::BadAccess {
                bdf: self.bdf(),
                region: region_name(index),
                offset,
                len,
                size,
            }),
        }
    }

    fn access_error(
        &self,
        verb: &'static str,
        index: u32,
        offset: u64,
        len: usize,
        source: io::Error,
    ) -> VfioError {
        VfioError::Access {
            bdf: self.bdf(),
            verb,
            region: region_name(index),
            offset,
            len,
            source,
        }
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        // Another holder of a descriptor keeps the function open, so closing this one may not stop
        // it: stop everything here.
        self.stop();
        self.domain.leaving();
    }
}

fn region_name(index: u32) -> String {
    match index {
        VFIO_PCI_CONFIG_REGION_INDEX => "configuration space".to_owned(),
        VFIO_PCI_ROM_REGION_INDEX => "expansion ROM".to_owned(),
        bar => format!("BAR {bar}"),
    }
}

impl crate::irqs::Kernel for Handle {
    fn set_irqs(&self, set: ioctl::IrqSet<'_>) -> io::Result<()> {
        let file: &File = self.file();
        ioctl::set_irqs(file.as_fd(), set)
    }
}
