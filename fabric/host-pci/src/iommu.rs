//! Whether this host has an active IOMMU, and if not, why.
//!
//! Sources: Linux `Documentation/admin-guide/kernel-parameters.txt` (`intel_iommu=`, `amd_iommu=`,
//! `iommu=`); the ACPI tables DMAR (Intel VT-d), IVRS (AMD I/O virtualization) and IORT (Arm), in
//! which firmware reports an enabled IOMMU.

use crate::error::PciError;
use crate::function::HostPci;
use crate::sysfs::Tree;

const GROUPS: &str = "sys/kernel/iommu_groups";
const TABLES: &str = "sys/firmware/acpi/tables";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Vendor {
    Intel,
    Amd,
    Other,
}

impl HostPci {
    /// Whether an IOMMU is active: there are IOMMUs and groups of functions.
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn iommu_present(&self) -> Result<bool, PciError> {
        // Not every IOMMU driver has a class device, and a class device without groups does not
        // isolate.
        Ok(!self.tree.names(GROUPS)?.is_empty())
    }

    /// As [`HostPci::iommu_present`], but returns an error with the remedy.
    ///
    /// # Errors
    /// [`PciError::NoIommu`].
    pub fn require_iommu(&self) -> Result<(), PciError> {
        if self.iommu_present()? {
            return Ok(());
        }
        Err(PciError::NoIommu {
            advice: self.iommu_advice(),
        })
    }

    fn iommu_advice(&self) -> String {
        let tree = &self.tree;
        let command_line = tree
            .attribute("proc/cmdline")
            .ok()
            .flatten()
            .unwrap_or_default();
        if let Some(option) = turned_off(&command_line) {
            return format!(
                "the kernel command line turns it off with `{option}`; remove that and boot again"
            );
        }
        match vendor(tree) {
            Vendor::Intel => intel(tree, &command_line),
            Vendor::Amd => amd(tree),
            Vendor::Other => "turn the IOMMU (SMMU) on in the firmware, and use a kernel with \
                 CONFIG_IOMMU_SUPPORT and the driver of this machine's IOMMU (such as \
                 CONFIG_ARM_SMMU_V3)"
                .into(),
        }
    }
}

fn intel(tree: &Tree, command_line: &str) -> String {
    let asked = option_values(command_line, "intel_iommu").any(|value| value == "on");
    let in_firmware = tree.exists(&format!("{TABLES}/DMAR"));
    match (asked, in_firmware) {
        (false, true) => {
            "the firmware has VT-d on, but the kernel was not told to use it: add \
             `intel_iommu=on` to the kernel command line and boot again (the kernel needs \
             CONFIG_INTEL_IOMMU and CONFIG_IOMMU_SUPPORT)"
        }
        (false, false) => {
            "turn on VT-d (often \"Intel Virtualization Technology for Directed I/O\") in the \
             firmware, add `intel_iommu=on` to the kernel command line and boot again (the kernel \
             needs CONFIG_INTEL_IOMMU and CONFIG_IOMMU_SUPPORT; a VM needs a virtual IOMMU, in QEMU \
             `-device intel-iommu`)"
        }
        (true, false) => {
            "the kernel command line has `intel_iommu=on`, but the firmware tells of no VT-d (no \
             ACPI table DMAR): turn VT-d on in the firmware (in a VM, give it a virtual IOMMU, in \
             QEMU `-device intel-iommu`)"
        }
        (true, true) => {
            "the firmware has VT-d on and the kernel command line has `intel_iommu=on`, but no \
             function is in a group: the kernel was built without CONFIG_INTEL_IOMMU or \
             CONFIG_IOMMU_SUPPORT, or found VT-d broken (see lines with DMAR in `dmesg`)"
        }
    }
    .into()
}

fn amd(tree: &Tree) -> String {
    if tree.exists(&format!("{TABLES}/IVRS")) {
        "the firmware has AMD-Vi on, but no function is in a group: the kernel was built without \
         CONFIG_AMD_IOMMU or CONFIG_IOMMU_SUPPORT, or found AMD-Vi broken (see lines with AMD-Vi in \
         `dmesg`)"
    } else {
        "turn on AMD-Vi (often \"IOMMU\", and \"SVM\") in the firmware (in a VM, give it a virtual \
         IOMMU, in QEMU `-device amd-iommu`; the kernel needs CONFIG_AMD_IOMMU and \
         CONFIG_IOMMU_SUPPORT)"
    }
    .into()
}

fn vendor(tree: &Tree) -> Vendor {
    let cpuinfo = tree.table("proc/cpuinfo").ok().flatten();
    let name = cpuinfo.as_deref().and_then(|text| {
        text.lines()
            .take(64)
            .find_map(|line| line.strip_prefix("vendor_id")?.split(':').nth(1))
    });
    match name.map(str::trim) {
        Some("GenuineIntel") => Vendor::Intel,
        Some("AuthenticAMD" | "HygonGenuine") => Vendor::Amd,
        // A VM may combine any CPU with any IOMMU.
        _ if tree.exists(&format!("{TABLES}/DMAR")) => Vendor::Intel,
        _ if tree.exists(&format!("{TABLES}/IVRS")) => Vendor::Amd,
        Some(_) if cfg!(target_arch = "x86_64") => Vendor::Intel,
        _ => Vendor::Other,
    }
}

/// The option that turns the IOMMU off, as written on the command line.
fn turned_off(command_line: &str) -> Option<&str> {
    command_line.split_ascii_whitespace().find(|word| {
        word.split_once('=').is_some_and(|(name, values)| {
            matches!(name, "iommu" | "intel_iommu" | "amd_iommu")
                && values.split(',').any(|value| value == "off")
        })
    })
}

fn option_values<'a>(command_line: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    command_line
        .split_ascii_whitespace()
        .filter_map(move |word| word.split_once('=').filter(|(left, _)| *left == name))
        .flat_map(|(_, values)| values.split(','))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_turns_it_off() {
        let off = |line| turned_off(line).unwrap_or("");
        assert_eq!(off("quiet intel_iommu=off"), "intel_iommu=off");
        assert_eq!(off("iommu=pt,off x"), "iommu=pt,off");
        assert_eq!(off("amd_iommu=off"), "amd_iommu=off");
        assert_eq!(off("iommu=pt intel_iommu=on my_iommu=off"), "");
    }

    #[test]
    fn option_values_are_split_at_commas() {
        let values: Vec<&str> =
            option_values("a intel_iommu=on,sm_on intel_iommu=igfx_off", "intel_iommu").collect();
        assert_eq!(values, ["on", "sm_on", "igfx_off"]);
    }
}
