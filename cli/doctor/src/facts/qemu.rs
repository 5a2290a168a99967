//! The QEMUs that VMs are run by.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use farside_error_chain::Chain;
use farside_qemu_configs::{ProbeError, QemuBinary};

use super::VmFacts;
use crate::{Host, run::RunError};

/// QEMU, when a description names none.
const QEMU: &str = "qemu-system-x86_64";

/// One program.
#[derive(Clone, Debug)]
pub(crate) struct QemuFacts {
    pub(crate) program: PathBuf,
    /// Its version, or why it cannot be used.
    pub(crate) answer: Result<String, String>,
}

pub(crate) fn look(host: &Host, vms: &[VmFacts]) -> Vec<QemuFacts> {
    let named = vms.iter().filter_map(|vm| vm.config.as_ref().ok());
    let named = named.map(|config| config.qemu.clone().unwrap_or_else(|| QEMU.into()));
    let mut programs: BTreeSet<PathBuf> = named.collect();
    if programs.is_empty() {
        programs.insert(QEMU.into());
    }
    std::thread::scope(|scope| {
        let asked: Vec<_> = programs
            .into_iter()
            .map(|program| scope.spawn(|| probe(host, program)))
            .collect();
        let answers = asked.into_iter().map(|asked| asked.join());
        answers
            .map(|answer| answer.expect("asking does not panic"))
            .collect()
    })
}

fn probe(host: &Host, program: PathBuf) -> QemuFacts {
    let answer = QemuBinary::probe_by(&program, |args| {
        let answer = host.ask(&program, args);
        answer.map_err(|error| unanswered(&program, error))
    });
    let answer = answer.map(|qemu| qemu.version().to_string());
    QemuFacts {
        answer: answer.map_err(|Why(why)| why),
        program,
    }
}

struct Why(String);

impl From<ProbeError> for Why {
    fn from(error: ProbeError) -> Self {
        Self(Chain(&error).to_string())
    }
}

fn unanswered(program: &Path, error: RunError) -> Why {
    match error {
        RunError::Run(source) => ProbeError::Run {
            path: program.to_owned(),
            source,
        }
        .into(),
        other => Why(format!("{}: {other}", program.display())),
    }
}
