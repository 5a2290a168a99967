//! The VMs that this host accepts from another one.

use std::path::{Path, PathBuf};

use farside_daemon::VmName;

use crate::{
    Configuration, Error, Request, Result,
    local::{config_of, requirements::qemu_of},
};

/// Options of QEMU by which a configuration would end QEMU's own confinement, or read options from a
/// file.
const UNCONFINED: [&str; 2] = ["sandbox", "readconfig"];

/// Restrictions of the agent, for a key of ssh that starts nothing else. Empty: none.
///
/// They hold for who starts VMs and by which program. A configuration that passes still names the
/// files and networks that its QEMU opens, with the rights of the agent's user.
#[derive(Clone, Debug, Default)]
pub struct Accept {
    /// VMs.
    pub vms: Vec<VmName>,
    /// QEMU binaries.
    pub qemus: Vec<PathBuf>,
}

impl Accept {
    /// Refuses requests for other VMs, and configurations with other binaries.
    pub(crate) fn check(&self, request: &Request) -> Result<()> {
        let (vm, configuration) = match request {
            Request::Hello(_) => return Ok(()),
            Request::Check(question) => {
                let journal = &question.journal;
                (&journal.vm, Some(&journal.configuration))
            }
            Request::Prepare(journal) | Request::Install(journal) => {
                (&journal.vm, Some(&journal.configuration))
            }
            Request::Incoming { vm, .. }
            | Request::Start { vm, .. }
            | Request::Finish { vm, .. }
            | Request::StopThere { vm, .. } => (vm, None),
        };
        if !self.vms.is_empty() && !self.vms.contains(vm) {
            let names: Vec<&str> = self.vms.iter().map(|vm| vm.as_str()).collect();
            return Err(Error::refused(format!(
                "this host accepts no VM {vm}, only {}: add `--vm {vm}` to the command of its agent",
                names.join(", ")
            )));
        }
        match configuration {
            Some(configuration) if !self.qemus.is_empty() => self.check_qemu(vm, configuration),
            _ => Ok(()),
        }
    }

    fn check_qemu(&self, vm: &VmName, configuration: &Configuration) -> Result<()> {
        let config = config_of(vm, configuration)?;
        self.check_binary(vm, &qemu_of(&config))?;
        check_arguments(vm, config.qemu_args.iter().map(String::as_str))?;
        let Some(xml) = &configuration.domain else {
            return Ok(());
        };
        let tree = roxmltree::Document::parse(xml).map_err(|error| {
            Error::refused(format!("cannot parse the domain of VM {vm}: {error}"))
        })?;
        // libvirt would look for one by itself.
        let emulators = || tree.descendants().filter(|it| it.has_tag_name("emulator"));
        if emulators().next().is_none() {
            return Err(Error::refused(format!(
                "the domain of VM {vm} has no <emulator>, which this host's agent requires"
            )));
        }
        // libvirt runs scripts of interfaces as root; variables can have QEMU load other code.
        let runs_more =
            |it: &roxmltree::Node<'_, '_>| matches!(it.tag_name().name(), "env" | "script");
        if let Some(found) = tree.descendants().find(runs_more) {
            return Err(Error::refused(format!(
                "<{}> in the domain of VM {vm} is not accepted by this host: remove it",
                found.tag_name().name()
            )));
        }
        for emulator in emulators() {
            self.check_binary(vm, Path::new(emulator.text().unwrap_or_default().trim()))?;
        }
        let arguments = tree
            .descendants()
            .filter(|it| it.tag_name().name() == "arg")
            .filter_map(|it| it.attribute("value"));
        check_arguments(vm, arguments)
    }

    fn check_binary(&self, vm: &VmName, qemu: &Path) -> Result<()> {
        if self.qemus.iter().any(|allowed| allowed == qemu) {
            return Ok(());
        }
        let allowed: Vec<_> = self
            .qemus
            .iter()
            .map(|it| it.display().to_string())
            .collect();
        Err(Error::refused(format!(
            "VM {vm} runs {}, and this host accepts {} only: set `qemu` in its configuration",
            qemu.display(),
            allowed.join(", ")
        )))
    }
}

fn check_arguments<'a>(vm: &VmName, mut arguments: impl Iterator<Item = &'a str>) -> Result<()> {
    // QEMU takes options with one dash or two.
    let option = |argument: &&str| {
        let name = argument.strip_prefix('-').unwrap_or_default();
        UNCONFINED.contains(&name.strip_prefix('-').unwrap_or(name))
    };
    match arguments.find(option) {
        None => Ok(()),
        Some(argument) => Err(Error::refused(format!(
            "QEMU's {argument} in the configuration of VM {vm} is not accepted by this host: remove it"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Journal, Role, Step, Strategy,
        check::{Accelerator, Facts, Memory, Question},
    };

    fn requests(configuration: &Configuration) -> [Request; 3] {
        let journal = Journal {
            id: "m1".to_owned(),
            vm: "web1".parse().unwrap(),
            role: Role::Source,
            step: Step::Prepare,
            begun: Vec::new(),
            source: "a".to_owned(),
            destination: "b".to_owned(),
            shell: None,
            was_running: true,
            shutdown_timeout: 60,
            configuration: configuration.clone(),
            devices: Vec::new(),
            strategy: Strategy::Cold,
        };
        let question = Question {
            journal: journal.clone(),
            facts: Facts {
                qemu: None,
                accelerator: Accelerator::Tcg,
                cpu: String::new(),
                flags: Default::default(),
                memory: Memory {
                    huge_page: None,
                    free: 0,
                },
                disks: None,
                blockers: Vec::new(),
            },
        };
        let journal = Box::new(journal);
        [
            Request::Check(Box::new(question)),
            Request::Prepare(journal.clone()),
            Request::Install(journal),
        ]
    }

    fn accepts(toml: &str, domain: Option<&str>) -> std::result::Result<(), String> {
        let accept = Accept {
            vms: vec!["web1".parse().unwrap()],
            qemus: vec!["/usr/bin/qemu-system-x86_64".into()],
        };
        let configuration = Configuration {
            toml: toml.to_owned(),
            domain: domain.map(str::to_owned),
            autostart: false,
        };
        let answers = requests(&configuration).map(|request| {
            let checked = accept.check(&request);
            checked.map_err(|error| error.to_string())
        });
        assert!(answers.iter().all(|answer| *answer == answers[0]));
        answers[0].clone()
    }

    const QEMU: &str = "devices = []\nqemu = \"/usr/bin/qemu-system-x86_64\"\n";

    #[test]
    fn a_restricted_agent_accepts_its_binaries_only() {
        assert_eq!(accepts(QEMU, None), Ok(()));
        for toml in [
            "devices = []",
            "devices = []\nqemu = \"/tmp/qemu-system-x86_64\"",
        ] {
            let refused = accepts(toml, None).unwrap_err();
            assert!(
                refused.contains("accepts /usr/bin/qemu-system-x86_64 only"),
                "{refused}"
            );
        }
        for option in ["-sandbox", "--sandbox", "-readconfig"] {
            let toml = format!("{QEMU}qemu-args = [\"-nodefaults\", \"{option}\", \"off\"]");
            let refused = accepts(&toml, None).unwrap_err();
            assert!(refused.contains(&format!("QEMU's {option}")), "{refused}");
        }
        let domain =
            |inside: &str| format!("<domain type='qemu'><devices>{inside}</devices></domain>");
        let ours = "<emulator>/usr/bin/qemu-system-x86_64</emulator>";
        assert_eq!(accepts(QEMU, Some(&domain(ours))), Ok(()));
        for (inside, part) in [
            ("", "no <emulator>"),
            ("<emulator>/tmp/x</emulator>", "runs /tmp/x"),
            (&format!("{ours}<emulator>/tmp/x</emulator>"), "runs /tmp/x"),
            (&format!("{ours}<arg value='-sandbox'/>"), "QEMU's -sandbox"),
            (
                &format!("{ours}<env name='LD_PRELOAD' value='/x'/>"),
                "<env>",
            ),
            (
                &format!("{ours}<interface><script path='/x'/></interface>"),
                "<script>",
            ),
        ] {
            let refused = accepts(QEMU, Some(&domain(inside))).unwrap_err();
            assert!(refused.contains(part), "{inside}: {refused}");
        }
    }

    #[test]
    fn a_restricted_agent_accepts_its_vms_only() {
        let accept = Accept {
            vms: vec!["web2".parse().unwrap(), "web3".parse().unwrap()],
            qemus: Vec::new(),
        };
        let (id, vm): (_, VmName) = ("m1".to_owned(), "web1".parse().unwrap());
        let configuration = Configuration {
            toml: QEMU.to_owned(),
            domain: None,
            autostart: false,
        };
        let mut all = Vec::from(requests(&configuration));
        all.extend([
            Request::Start {
                id: id.clone(),
                vm: vm.clone(),
            },
            Request::Incoming {
                id: id.clone(),
                vm: vm.clone(),
            },
            Request::Finish {
                id: id.clone(),
                vm: vm.clone(),
            },
            Request::StopThere { id: id.clone(), vm },
        ]);
        for asked in all {
            let refused = accept.check(&asked).unwrap_err().to_string();
            assert!(refused.contains("no VM web1, only web2, web3"), "{refused}");
            assert_eq!(Accept::default().check(&asked), Ok(()));
        }
        let theirs = Request::Finish {
            id,
            vm: "web3".parse().unwrap(),
        };
        assert_eq!(accept.check(&theirs), Ok(()));
    }
}
