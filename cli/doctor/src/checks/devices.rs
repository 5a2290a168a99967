//! Checks that the lenders have the devices in VM configurations, and that no other VM has borrowed
//! them.

use farside_lender_protocol::{Address, DeviceEntry};
use farside_vm_config::VmConfig;

use crate::{
    Facts, Finding,
    facts::VmFacts,
    finding::{edit, quoted},
};

const CHECK: &str = "device";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let vms = facts.good_vms();
    vms.flat_map(|(vm, config)| of_vm(facts, vm, config))
        .collect()
}

fn of_vm(facts: &Facts, vm: &VmFacts, config: &VmConfig) -> Vec<Finding> {
    let addresses = config.lenders();
    let asked = facts
        .lenders
        .iter()
        .filter(|lender| addresses.contains(&lender.address));
    let answers: Option<Vec<_>> = asked
        .map(|lender| {
            let (_, devices) = lender.answer.as_ref().ok()?;
            Some((&lender.address, devices))
        })
        .collect();
    // The devices of an unresponsive lender are unknown.
    let Some(answers) = answers.filter(|answers| answers.len() == addresses.len()) else {
        return Vec::new();
    };
    let lent = answers
        .into_iter()
        .flat_map(|(at, devices)| devices.iter().map(move |device| (at, device)));
    let lent: Vec<_> = lent.collect();
    let ids = config.device_ids();
    let findings: Vec<_> = ids
        .iter()
        .filter_map(|id| of_device(vm, id, &lent))
        .collect();
    if findings.is_empty() && !ids.is_empty() {
        let finding = Finding::ok(CHECK, format!("lent: {}", ids.join(", ")));
        return vec![finding.of_vm(&vm.name)];
    }
    findings
}

fn of_device(vm: &VmFacts, id: &str, lent: &[(&Address, &DeviceEntry)]) -> Option<Finding> {
    let problem = |what: String, why| {
        let finding = Finding::problem(CHECK, what, why).of_vm(&vm.name);
        Some(finding.fix(edit(&vm.path)))
    };
    let mut having = lent.iter().filter(|(_, device)| device.id == id);
    let Some((at, device)) = having.next() else {
        let ids: Vec<_> = lent.iter().map(|(_, device)| device.id.as_str()).collect();
        let what = match ids.as_slice() {
            [] => format!("no lender has {id} or any other device"),
            ids => format!("no lender has {id}; they have {}", ids.join(", ")),
        };
        return problem(what, "the VM's backend does not start");
    };
    if let Some((second, _)) = having.next() {
        let what = format!("two lenders have a device {id}: {at} and {second}");
        let why = "the VM's backend does not start: which of the devices is meant cannot be known";
        return problem(what, why);
    }
    if device.borrowed_by.is_none()
        && let Err(refusal) = device.availability.check(&device.id)
    {
        let why = "the VM's QEMU is refused when it connects to the device";
        return Some(Finding::note(CHECK, refusal.message, why).of_vm(&vm.name));
    }
    if let Some(kept) = device.kept.as_ref().filter(|kept| kept.vm != *vm.name) {
        let what = kept.refusal(&device.id).message;
        let why = "the VM's QEMU is refused when it connects to the device";
        return Some(Finding::note(CHECK, what, why).of_vm(&vm.name));
    }
    let by = device.borrowed_by.as_ref().filter(|by| by.vm != *vm.name)?;
    let what = format!("VM {} has borrowed {id}", by.vm);
    let why = "a device has one borrower at a time: this VM gets it when that one has returned it";
    let other = quoted(&by.vm);
    Some(
        Finding::note(CHECK, what, why)
            .of_vm(&vm.name)
            .fix(format!("farside detach {other} {}", quoted(id))),
    )
}

#[cfg(test)]
mod tests {
    use farside_lender_protocol::{Availability, BorrowedBy, Generation, KeptFor};

    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says},
        facts::{LenderFacts, Refusal},
    };

    fn entry(id: &str, by: Option<&str>) -> DeviceEntry {
        DeviceEntry {
            id: id.parse().unwrap(),
            source: "model".into(),
            summary: String::new(),
            borrowed_by: by.map(|vm| BorrowedBy {
                vm: vm.parse().unwrap(),
                generation: Generation(1),
                seconds: 1,
            }),
            fences: Vec::new(),
            problem: None,
            availability: Default::default(),
            kept: None,
        }
    }

    fn lender(address: &str, devices: &[DeviceEntry]) -> LenderFacts {
        LenderFacts {
            address: address.parse().unwrap(),
            vms: vec!["web1".into()],
            answer: Ok((address.into(), devices.to_vec())),
        }
    }

    #[test]
    fn both_ways() {
        let mut facts = host_of("devices = [\"disk0\"]\nlenders = [\"/a\", \"tcp:b:1\"]");
        let mut with = |lenders: Vec<LenderFacts>| {
            facts.lenders = lenders;
            judge(&facts)
        };
        let other = lender("tcp:b:1", &[entry("disk1", None)]);
        let mine = lender("/a", &[entry("disk0", Some("web1"))]);
        says(with(vec![mine.clone(), other.clone()]), Level::Ok, "disk0");
        let found = with(vec![lender("/a", &[]), other.clone()]);
        says(
            found,
            Level::Problem,
            "no lender has disk0; they have disk1",
        );
        let found = with(vec![
            mine.clone(),
            lender("tcp:b:1", &[entry("disk0", None)]),
        ]);
        says(found, Level::Problem, "disk0: /a and tcp:b:1");
        let mut away = entry("disk0", None);
        away.availability = Availability::Unavailable;
        let found = with(vec![lender("/a", &[away]), other.clone()]);
        says(found, Level::Note, "disk0 is unavailable");
        let kept_for = |vm: &str| {
            let mut kept = entry("disk0", None);
            kept.kept = Some(KeptFor {
                vm: vm.parse().unwrap(),
                seconds: 3,
                left: 297,
            });
            lender("/a", &[kept])
        };
        let found = with(vec![kept_for("db"), other.clone()]);
        says(found, Level::Note, "disk0 is kept for VM db");
        let found = with(vec![kept_for("web1"), other.clone()]);
        says(found, Level::Ok, "disk0");
        let theirs = lender("/a", &[entry("disk0", Some("db"))]);
        let said = says(
            with(vec![theirs, other]),
            Level::Note,
            "VM db has borrowed disk0",
        );
        assert_eq!(said.fix, ["farside detach db disk0"]);
        // Another check reports unreachable lenders.
        let mut silent = lender("tcp:b:1", &[]);
        silent.answer = Err(Refusal::Unreachable(String::new()));
        assert_eq!(with(vec![mine, silent]), []);
    }
}
