//! NVMe controllers with virtualization enhancements. Their virtual functions are secondary controllers, which no
//! driver can use until the primary controller has assigned queues and interrupts to them and set them online.
//!
//! Source: NVMe 1.3, 5.22 (Virtualization Management command), 8.5 (Virtualization Enhancements).

pub(crate) mod admin;
mod plan;

use std::{collections::BTreeSet, io, path::PathBuf};

use farside_error_chain::Chain;
use farside_pci::Bdf;

use crate::{
    error::PciError,
    function::{HostPci, device_dir},
    sysfs::Tree,
};
use admin::AdminCommand;
use plan::{Assignment, Capabilities, IDENTIFY, MAX_ENTRIES, Resource, Secondary, Shortage, plan};

const IDENTIFY_OPCODE: u8 = 0x06;
const VIRTUALIZATION_MANAGEMENT: u8 = 0x1c;
/// Values of Identify's field CNS.
const CONTROLLER: u32 = 0x01;
const PRIMARY_CAPABILITIES: u32 = 0x14;
const SECONDARY_LIST: u32 = 0x15;
/// Optional admin commands of a controller, of which bit 7 is Virtualization Management.
const OACS: usize = 256;
const OACS_VIRTUALIZATION: u8 = 1 << 7;
/// Actions of Virtualization Management.
const OFFLINE: u32 = 7;
const ASSIGN: u32 = 8;
const ONLINE: u32 = 9;

/// A primary controller that the kernel's nvme driver has.
struct Primary<'a> {
    tree: &'a Tree,
    pf: Bdf,
    node: PathBuf,
}

impl HostPci {
    /// Sets the secondary controllers of the first `count` virtual functions of `pf` online, and assigns them what they
    /// need for that. Does nothing if `pf` is no NVMe controller with virtualization management. On an error none
    /// is online that was not before.
    pub(crate) fn set_vfs_online(&self, pf: &Bdf, count: u32) -> Result<(), PciError> {
        let Some(primary) = self.primary(pf)? else {
            return Ok(());
        };
        let all = primary.secondaries()?;
        let mut offline = Vec::new();
        for vf in 1..=count {
            let secondary = primary.of_vf(&all, vf)?;
            if !secondary.online {
                offline.push(secondary);
            }
        }
        if offline.is_empty() {
            return Ok(());
        }
        let capabilities = Capabilities::parse(&primary.identify(PRIMARY_CAPABILITIES, 0)?);
        let assignments = plan(&capabilities, &offline)
            .map_err(|shortage| primary.too_few(&capabilities, count, &shortage))?;
        // Controllers with a command.
        let mut begun = BTreeSet::new();
        let mut set = || -> Result<(), PciError> {
            for Assignment {
                id,
                resource,
                count,
            } in &assignments
            {
                begun.insert(*id);
                primary.manage(ASSIGN | resource.number() << 8, *id, *count)?;
            }
            for secondary in &offline {
                begun.insert(secondary.id);
                primary.manage(ONLINE, secondary.id, 0)?;
                log::info!(
                    "{pf}: virtual function {} is online as secondary controller {}",
                    secondary.vf,
                    secondary.id
                );
            }
            Ok(())
        };
        set().inspect_err(|_| {
            for secondary in offline.iter().filter(|it| begun.contains(&it.id)) {
                if let Err(error) = primary.restore(secondary) {
                    log::warn!("{error}", error = Chain(&error));
                }
            }
        })
    }

    /// Refuses a virtual function whose secondary controller is offline. One whose state cannot be read passes.
    ///
    /// # Errors
    /// [`PciError::NvmeVfOffline`], [`PciError::NvmeNoSecondary`], and errors of sysfs.
    pub fn check_vf_online(&self, vf: &Bdf) -> Result<(), PciError> {
        let Some(pf) = self.function(vf)?.physfn else {
            return Ok(());
        };
        let checked = || -> Result<(), PciError> {
            let (Some(primary), Some(index)) = (
                self.primary(&pf)?,
                self.vfs(&pf)?.iter().position(|other| other == vf),
            ) else {
                return Ok(());
            };
            // At most 65,535, as SR-IOV counts them by 16 bits.
            let number = index as u32 + 1;
            let secondary = primary.of_vf(&primary.secondaries()?, number)?;
            match secondary.online {
                true => Ok(()),
                false => Err(PciError::NvmeVfOffline {
                    vf: *vf,
                    pf,
                    node: primary.node,
                    id: secondary.id,
                }),
            }
        };
        match checked() {
            Err(error @ PciError::NvmeCommand { .. }) => {
                log::info!(
                    "whether {vf} is online is unknown: {error}",
                    error = Chain(&error)
                );
                Ok(())
            }
            checked => checked,
        }
    }

    /// The controller, if the kernel's nvme driver has it and it has virtualization management.
    fn primary(&self, pf: &Bdf) -> Result<Option<Primary<'_>>, PciError> {
        let controllers = self.tree.names(&format!("{}/nvme", device_dir(pf)))?;
        let Some(name) = controllers.first() else {
            return Ok(None);
        };
        let primary = Primary {
            tree: &self.tree,
            pf: *pf,
            node: self.tree.path("dev").join(name),
        };
        let controller = match primary.identify(CONTROLLER, 0) {
            // As in a unit without the device node. It may well have none, and then its functions need nothing.
            Err(error) if error.is_denied() => {
                log::info!(
                    "whether virtual functions of {pf} have to be set online is unknown: {error}",
                    error = Chain(&error)
                );
                return Ok(None);
            }
            controller => controller?,
        };
        Ok((controller[OACS] & OACS_VIRTUALIZATION != 0).then_some(primary))
    }
}

impl Primary<'_> {
    fn secondaries(&self) -> Result<Vec<Secondary>, PciError> {
        let mut all: Vec<Secondary> = Vec::new();
        // Each list begins at the identifier that is asked for, and is sorted. So a full one reaches at least as far as
        // identifiers without gaps do. One that does not is the last, which bounds the number of commands.
        let mut from = Some(0);
        while let Some(first) = from {
            let list = Secondary::parse(&self.identify(SECONDARY_LIST, first)?);
            let last = list.last().map_or(0, |last| last.id);
            let is_full = list.len() == MAX_ENTRIES
                && usize::from(last) + 1 >= usize::from(first) + MAX_ENTRIES;
            from = last.checked_add(1).filter(|_| is_full);
            all.extend(list);
        }
        Ok(all)
    }

    /// The secondary controller of a virtual function, by its number from 1.
    fn of_vf(&self, all: &[Secondary], vf: u32) -> Result<Secondary, PciError> {
        let found = all.iter().find(|secondary| u32::from(secondary.vf) == vf);
        found.copied().ok_or(PciError::NvmeNoSecondary {
            pf: self.pf,
            vf,
            listed: all.len(),
        })
    }

    /// Sets a secondary controller offline, which releases its resources, and assigns those to it that it had.
    fn restore(&self, secondary: &Secondary) -> Result<(), PciError> {
        self.manage(OFFLINE, secondary.id, 0)?;
        for resource in Resource::ALL {
            match secondary.assigned(resource) {
                0 => {}
                count => self.manage(ASSIGN | resource.number() << 8, secondary.id, count)?,
            }
        }
        Ok(())
    }

    fn too_few(&self, capabilities: &Capabilities, vfs: u32, shortage: &Shortage) -> PciError {
        let Shortage {
            resource,
            flexible,
            needed,
            free,
        } = *shortage;
        let (pf, node) = (self.pf, self.node.display());
        let (least, most) = (resource.least(), flexible.most);
        if most < least {
            return PciError::NvmeMaximum {
                pf,
                resource: resource.name(),
                least,
                most,
            };
        }
        let missing = needed.saturating_sub(free);
        let kept = u32::from(flexible.primary).checked_sub(missing);
        // What it cannot use any more may be all that it has.
        let kept = kept.filter(|&kept| missing > 0 && kept >= least.into());
        let advice = match kept {
            None => "create fewer virtual functions".to_owned(),
            Some(kept) => format!(
                "create fewer virtual functions, or release {missing} of the {} of {pf} itself, which resets it and its virtual functions: \
                 `nvme virt-mgmt {node} -c {} -r {} -a 1 -n {kept}; echo 1 >/sys/bus/pci/devices/{pf}/reset`",
                flexible.primary,
                capabilities.id,
                resource.number()
            ),
        };
        PciError::NvmeResources {
            pf,
            vfs,
            resource: resource.name(),
            needed,
            free,
            total: flexible.total,
            advice,
        }
    }

    fn identify(&self, cns: u32, id: u16) -> Result<[u8; IDENTIFY], PciError> {
        let mut data = [0; IDENTIFY];
        let command = AdminCommand {
            opcode: IDENTIFY_OPCODE,
            cdw10: cns | u32::from(id) << 16,
            cdw11: 0,
        };
        self.send(command, &mut data, || format!("Identify (CNS {cns:#x})"))?;
        Ok(data)
    }

    fn manage(&self, action: u32, id: u16, count: u16) -> Result<(), PciError> {
        let command = AdminCommand {
            opcode: VIRTUALIZATION_MANAGEMENT,
            cdw10: action | u32::from(id) << 16,
            cdw11: count.into(),
        };
        self.send(command, &mut [], || {
            let action = action & 0xf;
            format!("Virtualization Management (action {action}, secondary controller {id})")
        })
    }

    fn send(
        &self,
        command: AdminCommand,
        data: &mut [u8],
        name: impl Fn() -> String,
    ) -> Result<(), PciError> {
        let sent = match self.tree.nvme_admin(&self.node, command, data) {
            Ok(0) => return Ok(()),
            // The other bits are flags, such as Do Not Retry.
            Ok(status) => io::Error::other(format!(
                "NVMe status code type {}, status code {:#04x}",
                status >> 8 & 7,
                status & 0xff
            )),
            Err(error) => error,
        };
        Err(PciError::NvmeCommand {
            pf: self.pf,
            node: self.node.clone(),
            command: name(),
            source: sent,
        })
    }
}
