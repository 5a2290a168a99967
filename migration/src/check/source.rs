//! Checks at the host that the VM would leave.

use std::{
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use super::{Finding, Question};
use crate::{ErrorKind, Host, Journal, Peer, Plan, Reply, Request, Result};

/// Time limit for a connection to the other host.
const CONNECT: Duration = Duration::from_secs(10);

/// Findings, each with the host that it is about.
pub type Findings = Vec<(String, Finding)>;

/// Checks what would stop this migration, on both hosts.
pub fn check(plan: &Plan, host: &dyn Host, peer: &mut dyn Peer) -> Findings {
    let (journal, mut findings) = look_here(plan, host);
    let here = host.name();
    let Some(journal) = journal else {
        return of(&here, findings);
    };
    let runs = journal.was_running;
    let facts = match host.facts(&plan.vm, &journal.configuration, runs) {
        Ok(facts) => facts,
        Err(error) => {
            findings.push(Finding::of("host", &error));
            return of(&here, findings);
        }
    };
    if journal.strategy.is_live() {
        findings.push(match facts.blockers.as_slice() {
            [] => Finding::ok("guest", "QEMU reports no migration blocker"),
            reasons => Finding::problem(
                "guest",
                format!("QEMU reports migration blockers: {}", reasons.join("; ")),
                "remove what they name, or move the VM without --live",
            ),
        });
    }
    let question = Question { journal, facts };
    let address = question.journal.strategy.address();
    let answer = match peer.ask(Request::Check(Box::new(question))) {
        Ok(Reply::Checked(answer)) => answer,
        Ok(Reply::Failed(error)) | Err(error) => {
            findings.push(Finding::problem(
                "other host",
                error.message,
                match error.kind {
                    ErrorKind::Lost => {
                        "make sure that the remote shell gets there, and that farside is installed there"
                    }
                    _ => "",
                },
            ));
            return of(&here, findings);
        }
        Ok(other) => {
            findings.push(Finding::problem(
                "other host",
                format!("unexpected answer {other:?}"),
                "",
            ));
            return of(&here, findings);
        }
    };
    findings.push(Finding::ok("other host", "the same farside answers there"));
    if let (Some(ip), Some(port)) = (address, answer.port) {
        let address = SocketAddr::new(ip, port);
        findings.push(match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(_) => Finding::ok("network", format!("{ip} can be reached there")),
            Err(error) => Finding::problem(
                "network",
                format!("{address} cannot be reached there: {error}"),
                "QEMU listens at any TCP port: let them through, or name another address of that host with --migrate-address",
            ),
        });
    }
    let mut all = of(&here, findings);
    all.extend(of(&plan.to, answer.findings));
    all
}

fn of(host: &str, findings: Vec<Finding>) -> Findings {
    let findings = findings.into_iter();
    findings.map(|found| (host.to_owned(), found)).collect()
}

/// Checks this host. Returns the manifest, if one can be made.
fn look_here(plan: &Plan, host: &dyn Host) -> (Option<Journal>, Vec<Finding>) {
    let vm = &plan.vm;
    let leaves = plan.may_leave(host);
    let mut findings = vec![Finding::either(
        "VM",
        &leaves,
        &format!("{vm} is at home here"),
    )];
    let configuration = match plan.configuration(host) {
        Ok(configuration) => configuration,
        Err(error) => {
            // A VM that moved away is among the findings already.
            if leaves.is_ok() {
                findings.push(Finding::of("configuration", &error));
            }
            return (None, findings);
        }
    };
    let running = plan.was_running(host, &configuration);
    let state = match running {
        Ok(false) => "it does not run, and stays stopped",
        _ => "it runs",
    };
    findings.push(Finding::either("state", &running, state));
    let mut devices = Vec::new();
    let found = host
        .find_each(vm, &configuration)
        .and_then(|found| Ok((found, host.fences(vm)?)));
    match found {
        Err(error) => findings.push(Finding::of("devices", &error)),
        Ok((found, held)) => {
            for device in found {
                match device.and_then(|device| plan.moved(device, &held)) {
                    Ok(device) => {
                        let what = format!("{} is {}", device.id, device.identity.summary);
                        findings.push(Finding::ok("device", what));
                        devices.push(device);
                    }
                    Err(error) => findings.push(Finding::of("device", &error)),
                }
            }
        }
    }
    let journal: Result<Journal> =
        plan.journal(host, configuration, running.unwrap_or(false), devices);
    match journal {
        Ok(journal) => (Some(journal), findings),
        Err(error) => {
            findings.push(Finding::of("manifest", &error));
            (None, findings)
        }
    }
}
