//! KVM: without it guests run, and slowly.

use farside_qemu_configs::Accel;
use farside_vm_config::{Manager, VmConfig};

use crate::{Facts, Finding, facts::Access, finding::quoted};

const CHECK: &str = "kvm";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let wants = |config: &&VmConfig| config.accel != Some(Accel::Tcg);
    let vms: Vec<_> = facts
        .good_vms()
        .map(|(_, config)| config)
        .filter(wants)
        .collect();
    if vms.is_empty() {
        return Vec::new();
    }
    let needed = vms.iter().any(|config| config.accel == Some(Accel::Kvm));
    // libvirt gives it to its QEMUs.
    let by_us = vms
        .iter()
        .any(|config| config.manager != Some(Manager::Libvirt));
    let why = match needed {
        true => "a VM here is to run by KVM (`accel = \"kvm\"`), and does not start without",
        false => "QEMU emulates the CPU instead, about ten times slower",
    };
    let hardware = &facts.hardware;
    let finding = match hardware.kvm {
        Access::Granted => Finding::ok(CHECK, "/dev/kvm can be used"),
        Access::Denied if !by_us => Finding::ok(CHECK, "/dev/kvm is there, for libvirt"),
        Access::Denied => {
            let me = &facts.users.me.name;
            let what = format!("user {me} may not use /dev/kvm");
            Finding::problem_if(needed, CHECK, what, why).fix(format!(
                "usermod --append --groups kvm {}   # and log in anew",
                quoted(me)
            ))
        }
        Access::Missing => {
            Finding::problem_if(needed, CHECK, "there is no /dev/kvm", why).fix(format!(
                "modprobe {}   # if it fails: turn virtualization on in the firmware",
                hardware.kvm_module
            ))
        }
    };
    vec![finding]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says},
    };

    #[test]
    fn both_ways() {
        let with = |description, kvm| {
            let mut facts = host_of(description);
            facts.users.me.name = "web".into();
            facts.hardware.kvm = kvm;
            facts.hardware.kvm_module = "kvm_amd";
            judge(&facts)
        };
        says(with("", Access::Granted), Level::Ok, "/dev/kvm");
        let said = says(with("", Access::Missing), Level::Note, "no /dev/kvm");
        assert!(said.fix[0].contains("modprobe kvm_amd"));
        says(
            with("accel = \"kvm\"", Access::Missing),
            Level::Problem,
            "no /dev/kvm",
        );
        let said = says(
            with("accel = \"kvm\"", Access::Denied),
            Level::Problem,
            "user web",
        );
        assert!(said.fix[0].contains("kvm web"));
        says(
            with("manager = \"libvirt\"", Access::Denied),
            Level::Ok,
            "libvirt",
        );
        assert_eq!(with("accel = \"tcg\"", Access::Missing), []);
    }
}
