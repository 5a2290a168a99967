//! Sockets that a process left when it was killed.

use crate::{Facts, Finding, facts::State, finding::quoted_path};

const CHECK: &str = "sockets";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let runtime = &facts.runtime;
    let vm_directory = runtime.path.join("vm");
    let ours = |path: &std::path::Path| match &facts.only {
        // Skip VMs that are not selected.
        Some(vm) => !path.starts_with(&vm_directory) || path.starts_with(vm_directory.join(vm)),
        None => true,
    };
    let of_state = |state| {
        let sockets = runtime.sockets.iter();
        sockets.filter(move |socket| socket.state == state && ours(&socket.path))
    };
    let mut findings = Vec::new();
    let stale: Vec<_> = of_state(State::Stale)
        .map(|socket| quoted_path(&socket.path))
        .collect();
    if !stale.is_empty() {
        let stale = stale.join(" ");
        findings.push(
            Finding::problem(
                CHECK,
                format!("no process listens at {stale}"),
                "a lender, backend or QEMU was killed and left them; connections are refused",
            )
            .fix(format!("rm -f -- {stale}")),
        );
    }
    let denied: Vec<_> = of_state(State::Denied)
        .map(|socket| quoted_path(&socket.path))
        .collect();
    if !denied.is_empty() {
        findings.push(Finding::note(
            CHECK,
            format!(
                "user {} may not connect to {}",
                facts.users.me.name,
                denied.join(" ")
            ),
            "they belong to another user: run this as that user, or as root",
        ));
    }
    if findings.is_empty() {
        let live = of_state(State::Live).count();
        findings.push(Finding::ok(CHECK, format!("{live} in use, none stale")));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Level, checks::tests::says, facts::Socket};

    #[test]
    fn both_ways() {
        let mut facts = Facts::default();
        facts.runtime.path = "/run/farside".into();
        let socket = |path: &str, state| Socket {
            path: path.into(),
            state,
        };
        facts.runtime.sockets = vec![
            socket("/run/farside/lender.sock", State::Live),
            socket("/run/farside/vm/web1/a b.sock", State::Stale),
            socket("/run/farside/vm/web1/qmp", State::Stale),
        ];
        let said = says(judge(&facts), Level::Problem, "/run/farside/vm/web1/qmp");
        assert_eq!(
            said.fix,
            ["rm -f -- '/run/farside/vm/web1/a b.sock' /run/farside/vm/web1/qmp"]
        );
        facts.only = Some("web2".into());
        says(judge(&facts), Level::Ok, "1 in use");
        facts.runtime.sockets = vec![socket("/run/farside/x", State::Denied)];
        says(judge(&facts), Level::Note, "may not connect");
    }
}
