//! A QEMU with `vfio-user-pci`.

use crate::{Facts, Finding};

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
        Err(why) => Finding::problem_if(needed, CHECK, why, WHY).fix(match qemu.missing {
            true => "apt-get install qemu-system-x86/trixie-backports".to_owned(),
            false => format!(
                "apt-get install qemu-system-x86/trixie-backports && {} --version",
                crate::finding::quoted_path(&qemu.program)
            ),
        }),
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says},
        facts::QemuFacts,
    };

    #[test]
    fn both_ways() {
        let mut facts = host_of("");
        let qemu = |answer: Result<&str, &str>| QemuFacts {
            program: "qemu-system-x86_64".into(),
            answer: answer.map(str::to_owned).map_err(str::to_owned),
            missing: answer == Err("cannot run"),
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
}
