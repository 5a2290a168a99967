//! Opens an endpoint of this host through VFIO.

use std::path::Path;
use std::sync::Arc;

use farside_fabric::{BusAddress, VmShare};
use farside_pci::Bdf;
use farside_vfio::{Api, Domain, Function};

use crate::adapter::Parts;
use crate::regs::{DEVICE_ID, REGISTERS_BAR, REGISTERS_SIZE, VENDOR_ID, WINDOW_BAR};
use crate::{Adapter, FarsideNtb, NtbError, Registers};

/// The endpoint to open, and options.
#[derive(Clone, Debug)]
pub struct EndpointOptions {
    /// Its address. It must be bound to vfio-pci.
    pub bdf: Bdf,
    /// The VFIO API. Only type1 maps BARs on kernels before 6.19.
    pub api: Api,
    /// Requester ids of this host's CPUs. Root complexes use 0, which is 00:00.0.
    pub cpu_requesters: Vec<u16>,
    /// The share of one VM of the tables.
    pub per_vm: VmShare,
}

impl EndpointOptions {
    /// The endpoint at `bdf`.
    pub fn new(bdf: Bdf, api: Api) -> Self {
        Self {
            bdf,
            api,
            cpu_requesters: vec![0],
            per_vm: VmShare::ALL,
        }
    }

    /// Opens the endpoint in its own IOMMU domain, finds its driver, and enables the link. Does not
    /// wait for that: [`Adapter::wait_link`].
    ///
    /// # Errors
    /// VFIO errors, such as [`farside_vfio::VfioError::NotBound`]; [`NtbError::WrongDevice`],
    /// [`NtbError::WrongRegisters`], [`NtbError::Version`], [`NtbError::Unusable`].
    pub fn open(&self) -> Result<Adapter, NtbError> {
        let bdf = self.bdf;
        let function = Domain::new(self.api)
            .and_then(|domain| domain.open(bdf))
            .map_err(NtbError::Vfio)?;
        let driver = self::driver(&function)?;
        let (driver, window) = driver;
        Adapter::new(Parts {
            function: Arc::new(function),
            driver: Box::new(driver),
            window,
            window_address: bar_address(bdf, WINDOW_BAR).unwrap_or(BusAddress::new(0)),
            cpu_requesters: self.cpu_requesters.clone(),
            per_vm: self.per_vm,
        })
    }
}

/// The driver of a function, and its window.
fn driver(function: &Function) -> Result<(FarsideNtb, Arc<farside_vfio::RegionMemory>), NtbError> {
    let bdf = function.bdf();
    let vfio = |error: farside_vfio::VfioError| NtbError::Fabric(error.into());
    let mut ids = [0; 4];
    function.config_read(0, &mut ids).map_err(vfio)?;
    let [vendor, device] = [[ids[0], ids[1]], [ids[2], ids[3]]].map(u16::from_le_bytes);
    check_ids(bdf, vendor, device)?;
    let description = function.description().map_err(vfio)?;
    let window_len = description.bars[usize::from(WINDOW_BAR)]
        .as_ref()
        .map_or(0, |bar| bar.size);
    let registers = function
        .map_region(REGISTERS_BAR, 0, REGISTERS_SIZE)
        .map_err(vfio)?;
    let window = function
        .map_region(WINDOW_BAR, 0, window_len)
        .map_err(vfio)?;
    let through: Arc<dyn Registers> = Arc::clone(&window) as _;
    let driver = FarsideNtb::new(bdf, registers, through, window_len)?;
    Ok((driver, window))
}

/// Checks that there is a driver for a function with these PCI ids.
///
/// # Errors
/// [`NtbError::WrongDevice`].
pub(crate) fn check_ids(bdf: Bdf, vendor: u16, device: u16) -> Result<(), NtbError> {
    if (vendor, device) == (VENDOR_ID, DEVICE_ID) {
        return Ok(());
    }
    Err(NtbError::WrongDevice {
        bdf,
        vendor,
        device,
        want_vendor: VENDOR_ID,
        want_device: DEVICE_ID,
    })
}

/// The host physical address of a BAR, from sysfs.
fn bar_address(bdf: Bdf, bar: u8) -> Option<BusAddress> {
    let path = Path::new("/sys/bus/pci/devices").join(bdf.to_string());
    let text = std::fs::read_to_string(path.join("resource")).ok()?;
    let line = text.lines().nth(bar.into())?;
    let first = line.split_whitespace().next()?;
    let address = u64::from_str_radix(first.strip_prefix("0x")?, 16).ok()?;
    Some(BusAddress::new(address))
}
