//! Whether lenders answer.

use farside_lender_protocol::{Address, VERSION};

use crate::{
    Facts, Finding,
    facts::{LenderFacts, Refusal},
    finding::{edit, quoted, quoted_path},
};

const CHECK: &str = "lender";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    facts
        .lenders
        .iter()
        .map(|lender| of_lender(facts, lender))
        .collect()
}

fn of_lender(facts: &Facts, lender: &LenderFacts) -> Finding {
    let address = &lender.address;
    let why = match lender.vms.as_slice() {
        [] => "no VM can borrow what lender.toml lends".to_owned(),
        vms => format!(
            "VM {} borrows there: its backend does not start",
            vms.join(", ")
        ),
    };
    let host = match address {
        Address::Tcp { host, .. } | Address::Tls { host, .. } => Some(quoted(host)),
        Address::Unix(_) => None,
    };
    let there = |command: &str| match &host {
        Some(host) => format!("ssh {host} {command}"),
        None => command.to_owned(),
    };
    match &lender.answer {
        Ok((name, devices)) => {
            let borrowed = devices
                .iter()
                .filter(|device| device.borrowed_by.is_some())
                .count();
            let lent = devices.len();
            Finding::ok(
                CHECK,
                format!(
                    "{name} at {address} speaks version {VERSION} and lends {}, {borrowed} of them borrowed",
                    crate::finding::devices(lent)
                ),
            )
        }
        Err(Refusal::Unreachable(error)) => {
            let mut finding = Finding::problem(CHECK, error, &why);
            if host.is_none() && facts.lender.is_none() {
                // It does not start without.
                finding = finding.fix(edit(&facts.lender_file));
            }
            finding.fix(match &host {
                Some(_) => there("systemctl enable --now farside-lender.service"),
                None if facts.by_units() => {
                    "systemctl enable --now farside-lender.socket".to_owned()
                }
                None => format!("farside lend --config {}", quoted_path(&facts.lender_file)),
            })
        }
        Err(Refusal::Version(error)) => {
            Finding::problem(CHECK, format!("{address}: {error}"), &why)
                .fix("farside --version")
                .fix(there("farside --version"))
        }
        Err(Refusal::NoLender(error)) => Finding::problem(CHECK, error, &why)
            .fix(there("ss --listening --processes --tcp --unix")),
        Err(Refusal::Other(error)) => Finding::problem(CHECK, format!("{address}: {error}"), &why)
            .fix(there("systemctl restart farside-lender.service")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Level, checks::tests::says};

    #[test]
    fn both_ways() {
        let with = |address: &str, answer| {
            let facts = Facts {
                lender_file: "/etc/farside/lender.toml".into(),
                lenders: vec![LenderFacts {
                    address: address.parse().unwrap(),
                    vms: vec!["web1".into()],
                    answer,
                }],
                ..Facts::default()
            };
            judge(&facts)
        };
        says(
            with("/l", Ok(("rack1".into(), Vec::new()))),
            Level::Ok,
            "rack1 at /l",
        );
        let gone = || Err(Refusal::Unreachable("cannot reach the lender at /l".into()));
        let said = says(with("/l", gone()), Level::Problem, "cannot reach");
        let file = "/etc/farside/lender.toml";
        let lend = format!("farside lend --config {file}");
        assert_eq!(said.fix, [format!("${{EDITOR:-vi}} {file}"), lend]);
        assert!(said.why.contains("VM web1"));
        let said = says(
            with("tcp:rack2:7410", gone()),
            Level::Problem,
            "cannot reach",
        );
        assert_eq!(
            said.fix,
            ["ssh rack2 systemctl enable --now farside-lender.service"]
        );
        let other = Err(Refusal::Version("speaks version 9".into()));
        says(
            with("tcp:rack2:7410", other),
            Level::Problem,
            "speaks version 9",
        );
        let foreign = Err(Refusal::NoLender(
            "tcp:rack2:7410 is not a farside lender".into(),
        ));
        let said = says(
            with("tcp:rack2:7410", foreign),
            Level::Problem,
            "is not a farside lender",
        );
        assert!(!said.fix.concat().contains("restart"), "{said:?}");
        let late = Err(Refusal::Other("no answer within 1.5s".into()));
        says(with("tcp:rack2:7410", late), Level::Problem, "no answer");
    }
}
