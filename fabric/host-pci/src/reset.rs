//! How a function can be reset.
//!
//! Source: Linux `Documentation/ABI/testing/sysfs-bus-pci`, `reset_method`, and
//! `pci_reset_fn_methods` of the kernel, which defines the names.

use std::fmt;

use crate::error::PciError;
use crate::function::{HostPci, device_dir};
use crate::sysfs::Tree;
use farside_pci::Bdf;

/// The kernel has fewer than ten.
const MAX_METHODS: usize = 16;

/// A reset method of a function, by the kernel's name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResetMethod {
    /// A device-specific quirk.
    DeviceSpecific,
    /// The firmware's `_RST` method.
    Acpi,
    /// Function-level reset of PCI Express.
    Flr,
    /// Function-level reset of the advanced-features capability.
    AfFlr,
    /// Power state D3hot and back.
    Pm,
    /// Reset of the bus above it, on which it is the only device.
    Bus,
    /// Reset of the bus of a CXL device.
    CxlBus,
    /// The kernel can reset it but is too old (before 5.15) to report how.
    Unnamed,
    /// A method newer than this code.
    Other(String),
}

impl ResetMethod {
    fn parse(word: &str) -> Self {
        match word {
            "device_specific" => Self::DeviceSpecific,
            "acpi" => Self::Acpi,
            "flr" => Self::Flr,
            "af_flr" => Self::AfFlr,
            "pm" => Self::Pm,
            "bus" => Self::Bus,
            "cxl_bus" => Self::CxlBus,
            other => Self::Other(other.chars().take(32).collect()),
        }
    }
}

impl fmt::Display for ResetMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DeviceSpecific => "device_specific",
            Self::Acpi => "acpi",
            Self::Flr => "flr",
            Self::AfFlr => "af_flr",
            Self::Pm => "pm",
            Self::Bus => "bus",
            Self::CxlBus => "cxl_bus",
            Self::Unnamed => "unnamed",
            Self::Other(word) => word,
        })
    }
}

impl HostPci {
    /// How the function can be reset, in the order in which the kernel tries.
    ///
    /// Empty if it cannot be reset by itself. (VFIO may still reset a whole slot or bus whose
    /// functions all have the same owner.)
    ///
    /// # Errors
    /// As [`HostPci::function`].
    pub fn reset_methods(&self, bdf: &Bdf) -> Result<Vec<ResetMethod>, PciError> {
        self.must_exist(bdf)?;
        methods(&self.tree, &device_dir(bdf))
    }

    /// Whether the kernel can reset the function.
    ///
    /// # Errors
    /// As [`HostPci::function`].
    pub fn can_be_reset(&self, bdf: &Bdf) -> Result<bool, PciError> {
        Ok(!self.reset_methods(bdf)?.is_empty())
    }
}

pub(crate) fn methods(tree: &Tree, dir: &str) -> Result<Vec<ResetMethod>, PciError> {
    if let Some(text) = tree.attribute(&format!("{dir}/reset_method"))? {
        return Ok(text
            .split_ascii_whitespace()
            .take(MAX_METHODS)
            .map(ResetMethod::parse)
            .collect());
    }
    Ok(if tree.exists(&format!("{dir}/reset")) {
        vec![ResetMethod::Unnamed]
    } else {
        Vec::new()
    })
}
