//! Descriptions of VMs, and `lender.toml`.

use farside_error_chain::Chain;
use farside_vm_config::{Manager, VmConfig};

use crate::{
    Facts, Finding,
    facts::{Users, VmFacts},
    finding::{devices, edit, quoted_path},
};

const CHECK: &str = "description";
const LENDER: &str = "lender.toml";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings: Vec<_> = {
        let vms = facts.vms.iter();
        vms.flat_map(|vm| of_vm(&facts.users, vm)).collect()
    };
    let why = "the lender does not start with it";
    match &facts.lender {
        None => {}
        Some(Err(error)) => {
            findings.push(Finding::problem(LENDER, error, why).fix(edit(&facts.lender_file)));
        }
        Some(Ok(lender)) => findings.push(match lender.check() {
            Ok(()) => Finding::ok(LENDER, format!("lends {}", devices(lender.device.len()))),
            Err(error) => Finding::problem(LENDER, Chain(&error).to_string(), why)
                .fix(edit(&facts.lender_file)),
        }),
    }
    if findings.is_empty() {
        findings.push(Finding::note(
            CHECK,
            "no VM is configured here, and no device is lent",
            "there is no configuration to check",
        ));
    }
    findings
}

fn of_vm(users: &Users, vm: &VmFacts) -> Vec<Finding> {
    let why = "its backend and QEMU are started from the VM configuration";
    let wrong = |what: String| {
        let finding = Finding::problem(CHECK, what, why).of_vm(&vm.name);
        finding.fix(edit(&vm.path))
    };
    let config = match &vm.config {
        Err(error) => return vec![wrong(error.clone())],
        Ok(config) => config,
    };
    let mut findings = Vec::new();
    // All that goes on QEMU's command line, the user's own arguments included.
    if let Some(name) = &config.name
        && let Err(error) = config.to_vm(name).command_line("qemu")
    {
        let path = vm.path.display();
        findings.push(wrong(format!("{path}: {}", Chain(&error))));
    }
    if let Some(boot) = config
        .boot
        .as_ref()
        .filter(|id| !config.device_ids().contains(id))
    {
        findings.push(wrong(format!(
            "cannot boot from {boot}: the VM has the devices {}",
            config.device_ids().join(", ")
        )));
    }
    if let Some(group) = &config.socket_group
        && config.manager != Some(Manager::Libvirt)
        && !users.has_group(group)
    {
        let what = format!("this host has no group {group:?}, which is the socket-group");
        let finding = Finding::problem(CHECK, what, "the backend does not start").of_vm(&vm.name);
        findings.push(finding.fix(edit(&vm.path)));
    }
    findings.extend(files(vm, config));
    if findings.is_empty() {
        let finding = match config.device_ids().as_slice() {
            [] => Finding::note(
                CHECK,
                "it has no device",
                "the VM borrows no device before `farside attach`",
            ),
            ids => Finding::ok(CHECK, format!("borrows {}", ids.join(", "))),
        };
        findings.push(finding.of_vm(&vm.name));
    }
    findings
}

/// Files that QEMU opens.
fn files(vm: &VmFacts, config: &VmConfig) -> Vec<Finding> {
    let Some(flash) = &config.ovmf else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    let why = "QEMU does not start without its firmware";
    if !flash.code.exists() {
        let what = format!("there is no {}", flash.code.display());
        let finding = Finding::problem(CHECK, what, why).of_vm(&vm.name);
        findings.push(finding.fix("apt-get install ovmf"));
    }
    if !flash.vars.exists() {
        let what = format!("there is no {}", flash.vars.display());
        let finding = Finding::problem(CHECK, what, why).of_vm(&vm.name);
        findings.push(finding.fix(format!(
            "install -m 600 /usr/share/OVMF/OVMF_VARS_4M.fd {}",
            quoted_path(&flash.vars)
        )));
    }
    findings
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
        let of = |description| judge(&host_of(description));
        says(of("devices = [\"disk0\"]"), Level::Ok, "borrows disk0");
        says(of(""), Level::Note, "no device");
        // Domains of libvirt have a separate check.
        says(
            of("devices = [\"a\"]\nsocket-group = \"nosuch\""),
            Level::Problem,
            "no group \"nosuch\"",
        );
        says(of("devices = [\"a\", \"a\"]"), Level::Problem, "used twice");
        says(
            of("devices = [\"a\"]\nboot = \"b\""),
            Level::Problem,
            "boot from b",
        );
        says(
            of("memory = 2000001"),
            Level::Problem,
            "guest RAM of 2000001 bytes",
        );
        let undone = "qemu-args = [\"-m\", \"8G\", \"-machine\", \"q35,memory-backend=x\"]";
        says(of(undone), Level::Problem, "undo what borrowing needs: ");
        let flash =
            "ovmf = { code = \"/no/such/code\", vars = \"/no/such/vars\" }\ndevices = [\"a\"]";
        let found = of(flash);
        assert!(found[1].fix[0].ends_with("/no/such/vars"), "{found:?}");
        let mut facts = host_of("");
        facts.vms[0].config = Err("line 3: what?".into());
        let said = says(judge(&facts), Level::Problem, "line 3");
        assert_eq!(said.fix, ["${EDITOR:-vi} /etc/farside/vm/web1.toml"]);
    }

    #[test]
    fn a_lender_and_nothing() {
        let mut facts = Facts::default();
        says(judge(&facts), Level::Note, "no device is lent");
        let lender = "[[device]]\nid = \"a\"\nmodel.dma-test = {}";
        facts.lender = Some(Ok(toml::from_str(lender).unwrap()));
        says(judge(&facts), Level::Ok, "lends 1 device");
        assert!(!judge(&facts)[0].what.contains("devices"));
        facts.lender = Some(Ok(toml::from_str("").unwrap()));
        says(judge(&facts), Level::Problem, "nothing to lend");
        facts.lender = Some(Err("line 2".into()));
        says(judge(&facts), Level::Problem, "line 2");
    }
}
