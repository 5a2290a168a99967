//! Domains of the VMs that libvirt manages.

use farside_daemon::{DeviceId, paths};
use farside_error_chain::Chain;
use farside_qemu_configs::{check_domain, read_domain};
use farside_vm_config::{Manager, VmConfig};

use crate::{Facts, Finding, facts::VmFacts, finding::quoted};

const CHECK: &str = "domain";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let vms = facts.good_vms();
    let vms = vms.filter(|(_, config)| config.manager == Some(Manager::Libvirt));
    let each = vms.flat_map(|(vm, config)| match &facts.libvirt {
        None => {
            let what = "libvirt is not installed, and the VM is to be run by it";
            let install = "apt-get install libvirt-daemon-system libvirt-clients";
            vec![
                Finding::problem(
                    CHECK,
                    what,
                    "the VM configuration has `manager = \"libvirt\"`",
                )
                .of_vm(&vm.name)
                .fix(install),
            ]
        }
        Some(libvirt) => match libvirt.domains.get(&vm.name) {
            None => Vec::new(),
            Some(Err(error)) => vec![undefined(vm, error)],
            Some(Ok(xml)) => defined(vm, config, xml),
        },
    });
    each.collect()
}

fn undefined(vm: &VmFacts, error: &str) -> Finding {
    let name = quoted(&vm.name);
    let finding = Finding::problem(
        CHECK,
        format!("libvirt does not return the domain: {error}"),
        "the VM is managed by libvirt (`manager = \"libvirt\"`)",
    );
    finding.of_vm(&vm.name).fix(format!(
        "farside libvirt --vm {name} > {name}.xml && virsh define {name}.xml"
    ))
}

fn defined(vm: &VmFacts, config: &VmConfig, xml: &str) -> Vec<Finding> {
    let name = quoted(&vm.name);
    let wrong = |what: String| {
        let why = "the guest finds no devices, or QEMU does not start";
        let fix = format!(
            "virsh dumpxml --inactive {name} > {name}.xml && farside libvirt --vm {name} --edit {name}.xml --in-place && virsh define {name}.xml"
        );
        Finding::problem(CHECK, what, why).of_vm(&vm.name).fix(fix)
    };
    let problems = match check_domain(xml, &paths::device_socket) {
        Ok(problems) => problems,
        Err(error) => return vec![wrong(Chain(&error).to_string())],
    };
    let mut findings: Vec<_> = problems
        .iter()
        .map(|problem| wrong(problem.to_string()))
        .collect();
    let ours = read_domain(xml).ok().flatten();
    let has = |id: &DeviceId| {
        let mut devices = ours.iter().flat_map(|domain| &domain.devices);
        devices.any(|device| device.id == *id)
    };
    let missing: Vec<_> = config
        .device_ids()
        .into_iter()
        .filter(|id| !has(id))
        .collect();
    if !missing.is_empty() {
        findings.push(wrong(format!(
            "the domain lacks {}, which the VM configuration has",
            missing.join(", ")
        )));
    }
    if findings.is_empty() {
        let borrows = config.device_ids().join(", ");
        findings.push(Finding::ok(CHECK, format!("the domain borrows {borrows}")).of_vm(&vm.name));
    }
    findings
}

#[cfg(test)]
mod tests {
    use farside_qemu_configs::DomainOptions;

    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says},
        facts::Libvirt,
    };

    fn host(ids: &str, domain: Result<String, String>) -> Facts {
        let mut facts = host_of(&format!("manager = \"libvirt\"\ndevices = [{ids}]"));
        let mut libvirt = Libvirt::default();
        libvirt.domains.insert("web1".into(), domain);
        facts.libvirt = Some(libvirt);
        facts
    }

    #[test]
    fn both_ways() {
        let facts = host("\"disk0\"", Err("no domain with matching name".into()));
        let said = says(judge(&facts), Level::Problem, "no domain");
        assert!(said.fix[0].contains("virsh define web1.xml"));

        let config = facts.vms[0].config.as_ref().unwrap();
        let xml = config
            .to_vm(&"web1".parse().unwrap())
            .libvirt_domain(&DomainOptions::default())
            .unwrap();
        says(
            judge(&host("\"disk0\"", Ok(xml.clone()))),
            Level::Ok,
            "borrows disk0",
        );
        let more = judge(&host("\"disk0\", \"disk1\"", Ok(xml.clone())));
        says(more, Level::Problem, "lacks disk1");
        let private = xml.replace("<access mode='shared'/>", "");
        assert_ne!(private, xml);
        says(
            judge(&host("\"disk0\"", Ok(private))),
            Level::Problem,
            "private to QEMU",
        );
        says(
            judge(&host("\"disk0\"", Ok("<domain".into()))),
            Level::Problem,
            "line 1",
        );
        let mut none = host("", Err(String::new()));
        none.libvirt = None;
        says(judge(&none), Level::Problem, "not installed");
    }
}
