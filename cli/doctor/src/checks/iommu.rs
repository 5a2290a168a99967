//! The IOMMU and VFIO: for hosts with physical devices, and those at an NTB.

use std::path::Path;

use crate::{
    Facts, Finding,
    facts::{Access, Hardware},
};

const CHECK: &str = "iommu";
const VFIO: &str = "vfio";
const DROP_IN: &str = "/etc/systemd/system/farside-lender.service.d/vfio.conf";
pub(super) const EXAMPLE: &str = "/usr/share/doc/farside/examples/lender-vfio.conf";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let hardware = &facts.hardware;
    let needed = facts.uses_hardware();
    let mut findings = vec![match &hardware.iommu_advice {
        None => Finding::ok(CHECK, "an IOMMU is enabled"),
        Some(advice) if needed => Finding::problem(
            CHECK,
            format!("no IOMMU is enabled: {advice}"),
            "a device that is lent, or an NTB, could write to any memory of this host: it is refused",
        )
        .fix(turn_on(hardware)),
        Some(_) => Finding::ok(
            CHECK,
            "none enabled; needed only to lend physical devices, or to borrow through an NTB",
        ),
    }];
    if needed {
        findings.extend(vfio(facts));
    }
    findings
}

fn turn_on(hardware: &Hardware) -> &'static str {
    match hardware.intel && !hardware.iommu_asked {
        true => {
            "sed -i 's/^GRUB_CMDLINE_LINUX=\"/&intel_iommu=on /' /etc/default/grub && update-grub && reboot"
        }
        // Enabled on the command line or by default, so the firmware has disabled it.
        false => "systemctl reboot --firmware-setup",
    }
}

fn vfio(facts: &Facts) -> Vec<Finding> {
    let hardware = &facts.hardware;
    let mut findings = Vec::new();
    if let Some(why) = &hardware.no_vfio_pci {
        let matters = "devices are taken from the host by the driver vfio-pci";
        findings.push(
            Finding::problem(VFIO, why, matters)
                .fix("modprobe vfio-pci && echo vfio-pci > /etc/modules-load.d/vfio-pci.conf"),
        );
    }
    // The unit's user differs from this one.
    let unit = facts.systemd.lender.as_ref().filter(|_| facts.by_units());
    if let Some(unit) = unit {
        if facts.lends_hardware() && unit.user != "root" && !unit.binds {
            let what = format!("the lender's unit runs as the user {}", unit.user);
            let why = "lender.toml names physical devices, and farside-vfio.service, which takes those from their drivers, is not required by it";
            findings.push(Finding::problem(VFIO, what, why).fix(format!(
                "install -D -m 644 {EXAMPLE} {DROP_IN} && systemctl daemon-reload && systemctl restart farside-lender"
            )));
        }
    } else {
        let files = [
            ("/dev/iommu", hardware.iommufd),
            ("/dev/vfio/vfio", hardware.vfio),
        ];
        let denied = |(_, access): &&(&str, Access)| *access == Access::Denied;
        if !files.iter().any(|(_, access)| *access == Access::Granted)
            && let Some((path, _)) = files.iter().find(denied)
        {
            let what = format!("user {} may not use {path}", facts.users.me.name);
            let why = "the kernel gives out physical devices and DMA mappings there";
            let directory = Path::new(path).display();
            findings.push(Finding::problem(VFIO, what, why).fix(format!(
                "setfacl -m u:{}:rw {directory}",
                facts.users.me.name
            )));
        }
    }
    if findings.is_empty() {
        findings.push(Finding::ok(VFIO, "vfio-pci is there"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Level,
        checks::tests::says,
        facts::{Limit, Unit},
    };

    const LENDS: &str = "[[device]]\nid = \"a\"\nvfio = { function = \"0000:03:00.0\" }";

    fn host(lender: &str) -> Facts {
        Facts {
            lender: Some(Ok(toml::from_str(lender).unwrap())),
            ..Facts::default()
        }
    }

    #[test]
    fn needed_where_hardware_is() {
        let mut facts = host("");
        facts.hardware.iommu_advice = Some("add intel_iommu=on".into());
        says(judge(&facts), Level::Ok, "needed only to lend physical");

        facts.lender = host(LENDS).lender;
        facts.hardware.intel = true;
        let found = judge(&facts);
        assert_eq!(
            (found[0].level, found.len()),
            (Level::Problem, 2),
            "{found:?}"
        );
        assert!(found[0].what.contains("intel_iommu=on"));
        assert!(found[0].fix[0].contains("update-grub"));
        facts.hardware.iommu_asked = true;
        assert!(judge(&facts)[0].fix[0].contains("firmware-setup"));

        facts.hardware.iommu_advice = None;
        let found = judge(&facts);
        assert!(
            found.iter().all(|found| found.level == Level::Ok),
            "{found:?}"
        );
    }

    #[test]
    fn vfio_needs_driver_and_rights() {
        let mut facts = host(LENDS);
        facts.users.me.name = "web".into();
        facts.users.me.uid = 1000;
        facts.hardware.no_vfio_pci = Some("run `modprobe vfio-pci`".into());
        says(vfio(&facts), Level::Problem, "modprobe");
        facts.hardware.no_vfio_pci = None;
        facts.hardware.vfio = Access::Denied;
        let said = says(
            vfio(&facts),
            Level::Problem,
            "user web may not use /dev/vfio/vfio",
        );
        assert_eq!(said.fix, ["setfacl -m u:web:rw /dev/vfio/vfio"]);
        facts.hardware.iommufd = Access::Granted;
        says(vfio(&facts), Level::Ok, "vfio-pci");

        facts.users.me.uid = 0;
        let unit = |user: &str| {
            Some(Unit {
                path: "/u".into(),
                memlock: Limit::None,
                user: user.into(),
                binds: false,
            })
        };
        facts.systemd.runs = true;
        facts.systemd.backend = unit("farside");
        facts.systemd.lender = unit("farside");
        let said = says(vfio(&facts), Level::Problem, "runs as the user farside");
        assert!(said.fix[0].contains(DROP_IN));
        facts.systemd.lender = unit("farside").map(|unit| Unit {
            binds: true,
            ..unit
        });
        says(vfio(&facts), Level::Ok, "vfio-pci");
        facts.systemd.lender = unit("root");
        says(vfio(&facts), Level::Ok, "vfio-pci");
    }
}
