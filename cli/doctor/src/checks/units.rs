//! systemd's units: there, whole, and of the same mind as the descriptions.

use std::collections::BTreeSet;

use farside_daemon::paths;

use super::iommu::EXAMPLE;
use crate::{Facts, Finding, finding::quoted};

const CHECK: &str = "units";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let units = &facts.systemd;
    if !units.runs {
        return vec![Finding::ok(
            CHECK,
            "systemd does not run this host: `farside start` runs backends",
        )];
    }
    let mut findings = Vec::new();
    if units.backend.is_none() || units.lender.is_none() {
        findings.push(
            Finding::note(
                CHECK,
                "farside's units are not installed",
                "lender and backends are not started at boot, or restarted after they were killed",
            )
            .fix("apt-get install ./farside_*.deb"),
        );
    }
    for unit in &units.failed {
        let unit = quoted(unit);
        findings.push(
            Finding::problem(
                CHECK,
                format!("{unit} has failed"),
                "systemd does not restart it without a request",
            )
            .fix(format!("journalctl --no-pager -n 20 -u {unit}"))
            .fix(format!(
                "systemctl reset-failed {unit} && systemctl start {unit}"
            )),
        );
    }
    if let Some(path) = &units.former_drop_in {
        let path = quoted(&path.display().to_string());
        findings.push(
            Finding::problem(
                CHECK,
                format!("{path} makes the lender root"),
                "it is of a version whose lender took physical devices from their drivers itself; farside-vfio.service does that now, and the lender needs no privileges",
            )
            .fix(format!(
                "install -m 644 {EXAMPLE} {path} && systemctl daemon-reload && systemctl restart farside-lender"
            )),
        );
    }
    findings.extend(facts.good_vms().filter_map(|(vm, config)| {
        let listens = units.generated.get(&vm.name)?;
        let name = config.name.as_ref()?;
        let sockets = config.device_ids().into_iter();
        let sockets = sockets.map(|id| paths::device_socket(name, &id));
        let sockets: BTreeSet<_> = sockets.map(|path| path.display().to_string()).collect();
        if *listens == sockets || facts.moved {
            return None;
        }
        let name = |path: &String| path.rsplit('/').next().unwrap_or(path).to_owned();
        let differ: Vec<_> = listens.symmetric_difference(&sockets).map(name).collect();
        let finding = Finding::problem(
            CHECK,
            format!(
                "the socket unit does not match the VM configuration: {} differ",
                differ.join(", ")
            ),
            "QEMU finds no socket, or one of a device that the VM no longer has",
        );
        let unit = quoted(&format!("farside@{}.socket", vm.name));
        let fix =
            format!("systemctl daemon-reload && systemctl restart {unit}   # while the VM is off");
        Some(finding.of_vm(&vm.name).fix(fix))
    }));
    if findings.is_empty() {
        findings.push(Finding::ok(CHECK, "installed, and none has failed"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says},
        facts::{Limit, Unit},
    };

    #[test]
    fn both_ways() {
        let mut facts = host_of("devices = [\"disk0\"]");
        says(judge(&facts), Level::Ok, "does not run this host");
        facts.systemd.runs = true;
        says(judge(&facts), Level::Note, "not installed");
        let unit = Unit {
            path: "/u".into(),
            memlock: Limit::None,
            user: "farside".into(),
            binds: false,
        };
        facts.systemd.backend = Some(unit.clone());
        facts.systemd.lender = Some(unit);
        says(judge(&facts), Level::Ok, "installed");

        let socket = |id: &str| {
            let (vm, id) = ("web1".parse().unwrap(), id.parse().unwrap());
            paths::device_socket(&vm, &id).display().to_string()
        };
        let listens = |ids: &[&str]| ids.iter().map(|id| socket(id)).collect();
        facts
            .systemd
            .generated
            .insert("web1".into(), listens(&["disk0"]));
        says(judge(&facts), Level::Ok, "installed");
        facts
            .systemd
            .generated
            .insert("web1".into(), listens(&["disk1"]));
        let said = says(
            judge(&facts),
            Level::Problem,
            "disk0.sock, disk1.sock differ",
        );
        assert!(said.fix[0].contains("farside@web1.socket"), "{said:?}");

        facts.systemd.generated.clear();
        facts.systemd.former_drop_in = Some("/etc/x.conf".into());
        let said = says(
            judge(&facts),
            Level::Problem,
            "/etc/x.conf makes the lender root",
        );
        let fix = format!("install -m 644 {EXAMPLE} /etc/x.conf && systemctl daemon-reload");
        assert!(said.fix[0].starts_with(&fix), "{said:?}");
        facts.systemd.former_drop_in = None;
        facts.systemd.failed = vec!["farside-lender.service".into()];
        says(
            judge(&facts),
            Level::Problem,
            "farside-lender.service has failed",
        );
    }
}
