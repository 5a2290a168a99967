//! An open function, as another process holds it.

use std::{
    fmt,
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
};

use farside_error_chain::Chain;
use farside_fabric::Iova;
use farside_irq_relay::IrqInfo;
use farside_pci::{
    Bdf,
    regs::{COMMAND, COMMAND_MASTER},
};
use serde::{Deserialize, Serialize};

use crate::{Api, Region, VfioError, function::check_free, iommu::Space};

/// What a [`SecondHandle`] is made of, beside its descriptors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HandleParts {
    pub(crate) bdf: Bdf,
    /// Where the function's configuration space is in its descriptor.
    pub(crate) config_offset: u64,
    pub(crate) iommu: IommuParts,
    /// For [`Function::adopt`](crate::Function::adopt). A former version has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) info: Option<FunctionInfo>,
}

/// What the kernel reports of a function.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct FunctionInfo {
    pub(crate) regions: Vec<Region>,
    pub(crate) irqs: [IrqInfo; 5],
    pub(crate) can_reset: bool,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum IommuParts {
    Type1,
    Iommufd { ioas: u32 },
}

/// A handle on a function that another process has opened, to stop its DMA when that process is
/// gone. (A third, such as a VMM, may hold a descriptor of the function, too, and with it keep the
/// mappings of its domain.) It keeps the function and its domain open, and takes the function down
/// when it is dropped.
pub struct SecondHandle {
    parts: HandleParts,
    device: File,
    space: Space,
}

impl SecondHandle {
    /// Whether a handle can unmap what another process has mapped: with type1, since Linux 6.0.
    pub fn can_take_down(api: Api) -> bool {
        let release = rustix::system::uname();
        let release = release.release().to_string_lossy();
        let major = release.split('.').next().and_then(|it| it.parse().ok());
        api == Api::Iommufd || major.is_some_and(|major: u32| major >= 6)
    }

    /// From what [`Function::share`](crate::Function::share) has returned.
    pub fn new(parts: HandleParts, [device, iommu]: [OwnedFd; 2]) -> Self {
        Self {
            space: Space::from_parts(iommu, parts.iommu),
            parts,
            device: device.into(),
        }
    }

    /// Whether [`Function::adopt`](crate::Function::adopt) can go on with the function.
    pub fn can_be_adopted(&self) -> bool {
        self.parts.info.is_some()
    }

    /// The same for another process: see [`Function::adopt`](crate::Function::adopt).
    ///
    /// # Errors
    /// The system is out of descriptors.
    pub fn share(&self) -> io::Result<(HandleParts, [OwnedFd; 2])> {
        let device = self.device.try_clone()?.into();
        let space = self.space.share()?;
        Ok((self.parts.clone(), [device, space]))
    }

    /// Disables bus mastering and unmaps everything from the function's domain. No DMA reaches
    /// memory after it returned `Ok`. Continues after a failure.
    ///
    /// # Errors
    /// [`VfioError::Unmap`] if memory may still be mapped. (That the command register cannot be
    /// written is only logged: the IOMMU stops the function.)
    pub fn take_down(&self) -> Result<(), VfioError> {
        if let Err(error) = self.disable_bus_master() {
            let bdf = self.parts.bdf;
            log::error!("cannot disable bus mastering of {bdf}: {error}");
        }
        self.unmap_all()
    }

    /// Closes the handle, and checks that no process has the function open any more.
    ///
    /// # Errors
    /// As [`Function::close`](crate::Function::close).
    pub fn close(self) -> Result<(), VfioError> {
        let (bdf, api) = (self.parts.bdf, self.space.api());
        drop(self);
        check_free(bdf, api)
    }

    fn disable_bus_master(&self) -> io::Result<()> {
        let at = self.parts.config_offset + COMMAND as u64;
        let mut command = [0; 2];
        self.device.read_exact_at(&mut command, at)?;
        let disabled = u16::from_le_bytes(command) & !COMMAND_MASTER;
        self.device.write_all_at(&disabled.to_le_bytes(), at)
    }

    fn unmap_all(&self) -> Result<(), VfioError> {
        self.space.unmap_all().map_err(|source| VfioError::Unmap {
            at: Iova::new(0),
            len: u64::MAX,
            unmapped: 0,
            source,
        })
    }
}

impl Drop for SecondHandle {
    fn drop(&mut self) {
        if let Err(error) = self.take_down() {
            log::error!("{}", Chain(&error));
        }
    }
}

impl fmt::Debug for SecondHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SecondHandle")
            .field(&self.parts.bdf)
            .finish()
    }
}
