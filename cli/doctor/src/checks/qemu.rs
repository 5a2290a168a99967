//! A QEMU with `vfio-user-pci`.

use crate::{Facts, Finding, facts::QemuFacts, finding::edit};

const CHECK: &str = "qemu";
const WHY: &str = "QEMU connects to borrowed devices by its device vfio-user-pci";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let needed = !facts.vms.is_empty();
    let each = facts.qemus.iter().map(|qemu| match &qemu.answer {
        Ok(version) => Finding::ok(
            CHECK,
            format!(
                "{} is QEMU {version} with vfio-user-pci",
                qemu.program.display()
            ),
        ),
        // A host that only lends runs no VM.
        Err(why) => Finding::problem_if(needed, CHECK, why, WHY).fix(fix(facts, qemu)),
    });
    each.collect()
}

fn fix(facts: &Facts, qemu: &QemuFacts) -> String {
    let mut vms = facts.good_vms();
    // An absolute path in a VM configuration is the user's own QEMU.
    let own = vms.find(|(_, config)| config.qemu.as_ref() == Some(&qemu.program));
    if let Some((vm, _)) = own.filter(|_| qemu.program.is_absolute()) {
        return format!("{}   # `qemu`, or remove it", edit(&vm.path));
    }
    match facts.release.as_deref() {
        Some("trixie") => "apt-get install qemu-system-x86/trixie-backports".to_owned(),
        Some(old @ ("bookworm" | "bullseye" | "buster")) => format!(
            "# Debian's {old} has no QEMU 10.1: upgrade to Debian 13, or build QEMU \
             (https://www.qemu.org/download/) and name it in VM configurations (`qemu = PATH`)"
        ),
        Some(_) => "apt-get install qemu-system-x86".to_owned(),
        None => "# install QEMU 10.1 or newer: your distribution's, or \
                 https://www.qemu.org/download/"
            .to_owned(),
    }
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
        let mut facts = host_of("");
        let qemu = |answer: Result<&str, &str>| QemuFacts {
            program: "qemu-system-x86_64".into(),
            answer: answer.map(str::to_owned).map_err(str::to_owned),
        };
        facts.qemus = vec![qemu(Ok("11.1"))];
        says(judge(&facts), Level::Ok, "QEMU 11.1");
        for why in ["it is QEMU 7.2", "cannot run"] {
            facts.qemus = vec![qemu(Err(why))];
            says(judge(&facts), Level::Problem, why);
        }
        facts.vms.clear();
        says(judge(&facts), Level::Note, "cannot run");
    }

    #[test]
    fn the_fix_is_one_that_this_host_can_do() {
        let mut facts = host_of("");
        facts.qemus = vec![QemuFacts {
            program: "qemu-system-x86_64".into(),
            answer: Err("it is QEMU 7.2".into()),
        }];
        for (release, words) in [
            (
                Some("trixie"),
                "apt-get install qemu-system-x86/trixie-backports",
            ),
            (
                Some("bookworm"),
                "# Debian's bookworm has no QEMU 10.1: upgrade",
            ),
            (Some("forky"), "apt-get install qemu-system-x86"),
            (None, "# install QEMU 10.1 or newer"),
        ] {
            facts.release = release.map(str::to_owned);
            let fix = says(judge(&facts), Level::Problem, "7.2").fix.remove(0);
            assert!(fix.starts_with(words), "{release:?}: {fix}");
            assert!(
                release == Some("trixie") || !fix.contains("backports"),
                "{fix}"
            );
        }
        // A name that is looked up in PATH is the package's.
        let mut facts = host_of("qemu = \"qemu-system-x86_64\"");
        facts.release = Some("forky".to_owned());
        facts.qemus = vec![QemuFacts {
            program: "qemu-system-x86_64".into(),
            answer: Err("it is QEMU 7.2".into()),
        }];
        let fix = says(judge(&facts), Level::Problem, "7.2").fix;
        assert_eq!(fix, ["apt-get install qemu-system-x86"]);
        let mut facts = host_of("qemu = \"/tmp\"");
        facts.qemus = vec![QemuFacts {
            program: "/tmp".into(),
            answer: Err("cannot run \"/tmp\"".into()),
        }];
        let fix = says(judge(&facts), Level::Problem, "/tmp").fix;
        assert_eq!(
            fix,
            ["${EDITOR:-vi} /etc/farside/vm/web1.toml   # `qemu`, or remove it"]
        );
    }
}
