//! Facts for the tests of the checks.

use farside_vm_config::VmConfig;

use crate::{Facts, Finding, Level, facts::VmFacts};

/// A VM with that description.
pub(crate) fn vm(name: &str, description: &str) -> VmFacts {
    let mut config: VmConfig = toml::from_str(description).expect("a description");
    config.name = Some(name.parse().expect("a valid name"));
    VmFacts {
        name: name.to_owned(),
        path: format!("/etc/farside/vm/{name}.toml").into(),
        config: Ok(config),
        running: false,
    }
}

/// A host with one VM.
pub(crate) fn host_of(description: &str) -> Facts {
    Facts {
        vms: vec![vm("web1", description)],
        ..Facts::default()
    }
}

/// The one finding.
#[track_caller]
pub(crate) fn one(findings: Vec<Finding>) -> Finding {
    match <[Finding; 1]>::try_from(findings) {
        Ok([finding]) => finding,
        Err(other) => panic!("not one finding: {other:#?}"),
    }
}

/// The only finding; checks its level, that it contains the word, and that it states what to type
/// if there is something to fix.
#[track_caller]
pub(crate) fn says(findings: Vec<Finding>, level: Level, word: &str) -> Finding {
    let finding = one(findings);
    assert_eq!(finding.level, level, "{finding:#?}");
    assert!(finding.what.contains(word), "no {word:?} in {finding:#?}");
    assert_eq!(finding.why.is_empty(), level == Level::Ok, "{finding:#?}");
    if level == Level::Problem {
        assert!(!finding.fix.is_empty(), "{finding:#?}");
    }
    finding
}
