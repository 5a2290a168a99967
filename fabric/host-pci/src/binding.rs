//! Binds a function to vfio-pci, and back to its former driver.
//!
//! In this order no other driver can bind to it in between:
//!
//! ```text
//!   driver_override = vfio-pci     no other driver may take it from now on
//!   driver/unbind   = BDF          its driver unbinds (returns when done)
//!   drivers_probe   = BDF          vfio-pci takes it (returns when it has)
//! ```
//!
//! and back: override cleared, unbound from vfio-pci, probed. Each write returns when it has taken
//! effect, so a later read is final.
//!
//! Source: Linux `Documentation/ABI/testing/sysfs-bus-pci`.

use farside_error_chain::Chain;

use crate::error::{NotLendable, PciError};
use crate::function::{FunctionInfo, FunctionKind, HostPci, device_dir};
use crate::vfio_driver::{DRIVERS, VFIO_PCI, is_for_users};
use farside_pci::Bdf;

const PROBE: &str = "sys/bus/pci/drivers_probe";

/// Whether to take a function although the host uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Force {
    /// Refuse a function that is in use.
    No,
    /// Take it, and log its former use.
    Yes,
}

/// The function's former driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Former {
    /// This driver of the host.
    Driver(String),
    /// No driver.
    None,
    /// Unknown: an earlier run bound it to vfio-pci and was killed. On release the kernel probes
    /// all drivers.
    Unknown,
    /// The administrator bound it to this userspace driver, or root did for this process, which may
    /// not: it stays there, and nothing is undone.
    Kept(String),
}

/// A function that is bound to vfio-pci until this is dropped.
///
/// Close every descriptor of the function first: while one is open the kernel blocks the unbinding,
/// and so the drop.
#[derive(Debug)]
#[must_use = "dropping it gives the function back to its former driver"]
pub struct Binding {
    host: HostPci,
    before: FunctionInfo,
    former: Former,
    done: bool,
}

impl HostPci {
    /// Binds the function to vfio-pci. A function that is bound to it already stays bound.
    ///
    /// Does not check other members of its IOMMU group; see [`crate::Group::viable`].
    ///
    /// # Errors
    /// A bridge ([`PciError::NotLendable`]), no IOMMU ([`PciError::NoIommu`],
    /// [`PciError::NoGroup`]), no such driver ([`PciError::VfioPciMissing`]), in
    /// use and not forced ([`PciError::Busy`]): nothing was changed. When the kernel refuses
    /// midway, the former driver gets the function back before the error is
    /// returned.
    pub fn bind_to_vfio(&self, bdf: &Bdf, force: Force) -> Result<Binding, PciError> {
        let before = self.function(bdf)?;
        let refused = |why| Err(PciError::NotLendable { bdf: *bdf, why });
        match before.kind {
            FunctionKind::Endpoint => {}
            FunctionKind::PciBridge => return refused(NotLendable::PciBridge),
            FunctionKind::HostBridge => return refused(NotLendable::HostBridge),
        }
        self.require_group(bdf)?;
        self.require_vfio_pci()?;
        if let Some(kept) = self.keep(&before) {
            return Ok(kept);
        }
        let uses = self.usage(bdf)?;
        if !uses.is_empty() {
            if force == Force::No {
                return Err(PciError::Busy { bdf: *bdf, uses });
            }
            for used in &uses {
                log::warn!("{bdf} is taken from the host although {used}");
            }
        }
        let former = before.driver.clone().map_or(Former::None, Former::Driver);
        let mut binding = Binding {
            host: self.clone(),
            before,
            former,
            done: false,
        };
        // A failure drops the binding, which rolls back.
        binding.take()?;
        match &binding.former {
            Former::Driver(driver) => log::info!("took {bdf} from {driver} for {VFIO_PCI}"),
            _ => log::info!("took {bdf}, which had no driver, for {VFIO_PCI}"),
        }
        Ok(binding)
    }

    /// Whether the function is on vfio-pci because an earlier run bound it, and is not a virtual
    /// function, whose physical function decides what becomes of it.
    ///
    /// # Errors
    /// As [`HostPci::function`].
    pub fn was_bound(&self, bdf: &Bdf) -> Result<bool, PciError> {
        let info = self.function(bdf)?;
        let is = |name: &Option<String>| name.as_deref() == Some(VFIO_PCI);
        Ok(is(&info.driver) && is(&info.driver_override) && info.physfn.is_none())
    }

    /// The binding of a function that is bound to a userspace driver already.
    fn keep(&self, before: &FunctionInfo) -> Option<Binding> {
        let bdf = before.bdf;
        let driver = before.driver.as_deref().filter(|name| is_for_users(name))?;
        // Who may not unbind it has not bound it: root has, by `farside bind`.
        let dir = device_dir(&bdf);
        let left_over = before.driver_override.as_deref() == Some(VFIO_PCI)
            && self.tree.is_writable(&format!("{dir}/driver_override"));
        let former = if left_over {
            log::info!("{bdf} was left on {driver}; its former driver is not known");
            Former::Unknown
        } else {
            log::info!("{bdf} is on {driver} already and will stay there");
            Former::Kept(driver.to_owned())
        };
        Some(Binding {
            host: self.clone(),
            before: before.clone(),
            done: matches!(former, Former::Kept(_)),
            former,
        })
    }
}

impl Binding {
    /// The function's address.
    pub fn bdf(&self) -> Bdf {
        self.before.bdf
    }

    /// The function before it was bound; in particular its driver and the DMA mask that the driver
    /// had set.
    pub fn before(&self) -> &FunctionInfo {
        &self.before
    }

    /// The function's former driver.
    pub fn former(&self) -> &Former {
        &self.former
    }

    /// Has the drop leave a function on vfio-pci that an earlier run bound: a process may have it
    /// open.
    pub fn leave_earlier(mut self) -> Self {
        self.done |= self.former == Former::Unknown;
        self
    }

    /// Leaves the function bound, without undoing anything on drop.
    pub fn leave(mut self) {
        self.done = true;
    }

    /// Returns the function to its former driver. Waits until every descriptor of it is closed.
    ///
    /// # Errors
    /// A kernel file refuses; [`PciError::WrongDriver`] when the former driver does not take it.
    /// The remaining steps were done, and the failed ones are not retried.
    pub fn restore(mut self) -> Result<(), PciError> {
        self.give_back()
    }

    fn take(&mut self) -> Result<(), PciError> {
        let (host, bdf) = (&self.host, self.before.bdf);
        let dir = device_dir(&bdf);
        host.tree
            .write(&format!("{dir}/driver_override"), VFIO_PCI)?;
        if self.before.driver.is_some() {
            host.tree
                .write(&format!("{dir}/driver/unbind"), &bdf.to_string())?;
        }
        let probed = host.tree.write(PROBE, &bdf.to_string());
        let found = host.driver(&bdf)?;
        if found.as_deref() == Some(VFIO_PCI) {
            return Ok(());
        }
        // The error of the probe is more informative than the current driver.
        probed?;
        Err(PciError::WrongDriver {
            bdf,
            wanted: VFIO_PCI.into(),
            found,
        })
    }

    fn give_back(&mut self) -> Result<(), PciError> {
        if std::mem::replace(&mut self.done, true) {
            return Ok(());
        }
        let (host, bdf) = (&self.host, self.before.bdf);
        let address = bdf.to_string();
        if host.must_exist(&bdf).is_err() {
            log::info!("{bdf} is gone; there is nothing to give back");
            return Ok(());
        }
        // An empty line clears it. An override for vfio-pci that was there before
        // comes from a run killed midway: kept, it would send the function back
        // there.
        let former_override = self
            .before
            .driver_override
            .as_deref()
            .filter(|driver| !is_for_users(driver));
        host.tree.write(
            &format!("{}/driver_override", device_dir(&bdf)),
            former_override.unwrap_or("\n"),
        )?;
        if host.driver(&bdf)?.as_deref() == Some(VFIO_PCI) {
            host.tree
                .write(&format!("{DRIVERS}/{VFIO_PCI}/unbind"), &address)?;
        }
        let wanted = match &self.former {
            Former::None | Former::Kept(_) => {
                log::info!("gave {bdf} back; it has no driver, as before");
                return Ok(());
            }
            Former::Unknown => None,
            Former::Driver(driver) => Some(driver.as_str()),
        };
        let mut found = host.driver(&bdf)?;
        if found.is_none() {
            if let Err(error) = host.tree.write(PROBE, &address) {
                log::debug!(
                    "looking for a driver of {bdf}: {error}",
                    error = Chain(&error)
                );
            }
            found = host.driver(&bdf)?;
        }
        if let (None, Some(driver)) = (&found, wanted) {
            // It may have been bound manually, without a matching id in the driver's table.
            host.tree
                .write(&format!("{DRIVERS}/{driver}/bind"), &address)?;
            found = host.driver(&bdf)?;
        }
        if wanted.is_some() && found.as_deref() != wanted {
            return Err(PciError::WrongDriver {
                bdf,
                wanted: wanted.unwrap_or_default().to_owned(),
                found,
            });
        }
        log::info!(
            "gave {bdf} back to {}",
            found.as_deref().unwrap_or("no driver: none wants it")
        );
        Ok(())
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        let bdf = self.before.bdf;
        if let Err(error) = self.give_back() {
            log::error!(
                "{bdf} was not given back as it was: {error}",
                error = Chain(&error)
            );
        }
    }
}
