//! SR-IOV: creating, finding and removing virtual functions.
//!
//! The kernel accepts a new number only after 0, so all existing virtual functions are removed
//! first. While they are created, `sriov_drivers_autoprobe` keeps the host's drivers from binding
//! to them.
//!
//! Source: Linux `Documentation/PCI/pci-iov-howto.rst` and
//! `Documentation/ABI/testing/sysfs-bus-pci`.

use farside_error_chain::Chain;

use crate::binding::Force;
use crate::error::PciError;
use crate::function::{HostPci, Sriov, device_dir};
use crate::usage::{InUse, Use};
use crate::vfio_driver::is_for_users;
use farside_pci::Bdf;

/// The virtual functions of a physical one, until this is dropped.
///
/// Drop the `Binding` of every one first: the kernel removes a function only when its descriptors
/// are closed.
#[derive(Debug)]
#[must_use = "dropping it removes the virtual functions that were created"]
pub struct CreatedVfs {
    host: HostPci,
    pf: Bdf,
    vfs: Vec<Bdf>,
    /// The number to restore on drop; `None` to leave it unchanged.
    former: Option<u32>,
}

impl HostPci {
    /// The SR-IOV numbers of a function; `None` when it is not a physical function with
    /// SR-IOV.
    pub(crate) fn sriov_numbers(&self, bdf: &Bdf) -> Result<Option<Sriov>, PciError> {
        let dir = device_dir(bdf);
        let Some(total) = self.number_attribute(&dir, "sriov_totalvfs")? else {
            return Ok(None);
        };
        let enabled = self.number_attribute(&dir, "sriov_numvfs")?.unwrap_or(0);
        Ok(Some(Sriov { total, enabled }))
    }

    /// The virtual functions that `pf` has now, by their index.
    ///
    /// # Errors
    /// As [`HostPci::function`].
    pub fn vfs(&self, pf: &Bdf) -> Result<Vec<Bdf>, PciError> {
        self.must_exist(pf)?;
        let dir = device_dir(pf);
        let mut found: Vec<(u32, Bdf)> = Vec::new();
        for name in self.tree.names(&dir)? {
            let Some(index) = name
                .strip_prefix("virtfn")
                .and_then(|digits| digits.parse().ok())
            else {
                continue;
            };
            let target = self.tree.link_name(&format!("{dir}/{name}"))?;
            if let Some(vf) = target.and_then(|target| target.parse().ok()) {
                found.push((index, vf));
            }
        }
        found.sort();
        Ok(found.into_iter().map(|(_, vf)| vf).collect())
    }

    /// Creates `count` virtual functions of `pf`, without binding a driver. If it already has
    /// exactly as many, they are kept, and stay when the result is dropped. Those of an NVMe controller are
    /// secondary controllers, and set online.
    ///
    /// # Errors
    /// [`PciError::NoSriov`], [`PciError::TooManyVfs`], and, if others exist and `force` is not
    /// set, [`PciError::VfsInUse`]: nothing was changed. [`PciError::VfsMissing`] when the kernel
    /// creates fewer, and errors of an NVMe controller: those created are removed again.
    pub fn create_vfs(&self, pf: &Bdf, count: u32, force: Force) -> Result<CreatedVfs, PciError> {
        let info = self.function(pf)?;
        let no_sriov = |why: String| Err(PciError::NoSriov { pf: *pf, why });
        if let Some(parent) = info.physfn {
            return no_sriov(format!("it is itself a virtual function, of {parent}"));
        }
        let Some(Sriov { total, enabled }) = info.sriov else {
            return no_sriov("it has no SR-IOV capability, or the kernel no CONFIG_PCI_IOV".into());
        };
        if total == 0 {
            return no_sriov("its driver or firmware allows none (sriov_totalvfs is 0)".into());
        }
        if count == 0 || count > total {
            return Err(PciError::TooManyVfs {
                pf: *pf,
                wanted: count,
                total,
            });
        }
        if enabled == count {
            log::info!("{pf} has {count} virtual functions already; they are kept");
            match self.set_vfs_online(pf, count) {
                // `farside bind` has set them online for a lender without this right.
                Err(error) if error.is_denied() => log::info!(
                    "whether they are online is unknown: {error}",
                    error = Chain(&error)
                ),
                result => result?,
            }
            return Ok(CreatedVfs {
                host: self.clone(),
                pf: *pf,
                vfs: self.expect_vfs(pf, count)?,
                former: None,
            });
        }
        if info.driver.is_none() {
            return no_sriov(
                "no driver has it, and only its own driver makes virtual functions".into(),
            );
        }
        if enabled > 0 && force == Force::No {
            self.refuse_used_vfs(pf, enabled, count)?;
        }
        // From here on a failure drops it, which restores the former number.
        let mut created = CreatedVfs {
            host: self.clone(),
            pf: *pf,
            vfs: Vec::new(),
            former: Some(enabled),
        };
        self.set_vfs(pf, enabled, count)?;
        created.vfs = self.expect_vfs(pf, count)?;
        log::info!("{pf} has {count} virtual functions now");
        self.set_vfs_online(pf, count)?;
        Ok(created)
    }

    fn refuse_used_vfs(&self, pf: &Bdf, existing: u32, wanted: u32) -> Result<(), PciError> {
        for vf in self.vfs(pf)? {
            let mut uses = self.usage(&vf)?;
            // A VMM may use it; the kernel does not expose the holders of a descriptor.
            if let Some(driver) = self.driver(&vf)?.filter(|driver| is_for_users(driver)) {
                uses.push(InUse {
                    name: vf.to_string(),
                    how: Use::UserDriver(driver),
                });
            }
            if !uses.is_empty() {
                return Err(PciError::VfsInUse {
                    pf: *pf,
                    existing,
                    wanted,
                    vf,
                    uses,
                });
            }
        }
        Ok(())
    }

    /// Sets the number of virtual functions without binding host drivers.
    fn set_vfs(&self, pf: &Bdf, existing: u32, wanted: u32) -> Result<(), PciError> {
        let dir = device_dir(pf);
        let autoprobe = format!("{dir}/sriov_drivers_autoprobe");
        let numvfs = format!("{dir}/sriov_numvfs");
        let former = self.tree.attribute(&autoprobe)?;
        if former.is_some() {
            self.tree.write(&autoprobe, "0")?;
        }
        let set = || -> Result<(), PciError> {
            if existing > 0 {
                self.tree.write(&numvfs, "0")?;
            }
            self.tree
                .write(&numvfs, &wanted.to_string())
                .map_err(|error| explain_refusal(pf, error))
        };
        let result = set();
        if let Some(former) = former {
            let restored = self.tree.write(&autoprobe, &former);
            // The first error is the one to report.
            return result.and(restored);
        }
        result
    }

    fn expect_vfs(&self, pf: &Bdf, count: u32) -> Result<Vec<Bdf>, PciError> {
        let vfs = self.vfs(pf)?;
        if vfs.len() != count as usize {
            return Err(PciError::VfsMissing {
                pf: *pf,
                wanted: count,
                found: vfs.len(),
            });
        }
        Ok(vfs)
    }
}

/// Explains the errnos that the kernel returns for the whole function.
fn explain_refusal(pf: &Bdf, error: PciError) -> PciError {
    use rustix::io::Errno;
    let PciError::Write { source, .. } = &error else {
        return error;
    };
    let is = |errno: Errno| source.raw_os_error() == Some(errno.raw_os_error());
    let why = if is(Errno::NOENT) || is(Errno::NOSYS) {
        "the driver that has it cannot make virtual functions; give it to the device's own driver"
    } else if is(Errno::NOMEM) || is(Errno::NOSPC) {
        "the kernel found no bus number or no BAR space for them; see `dmesg` (often SR-IOV must be \
         turned on in the firmware, or `pci=realloc` be added to the kernel command line)"
    } else {
        return error;
    };
    PciError::NoSriov {
        pf: *pf,
        why: format!("{why} ({source})"),
    }
}

impl CreatedVfs {
    /// The physical function.
    pub fn pf(&self) -> Bdf {
        self.pf
    }

    /// Its virtual functions, by their index.
    pub fn vfs(&self) -> &[Bdf] {
        &self.vfs
    }

    /// Whether they were created here, and are removed on drop.
    pub fn were_created(&self) -> bool {
        self.former.is_some()
    }

    /// Leaves them in place, without removing them on drop.
    pub fn leave(mut self) {
        self.former = None;
    }

    /// Removes the virtual functions if they were created here, and restores the former number.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove(mut self) -> Result<(), PciError> {
        self.undo()
    }

    fn undo(&mut self) -> Result<(), PciError> {
        let Some(former) = self.former.take() else {
            return Ok(());
        };
        let (host, pf) = (&self.host, self.pf);
        if host.must_exist(&pf).is_err() {
            return Ok(());
        }
        let numvfs = format!("{}/sriov_numvfs", device_dir(&pf));
        host.tree.write(&numvfs, "0")?;
        if former > 0 {
            host.tree.write(&numvfs, &former.to_string())?;
        }
        log::info!("{pf} has {former} virtual functions again");
        Ok(())
    }
}

impl Drop for CreatedVfs {
    fn drop(&mut self) {
        let pf = self.pf;
        if let Err(error) = self.undo() {
            log::error!(
                "the virtual functions of {pf} were not removed: {error}",
                error = Chain(&error)
            );
        }
    }
}
