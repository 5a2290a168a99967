//! IOMMU groups: which functions the IOMMU cannot distinguish.
//!
//! VFIO opens a group only when no function in it is bound to a host driver, since a function could
//! reach its neighbours' memory. The accepted drivers are those of the kernel (`vfio_dev_viable`,
//! and drivers that do not use DMA, such as `pcieport`).

use std::fmt;

use crate::error::PciError;
use crate::function::{FunctionInfo, FunctionKind, HostPci, device_dir, some_of};
use crate::vfio_driver::is_for_users;
use farside_pci::Bdf;

const GROUPS: &str = "sys/kernel/iommu_groups";

/// A member of an IOMMU group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Member {
    /// A PCI function.
    Function(FunctionInfo),
    /// A device of another bus, such as a platform device.
    Other {
        /// Its name in sysfs.
        name: String,
        /// The driver that has it.
        driver: Option<String>,
    },
}

/// An IOMMU group: its functions can only be lent to one borrower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its number; `/dev/vfio/<id>` with the group interface of VFIO.
    pub id: u32,
    /// Its members, in order of their names.
    pub members: Vec<Member>,
}

impl Group {
    /// Checks that no member is bound to a host driver, except those in `lent`, which are about to
    /// be unbound. The error names `bdf`.
    ///
    /// # Errors
    /// [`PciError::GroupNotViable`] with every conflicting member.
    pub fn viable(&self, bdf: &Bdf, lent: &[Bdf]) -> Result<(), PciError> {
        let others: Vec<&Member> = self
            .members
            .iter()
            .filter(|member| !member.is_out_of_the_way(bdf, lent))
            .collect();
        if others.is_empty() {
            return Ok(());
        }
        Err(PciError::GroupNotViable {
            bdf: *bdf,
            group: self.id,
            others: some_of(&others),
        })
    }
}

impl Member {
    fn is_out_of_the_way(&self, bdf: &Bdf, lent: &[Bdf]) -> bool {
        let driver = match self {
            Self::Function(info) if info.bdf == *bdf || lent.contains(&info.bdf) => return true,
            Self::Function(info) if info.kind == FunctionKind::PciBridge => return true,
            Self::Function(info) => info.driver.as_deref(),
            Self::Other { driver, .. } => driver.as_deref(),
        };
        driver
            .is_none_or(|driver| is_for_users(driver) || matches!(driver, "pci-stub" | "pcieport"))
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, driver): (&dyn fmt::Display, _) = match self {
            Self::Function(info) => (&info.bdf, &info.driver),
            Self::Other { name, driver } => (name, driver),
        };
        write!(f, "{name} ({})", driver.as_deref().unwrap_or("no driver"))
    }
}

impl HostPci {
    /// The IOMMU group of a function.
    ///
    /// # Errors
    /// [`PciError::NoIommu`] or [`PciError::NoGroup`] if it is in none; as [`HostPci::function`].
    pub fn group(&self, bdf: &Bdf) -> Result<Group, PciError> {
        self.must_exist(bdf)?;
        let id = self.require_group(bdf)?;
        let dir = format!("{GROUPS}/{id}/devices");
        let mut members = Vec::new();
        for name in self.tree.names(&dir)? {
            members.push(match name.parse() {
                Ok(member) => Member::Function(self.function(&member)?),
                Err(_) => Member::Other {
                    driver: self.tree.link_name(&format!("{dir}/{name}/driver"))?,
                    name,
                },
            });
        }
        Ok(Group { id, members })
    }

    /// The number of the function's group, or why it has none.
    pub(crate) fn require_group(&self, bdf: &Bdf) -> Result<u32, PciError> {
        let Some(id) = self.iommu_group(bdf)? else {
            self.require_iommu()?;
            return Err(PciError::NoGroup { bdf: *bdf });
        };
        // Groups of VFIO's no-IOMMU mode do not isolate.
        let name = self.tree.attribute(&format!("{GROUPS}/{id}/name"))?;
        if name.as_deref() == Some("vfio-noiommu") {
            return Err(PciError::NoIommu {
                advice: format!(
                    "group {id} of {bdf} was made up by vfio's enable_unsafe_noiommu_mode; turn that \
                     off and the IOMMU on"
                ),
            });
        }
        Ok(id)
    }

    pub(crate) fn iommu_group(&self, bdf: &Bdf) -> Result<Option<u32>, PciError> {
        let path = format!("{}/iommu_group", device_dir(bdf));
        let Some(name) = self.tree.link_name(&path)? else {
            return Ok(None);
        };
        match name.parse() {
            Ok(id) => Ok(Some(id)),
            Err(_) => Err(self.malformed(&path, &name, "a group's number was expected")),
        }
    }
}
