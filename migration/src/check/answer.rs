//! The host that the VM would go to.

use std::net::TcpListener;

use super::{Answer, Finding, Question, compare, compare::Wanted, disks};
use crate::{Arrival, Host, live::try_listen};

/// Performs all checks. The listener is that of [`Answer::port`]: keep it until the other
/// host has connected.
pub(crate) fn answer(host: &dyn Host, question: &Question) -> (Answer, Option<TcpListener>) {
    let journal = &question.journal;
    let (vm, configuration) = (&journal.vm, &journal.configuration);
    let arrival = Arrival::new(host);
    let mut findings = vec![Finding::either(
        "name",
        &arrival.name_is_free(journal),
        &format!("no VM {vm} is here"),
    )];
    match host.missing(vm, configuration) {
        Err(error) => findings.push(Finding::of("configuration", &error)),
        Ok(missing) if missing.is_empty() => {
            findings.push(Finding::ok("configuration", "what it names is here"));
        }
        Ok(missing) => findings.extend(
            missing
                .iter()
                .map(|error| Finding::of("configuration", error)),
        ),
    }
    findings.extend(devices(host, question));
    let wanted = Wanted::of(journal);
    match (host.facts(vm, configuration, false), wanted) {
        (Ok(here), Ok(wanted)) => {
            findings.extend(compare::compare(&wanted, &question.facts, &here));
        }
        (Err(error), _) | (_, Err(error)) => findings.push(Finding::of("host", &error)),
    }
    findings.extend(disks::seen_here(question.facts.disks.as_deref()));
    let listener = journal.strategy.address().and_then(|address| {
        let tried = try_listen(address);
        if let Err(error) = &tried {
            findings.push(Finding::of("address", error));
        }
        tried.ok()
    });
    let port = listener.as_ref().and_then(|listener| {
        let address = listener.local_addr().ok()?;
        Some(address.port())
    });
    (Answer { findings, port }, listener)
}

/// For each device: whether it is the same one, and whether its lender can map all RAM.
fn devices(host: &dyn Host, question: &Question) -> Vec<Finding> {
    let journal = &question.journal;
    let (vm, configuration) = (&journal.vm, &journal.configuration);
    let found = match host.find_each(vm, configuration) {
        Ok(found) => found,
        Err(error) => return vec![Finding::of("devices", &error)],
    };
    let mut findings = Vec::new();
    let mut seen = Vec::new();
    for device in found {
        match device {
            Ok(device) => seen.push(device),
            Err(error) => findings.push(Finding::of("device", &error)),
        }
    }
    for device in &journal.devices {
        let id = &device.id;
        // Its absence is among the findings.
        let Some(here) = seen.iter().find(|here| here.id == *id) else {
            continue;
        };
        let same = crate::arrival::seen_from_here(device, &seen, vm);
        let well = format!("{id} is found at {}", here.lender);
        findings.push(Finding::either("device", &same, &well));
        if same.is_ok() {
            let reached = host.check_windows(vm, configuration, here);
            let well = format!("the lender of {id} has windows for all of the guest's RAM");
            findings.push(Finding::either("windows", &reached, &well));
        }
    }
    findings
}
