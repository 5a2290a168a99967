//! libvirt's hook, which starts and ends backends.

use farside_vm_config::Manager;

use crate::{Facts, Finding, finding::quoted_path};

const CHECK: &str = "hook";
const HOOK: &str = "/etc/libvirt/hooks/qemu.d/farside";

/// Whether VMs here are libvirt's, and libvirt is here.
pub(super) fn for_libvirt(facts: &Facts) -> bool {
    let mut vms = facts.good_vms();
    facts.libvirt.is_some() && vms.any(|(_, config)| config.manager == Some(Manager::Libvirt))
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let Some(libvirt) = facts.libvirt.as_ref().filter(|_| for_libvirt(facts)) else {
        return Vec::new();
    };
    let why =
        "libvirt runs it to start the backend before QEMU: without it a domain finds no devices";
    let finding = match libvirt.hooks.as_slice() {
        [] => Finding::problem(CHECK, format!("libvirt has no hook that calls farside ({HOOK})"), why)
            .fix(format!(
                "mkdir -p /etc/libvirt/hooks/qemu.d && printf '#!/bin/sh\\nexec farside hook -- \"$@\"\\n' > {HOOK} && chmod 755 {HOOK} && systemctl restart libvirtd"
            )),
        [(path, false)] => {
            let what = format!("{} is not executable", path.display());
            Finding::problem(CHECK, what, why)
                .fix(format!("chmod 755 {0} && systemctl restart libvirtd", quoted_path(path)))
        }
        [_] if !facts.in_path => {
            let what = "the hook finds no `farside` in /usr/bin or /usr/local/bin";
            let program = quoted_path(&facts.program);
            Finding::problem(CHECK, what, why).fix(format!("install -m 755 {program} /usr/local/bin/farside"))
        }
        [(path, true)] => Finding::ok(CHECK, format!("{} calls farside", path.display())),
        [_, (path, _), ..] => {
            let what = "more than one hook calls farside";
            let why = "each starts the backend, and each ends it";
            Finding::note(CHECK, what, why).fix(format!("rm {}", quoted_path(path)))
        }
    };
    vec![finding]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says},
        facts::Libvirt,
    };

    #[test]
    fn both_ways() {
        let mut facts = host_of("manager = \"libvirt\"");
        assert_eq!(judge(&facts), []);
        let mut with = |hooks: &[(&str, bool)], in_path| {
            let hooks = hooks
                .iter()
                .map(|(path, executable)| (path.into(), *executable));
            facts.libvirt = Some(Libvirt {
                hooks: hooks.collect(),
                ..Libvirt::default()
            });
            facts.in_path = in_path;
            judge(&facts)
        };
        says(with(&[], true), Level::Problem, "no hook");
        let said = says(
            with(&[("/h", false)], true),
            Level::Problem,
            "not executable",
        );
        assert!(said.fix[0].starts_with("chmod 755 /h"));
        says(with(&[("/h", true)], false), Level::Problem, "no `farside`");
        says(with(&[("/h", true)], true), Level::Ok, "/h calls");
        let said = says(
            with(&[("/h", true), ("/i", true)], true),
            Level::Note,
            "more than one",
        );
        assert_eq!(said.fix, ["rm /i"]);
        facts.vms.clear();
        assert_eq!(judge(&facts), []);
    }
}
