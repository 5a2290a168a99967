//! A PCI function, from its directory in sysfs.
//!
//! Source: Linux `Documentation/ABI/testing/sysfs-bus-pci`.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::PciError;
use crate::sysfs::{Kernel, LinuxKernel, Tree};
use farside_pci::Bdf;
use farside_pci::regs::{HEADER_TYPE, HEADER_TYPE_MASK};

/// Contains a directory for each PCI function.
pub(crate) const DEVICES: &str = "sys/bus/pci/devices";
/// The default DMA mask, until a driver sets one.
const DEFAULT_DMA_MASK_BITS: u32 = 32;
/// How many functions an error names.
const NEAR: usize = 8;

/// The PCI functions of a host.
///
/// Cheap to clone; holds only the paths of the kernel's files.
#[derive(Clone)]
pub struct HostPci {
    pub(crate) tree: Tree,
}

/// SR-IOV numbers of a physical function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sriov {
    /// How many virtual functions it can have (`sriov_totalvfs`).
    pub total: u32,
    /// How many it has now (`sriov_numvfs`).
    pub enabled: u32,
}

/// Endpoint or bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FunctionKind {
    /// A device, of whatever class; an NTB endpoint too, although its class
    /// is often 06 80 ("other bridge").
    Endpoint,
    /// A function with a bridge's header: ports and switches.
    PciBridge,
    /// A host or ISA bridge with an endpoint's header: part of the chipset.
    HostBridge,
}

/// The sysfs attributes of a function, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Its address.
    pub bdf: Bdf,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Class code: base class in bits 23:16, sub-class in 15:8, interface in 7:0.
    pub class: u32,
    /// Endpoint or bridge.
    pub kind: FunctionKind,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// Its `driver_override`, if set.
    pub driver_override: Option<String>,
    /// Its IOMMU group's number.
    pub iommu_group: Option<u32>,
    /// The physical function of a virtual function.
    pub physfn: Option<Bdf>,
    /// SR-IOV numbers of a physical function that supports it.
    pub sriov: Option<Sriov>,
    /// Width of the addresses that the function puts on the bus, in bits, as
    /// the last driver set it; see [`FunctionInfo::dma_limit_bits`].
    pub dma_mask_bits: Option<u32>,
}

impl FunctionInfo {
    /// The device's true DMA address width in bits, if known.
    ///
    /// The kernel shows 32 for every function whose driver has not set a mask, and vfio-pci does
    /// not set one: 32 is trusted only while the function is bound to its native driver. That
    /// driver's mask persists after it is unbound.
    pub fn dma_limit_bits(&self) -> Option<u32> {
        let own_driver = self
            .driver
            .as_deref()
            .is_some_and(|driver| !crate::vfio_driver::is_for_users(driver));
        self.dma_mask_bits
            .filter(|&bits| own_driver || bits != DEFAULT_DMA_MASK_BITS)
    }
}

impl fmt::Display for FunctionInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} [{:04x}:{:04x}] class {:04x}",
            self.bdf,
            self.vendor,
            self.device,
            self.class >> 8
        )?;
        match &self.driver {
            Some(driver) => write!(f, " ({driver})"),
            None => write!(f, " (no driver)"),
        }
    }
}

impl HostPci {
    /// The host that runs this process.
    pub fn new() -> Self {
        Self::at("/")
    }

    /// A host whose `sys`, `proc` and `dev` are directories of `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self::with_kernel(root, Arc::new(LinuxKernel))
    }

    /// As [`HostPci::at`], with writes done by `kernel`.
    pub fn with_kernel(root: impl Into<PathBuf>, kernel: Arc<dyn Kernel>) -> Self {
        Self {
            tree: Tree::new(root.into(), kernel),
        }
    }

    /// The addresses of all PCI functions, in order.
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn addresses(&self) -> Result<Vec<Bdf>, PciError> {
        let mut all: Vec<Bdf> = self
            .tree
            .names(DEVICES)?
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect();
        all.sort();
        Ok(all)
    }

    /// All PCI functions, in order. Functions that are unplugged meanwhile are omitted.
    ///
    /// # Errors
    /// sysfs cannot be read or parsed.
    pub fn functions(&self) -> Result<Vec<FunctionInfo>, PciError> {
        let mut all = Vec::new();
        for bdf in self.addresses()? {
            match self.function(&bdf) {
                Ok(info) => all.push(info),
                Err(PciError::NoFunction { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }

    /// The sysfs attributes of one function.
    ///
    /// # Errors
    /// [`PciError::NoFunction`], or sysfs cannot be parsed.
    pub fn function(&self, bdf: &Bdf) -> Result<FunctionInfo, PciError> {
        let dir = device_dir(bdf);
        let Some(vendor) = self.hex_attribute(&dir, "vendor")? else {
            return Err(self.no_function(bdf));
        };
        let class = self.hex_attribute(&dir, "class")?.unwrap_or(0);
        Ok(FunctionInfo {
            bdf: *bdf,
            vendor,
            device: self.hex_attribute(&dir, "device")?.unwrap_or(0),
            class,
            kind: self.kind(&dir, class)?,
            driver: self.driver(bdf)?,
            driver_override: self.driver_override(bdf)?,
            iommu_group: self.iommu_group(bdf)?,
            physfn: self
                .tree
                .link_name(&format!("{dir}/physfn"))?
                .and_then(|name| name.parse().ok()),
            sriov: self.sriov_numbers(bdf)?,
            dma_mask_bits: self.number_attribute(&dir, "dma_mask_bits")?,
        })
    }

    /// The driver that the function is bound to.
    pub(crate) fn driver(&self, bdf: &Bdf) -> Result<Option<String>, PciError> {
        self.tree.link_name(&format!("{}/driver", device_dir(bdf)))
    }

    pub(crate) fn driver_override(&self, bdf: &Bdf) -> Result<Option<String>, PciError> {
        Ok(self
            .tree
            .attribute(&format!("{}/driver_override", device_dir(bdf)))?
            // How the kernel prints a null pointer.
            .filter(|text| !text.is_empty() && text != "(null)"))
    }

    pub(crate) fn must_exist(&self, bdf: &Bdf) -> Result<(), PciError> {
        if self.tree.exists(&device_dir(bdf)) {
            Ok(())
        } else {
            Err(self.no_function(bdf))
        }
    }

    fn no_function(&self, bdf: &Bdf) -> PciError {
        let all = self.addresses().unwrap_or_default();
        let same_slot = |other: &&Bdf| {
            (other.domain(), other.bus(), other.device()) == (bdf.domain(), bdf.bus(), bdf.device())
        };
        let same_bus = |other: &&Bdf| (other.domain(), other.bus()) == (bdf.domain(), bdf.bus());
        let mut near: Vec<Bdf> = all.iter().filter(same_slot).copied().collect();
        if near.is_empty() {
            near = all.iter().filter(same_bus).copied().collect();
        }
        let near = if near.is_empty() {
            format!(
                "it has {} functions on other buses (see `lspci`)",
                all.len()
            )
        } else {
            format!("near it are {}", some_of(&near))
        };
        PciError::NoFunction { bdf: *bdf, near }
    }

    fn kind(&self, dir: &str, class: u32) -> Result<FunctionKind, PciError> {
        // The first 64 bytes are readable without privileges.
        let config = self
            .tree
            .bytes(&format!("{dir}/config"), HEADER_TYPE as u64 + 1)?
            .unwrap_or_default();
        let bridge_header = match config.get(HEADER_TYPE) {
            // All ones: the function does not answer (powered down, unplugged).
            Some(&header) if header != 0xff => header & HEADER_TYPE_MASK != 0,
            _ => matches!(class >> 8, 0x0604 | 0x0607 | 0x0609),
        };
        Ok(match class >> 8 {
            _ if bridge_header => FunctionKind::PciBridge,
            0x0600..=0x0602 => FunctionKind::HostBridge,
            _ => FunctionKind::Endpoint,
        })
    }

    /// A decimal attribute of a function.
    pub(crate) fn number_attribute(&self, dir: &str, name: &str) -> Result<Option<u32>, PciError> {
        let path = format!("{dir}/{name}");
        let Some(text) = self.tree.attribute(&path)? else {
            return Ok(None);
        };
        match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(self.malformed(&path, &text, "a decimal number was expected")),
        }
    }

    /// An attribute such as `0x8086`.
    fn hex_attribute<T: TryFrom<u32>>(&self, dir: &str, name: &str) -> Result<Option<T>, PciError> {
        let path = format!("{dir}/{name}");
        let Some(text) = self.tree.attribute(&path)? else {
            return Ok(None);
        };
        text.strip_prefix("0x")
            .and_then(|digits| u32::from_str_radix(digits, 16).ok())
            .and_then(|number| T::try_from(number).ok())
            .map(Some)
            .ok_or_else(|| self.malformed(&path, &text, "a number such as 0x8086 was expected"))
    }

    pub(crate) fn malformed(&self, path: &str, text: &str, why: &str) -> PciError {
        PciError::Malformed {
            path: self.tree.path(path),
            text: text.chars().take(80).collect(),
            why: why.to_owned(),
        }
    }
}

impl Default for HostPci {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for HostPci {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostPci").field(&self.tree.path("")).finish()
    }
}

/// The directory of a function, relative to the root.
pub(crate) fn device_dir(bdf: &Bdf) -> String {
    format!("{DEVICES}/{bdf}")
}

/// A list for an error, truncated if long.
pub(crate) fn some_of<T: fmt::Display>(all: &[T]) -> String {
    let mut text = all
        .iter()
        .take(NEAR)
        .map(T::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if all.len() > NEAR {
        text.push_str(&format!(" and {} more", all.len() - NEAR));
    }
    text
}
